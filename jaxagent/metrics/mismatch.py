"""How far the sampler (`logp_rollout`) is from the trainer at the same parameters (`logp_old`).

rho = pi_old / pi_rollout per token, log-probs in nats under the same temperature; log rho is clamped to +-20. All take
`[N, T]` arrays and the mask of sampled tokens, return one number over the whole batch, and read "no gap" for an empty
mask. Masked places may hold anything. They diagnose; `jaxagent.losses` corrects.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes

MAX_LOG_RATIO = 20.0


def rollout_kl_k1(
  logp_old: Float[Array, "*N T"], logp_rollout: Float[Array, "*N T"], mask: Bool[Array, "*N T"]
) -> Float[Array, ""]:
  """mean(-log rho): unbiased for KL(rollout || old), in nats; may be negative."""
  return -_mean(_log_ratio(logp_old, logp_rollout, mask), mask)


def rollout_kl_k3(
  logp_old: Float[Array, "*N T"], logp_rollout: Float[Array, "*N T"], mask: Bool[Array, "*N T"]
) -> Float[Array, ""]:
  """mean(rho - 1 - log rho): unbiased for KL(rollout || old), in nats; never negative."""
  d = _log_ratio(logp_old, logp_rollout, mask)
  return _mean(jnp.expm1(d) - d, mask)


def chi_square_token(
  logp_old: Float[Array, "*N T"], logp_rollout: Float[Array, "*N T"], mask: Bool[Array, "*N T"]
) -> Float[Array, ""]:
  """mean(rho^2) - 1 over tokens: the variance of the token weights. A few tokens decide it."""
  return _mean(jnp.expm1(2 * _log_ratio(logp_old, logp_rollout, mask)), mask)


def chi_square_sequence(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
) -> Float[Array, ""]:
  """mean((prod rho)^2) - 1 over logical rollouts with a masked token (`rollout`, ids in [0, N); None: rows).

  The log of the product is clamped to +-20.
  """
  check_shapes(mask=(mask, "N T"), rollout=(rollout, "N"))
  check_ids("rollout", rollout, len(mask))
  d = _log_ratio(logp_old, logp_rollout, mask)
  n = d.shape[0]
  rollout = jnp.arange(n) if rollout is None else jnp.asarray(rollout)
  total = jax.ops.segment_sum(jnp.sum(d, 1), rollout, n)
  present = jax.ops.segment_sum(jnp.sum(mask, 1), rollout, n) > 0
  return _mean(jnp.expm1(2 * jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)), present)


def extreme_share(
  logp_old: Float[Array, "*N T"], logp_rollout: Float[Array, "*N T"], mask: Bool[Array, "*N T"], *, tau: float = 2.0
) -> Float[Array, ""]:
  """F(tau): the share of tokens with max(rho, 1 / rho) > tau.

  Source: Ma et al. 2025, arXiv 2510.11370 (R3). Reconstruction: the definition is the usual reading of its figure.
  """
  d = jnp.abs(_log_ratio(logp_old, logp_rollout, mask))
  return _mean((d > jnp.log(jnp.float32(tau))).astype(jnp.float32), mask)


def perplexity_ratio(
  logp_old: Float[Array, "*N T"], logp_rollout: Float[Array, "*N T"], mask: Bool[Array, "*N T"]
) -> Float[Array, ""]:
  """exp(-mean log rho): the trainer's perplexity over the sampler's, on the sampled tokens; 1 where they agree."""
  return jnp.exp(rollout_kl_k1(logp_old, logp_rollout, mask))


def _log_ratio(logp_old, logp_rollout, mask):
  check_shapes(logp_old=(logp_old, "*N"), logp_rollout=(logp_rollout, "*N"), mask=(mask, "*N"))
  d = jnp.asarray(logp_old, jnp.float32) - jnp.asarray(logp_rollout, jnp.float32)
  return jnp.clip(jnp.where(jnp.asarray(mask), d, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _mean(x, mask):
  return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
