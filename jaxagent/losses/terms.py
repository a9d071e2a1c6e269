"""Terms added to the surrogate per token, to be minimised; `[B, T]` in and out, log-probs in nats.

An estimator of a KL's value and an estimator of its gradient are different things; each docstring says which it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0


def kl_k1(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """log pi - log pi_ref: unbiased for KL(pi || ref) in value, may be negative. Not a loss: its gradient has mean 0.

  Source: Schulman 2020, "Approximating KL divergence".
  """
  return logp - logp_ref


def kl_k3(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """exp(d) - d - 1 with d = log pi_ref - log pi: unbiased for KL(pi || ref) in value, never negative.

  As a loss (GRPO's) its expected gradient is that of KL(ref || pi), not of KL(pi || ref): use `kl_reverse` for that.
  Source: Schulman 2020; Shao et al. 2024, arXiv 2402.03300.
  """
  d = jnp.clip(logp_ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.expm1(d) - d


def kl_reverse(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], logp_ref: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """(pi / pi_old) k3: for tokens drawn from pi_old, unbiased for KL(pi || ref) of each token in value and in gradient.

  The gradient of a token is r (log pi - log pi_ref) grad log pi. It does not see the effect of a token on later states.
  Source: arXiv 2512.02556 (DeepSeek-V3.2). Ours differs: nothing.
  """
  return jnp.exp(jnp.clip(logp - logp_old, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * kl_k3(logp, logp_ref)


def entropy_bonus(entropy: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """-H, with the exact gradient of the entropy over the whole vocabulary; a positive coefficient raises the entropy."""
  return -entropy
