"""Surrogates: per-token losses whose gradient is the policy gradient. Log-probs in nats; shapes `[B, T]` in and out.

The loss zeroes log-probs and advantages where the mask is False before it calls them. Log ratios are clamped to +-20.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_LOG_RATIO = 20.0


def reinforce(logp: Float[Array, "B T"], advantage: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """-A log pi. For data from the current parameters only: nothing corrects staleness.

  Source: Williams 1992. With advantage 1 it is maximum likelihood.
  """
  return -advantage * logp


def ppo_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  low: float = 0.2,
  high: float = 0.2,
) -> Float[Array, "B T"]:
  """-min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old of the token.

  `logp_old` must be from the parameters before the first update on the batch; against the current ones it clips
  nothing.
  Source: Schulman et al. 2017, arXiv 1707.06347; high > low is DAPO's clip-higher, arXiv 2503.14476.
  """
  return _clipped(_ratio(logp - logp_old), advantage, low, high)


def gspo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  *,
  low: float = 3e-4,
  high: float = 4e-4,
) -> Float[Array, "B T"]:
  """-min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log ratio over the row's kept tokens).

  The value is the sequence ratio at every token, the gradient of token t flows through log pi_t alone (GSPO-token),
  so under `sequence_mean` and an advantage per sequence it is GSPO. The ratio is per unbroken row (branches have
  their own).
  Source: Zheng et al. 2025, arXiv 2507.18071. Ours differs: nothing.
  """
  mean = _segment_mean(jnp.where(mask, logp - logp_old, 0.0), mask, segment)
  log_ratio = jax.lax.stop_gradient(mean) + logp - jax.lax.stop_gradient(logp)
  return _clipped(_ratio(log_ratio), advantage, low, high)


def _ratio(log_ratio):
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(ratio, advantage, low, high):
  return jnp.maximum(-ratio * advantage, -jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def _segment_mean(x, mask, segment):
  """Mean of x over the masked tokens of each segment, at every token of it."""
  width = x.shape[-1]

  def row(x, mask, ids):
    total = jax.ops.segment_sum(x, ids, width)
    count = jax.ops.segment_sum(mask.astype(x.dtype), ids, width)
    return (total / jnp.maximum(count, 1))[ids]

  return jax.vmap(row)(x, mask, jnp.maximum(segment, 0))
