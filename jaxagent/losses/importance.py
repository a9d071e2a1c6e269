"""Corrections of the gap between the sampler (`logp_rollout`) and the trainer before the update (`logp_old`).

rho = pi_old / pi_rollout, log-probs in nats under the same temperature, over the whole vocabulary. Masked tokens may
hold anything. No gradient flows. They correct the engine gap, not staleness (that is the surrogate's ratio), and not
truncated sampling.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0


def truncated_importance(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, cap: float = 2.0
) -> Float[Array, "N T"]:
  """w = min(rho, cap): a weight of the surrogate; biased for finite cap.

  Source: Yao et al. 2025 (TIS). Ours differs: nothing.
  """
  return jnp.minimum(_rho(logp_old, logp_rollout), cap)


def masked_importance(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, low: float = 0.5, high: float = 5.0
) -> Float[Array, "N T"]:
  """w = rho where low <= rho <= high, else 0: a weight; the dropped tokens still count in denominators.

  Source: arXiv 2510.18855 (IcePop). Ours differs: nothing.
  """
  rho = _rho(logp_old, logp_rollout)
  return jnp.where((low <= rho) & (rho <= high), rho, 0.0)


def importance_within(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, low: float = 0.5, high: float = 2.0
) -> Bool[Array, "N T"]:
  """keep = low <= rho <= high: a mask; the dropped tokens leave denominators and terms too.

  Source: token-level masked importance sampling (MIS), as in verl. Ours differs: nothing.
  """
  rho = _rho(logp_old, logp_rollout)
  return (low <= rho) & (rho <= high)


def _rho(logp_old, logp_rollout):
  return jax.lax.stop_gradient(jnp.exp(jnp.clip(logp_old - logp_rollout, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
