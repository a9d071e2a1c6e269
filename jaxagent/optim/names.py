"""What a parameter's path says of it. Paths are tuples of lower-case parts: ("layers", "attention", "q")."""

import re

import jax

STACKS = {"layers", "blocks", "stack", "scan", "h"}  # containers whose arrays have a leading axis of layers
EMBEDDINGS = {"embed", "embedding", "embeddings", "embedder", "wte", "wpe", "position", "positions", "pos"}
VECTORS = {"bias", "norm", "layernorm", "rmsnorm", "groupnorm", "batchnorm", "ln", "gamma", "beta"}
HEADS = {"head", "unembed", "unembedding", "logits", "classifier"}
ROUTERS = {"router", "gating"}
EXPERTS = {"expert", "experts", "moe", "mlp", "ffn", "feedforward"}
ATTENTION = {"attention", "attn", "selfattention", "query", "key", "value"}
FUSED = {"qkv", "wqkv", "kv", "in_proj", "query_key_value", "c_attn", "gate_up", "gate_and_up", "gate_up_proj"}
LORA = {"lora"}
WRAPPERS = {"kernel", "weight", "w"}  # the last part, where it says nothing


def parts(path: tuple) -> tuple[str, ...]:
  """The keys of a JAX key path; the `.value` of a Flax variable is no part of the name."""
  keys = [_text(key) for key in path]
  if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey | jax.tree_util.FlattenedIndexKey):
    if keys[-1] in ("value", "0"):
      keys = keys[:-1]
  return tuple(part for key in keys for part in re.split(r"[/.]", key) if part)


def ends_with(path: tuple[str, ...], ending: str) -> bool:
  want = tuple(ending.lower().split("/"))
  return path[-len(want) :] == want


def stacked(path: tuple[str, ...]) -> int:
  """1 if a leading axis runs over layers: under "layers" and the like, unless a number says which layer."""
  for i, part in enumerate(path[:-1]):
    if part in STACKS and not path[i + 1].isdigit():
      return 1
  return 0


def is_vector(path) -> bool:
  return bool(_words(path[-2:]) & VECTORS) or path[-1] == "scale"


def is_embedding(path) -> bool:
  return bool(_words(path) & EMBEDDINGS)


def is_head(path) -> bool:
  return any(_tokens(part)[-1:] and _tokens(part)[-1] in HEADS for part in path)


def is_router(path, rank: int) -> bool:
  """By name, or the "gate" of a mixture that is one matrix where its experts' are many."""
  named = [part for part in path if part not in WRAPPERS]
  mixture = bool(_words(path) & {"moe", "experts"}) and "experts" not in path
  return bool(_words(path) & ROUTERS) or (mixture and rank == 2 and named[-1:] == ["gate"])


def is_fused(path) -> bool:
  return any(part in FUSED or bool(set(_tokens(part)) & {"qkv", "wqkv"}) for part in path)


def is_expert(path) -> bool:
  return bool(_words(path) & EXPERTS) and not _words(path) & ATTENTION


def is_lora(path) -> bool:
  return bool(_words(path) & LORA)


def _text(key) -> str:
  return str(next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), key)).lower()


def _tokens(part: str) -> list[str]:
  return [token for token in part.split("_") if token and not token.isdigit()]


def _words(path) -> set[str]:
  return {token for part in path for token in (part, *_tokens(part))}
