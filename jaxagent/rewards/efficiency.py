"""Rewards that make length cost something."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def soft_overlong(
  reward: Float[Array, "N"],
  length: Int[Array, "N"],
  *,
  rollout: Int[Array, "N"] | None = None,
  limit: int = 20480,
  margin: int = 4096,
) -> Float[Array, "N"]:
  """reward + clip((limit - margin - length) / margin, -1, 0).

  Free up to limit - margin, then linear down to -1 at limit and beyond.
  `length` in tokens. The rows of one logical rollout (`rollout`, ids in [0, N)) share the penalty of its longest row.
  Source: Yu et al. 2025, arXiv 2503.14476 (DAPO). Ours differs: the paper counts the response, this counts what it is
  given (in a Method: the whole row, prompt and tool results included).
  """
  if not 0 < margin <= limit:
    raise ValueError(f"soft_overlong needs 0 < margin <= limit, got margin {margin} and limit {limit}")
  if rollout is not None:
    length = jax.ops.segment_max(length, rollout, length.shape[0])[rollout]
  return reward + jnp.clip((limit - margin - length) / margin, -1.0, 0.0)
