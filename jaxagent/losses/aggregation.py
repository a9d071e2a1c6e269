"""Token weights `[N, T]`: the loss is the plain sum of weight times per-token loss, however the batch is cut.

`keep [N, T]` marks the tokens that one optimizer update trains on. `rollout [N]` (ids in [0, N)) says which rows are
one logical rollout: it counts once, and only if it has a kept token. A batch without kept tokens has weights 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_mean(keep: Bool[Array, "N T"]) -> Float[Array, "N T"]:
  """1 / (kept tokens of the update): every token counts the same, long rollouts count more.

  Source: Yu et al. 2025, arXiv 2503.14476 (DAPO).
  """
  return _over(keep, jnp.sum(keep))


def sequence_mean(keep: Bool[Array, "N T"], rollout: Int[Array, "N"]) -> Float[Array, "N T"]:
  """1 / (rollouts x kept tokens of the rollout): the mean over rollouts of the mean over tokens.

  Source: Shao et al. 2024, arXiv 2402.03300 (GRPO). Ours differs: fully masked rollouts are not counted (as in verl,
  not TRL).
  """
  tokens = _tokens(keep, rollout)
  return _over(keep, jnp.sum(tokens > 0) * jnp.maximum(tokens, 1)[rollout][:, None].astype(jnp.float32))


def sequence_sum(keep: Bool[Array, "N T"], rollout: Int[Array, "N"]) -> Float[Array, "N T"]:
  """1 / rollouts: the mean over rollouts of the sum over tokens, the policy gradient of whole sequences."""
  return _over(keep, jnp.sum(_tokens(keep, rollout) > 0))


def constant(keep: Bool[Array, "N T"], rollout: Int[Array, "N"], *, max_tokens: int) -> Float[Array, "N T"]:
  """1 / (rollouts x max_tokens), whatever the rollouts' lengths; bind `max_tokens` with functools.partial.

  Source: Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO).
  """
  return sequence_sum(keep, rollout) / max_tokens


def _tokens(keep, rollout):
  """Kept tokens of each logical rollout, by id."""
  return jax.ops.segment_sum(jnp.sum(keep, axis=1), rollout, keep.shape[0])


def _over(keep, denominator):
  return keep / jnp.maximum(denominator, 1).astype(jnp.float32)
