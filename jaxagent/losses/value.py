"""Losses and diagnostics of a critic.

`value[..., t]` is of the state before token t, `returns` is what it predicts, in units of reward. The losses are per
token, `[B, T]` in and out, to be summed with token weights like a surrogate.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxagent.checks import check_shapes
from jaxagent.types import pytree


def value_squared(value: Float[Array, "*B T"], returns: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  """(value - returns)^2 / 2."""
  check_shapes(value=(value, "*B"), returns=(returns, "*B"))
  return 0.5 * jnp.square(_float(value) - _float(returns))


def value_clip(
  value: Float[Array, "*B T"], value_old: Float[Array, "*B T"], returns: Float[Array, "*B T"], *, clip: float = 0.2
) -> Float[Array, "*B T"]:
  """max((v - R)^2, (v_clip - R)^2) / 2 with v_clip = v_old + clamp(v - v_old, -clip, clip).

  No gradient where v has left the interval towards R by more than `clip`. `clip` is in units of reward: do not use it
  with rewards of another scale.
  Source: Schulman et al. 2017 (PPO's code); arXiv 2609.11042 (T1) writes it without the 1/2.
  """
  check_shapes(value=(value, "*B"), value_old=(value_old, "*B"), returns=(returns, "*B"))
  value, value_old, returns = _float(value), _float(value_old), _float(returns)
  clipped = value_old + jnp.clip(value - value_old, -clip, clip)
  return 0.5 * jnp.maximum(jnp.square(value - returns), jnp.square(clipped - returns))


@pytree
class ValueMoments:
  """Counts, means and sums of squared deviations of the returns and of the errors R - v; `a + b` merges two parts."""

  count: Float[Array, ""]
  mean: Float[Array, "2"]
  deviation: Float[Array, "2"]

  def __add__(self, other: "ValueMoments") -> "ValueMoments":
    count = self.count + other.count
    total = jnp.maximum(count, 1)
    step = other.mean - self.mean
    mean = self.mean + step * other.count / total
    return ValueMoments(
      count, mean, self.deviation + other.deviation + step**2 * self.count * other.count / total
    )


def value_moments(
  value: Float[Array, "*B T"], returns: Float[Array, "*B T"], mask: Bool[Array, "*B T"]
) -> ValueMoments:
  """What `explained_variance_of` needs of one part of a batch, in two passes. Masked places may hold anything."""
  check_shapes(value=(value, "*B"), returns=(returns, "*B"), mask=(mask, "*B"))
  mask = jnp.asarray(mask)
  x = jnp.stack([_float(returns), _float(returns) - _float(value)], -1).reshape(-1, 2)
  keep = mask.reshape(-1, 1)
  x = jnp.where(keep, x, 0.0)
  count = jnp.sum(mask).astype(jnp.float32)
  mean = jnp.sum(x, 0) / jnp.maximum(count, 1)
  return ValueMoments(count, mean, jnp.sum(jnp.where(keep, jnp.square(x - mean), 0.0), 0))


def explained_variance_of(moments: ValueMoments) -> Float[Array, ""]:
  """1 - Var(R - v) / Var(R); NaN where the returns are all equal (to 1e-6 of their size) or there are none."""
  floor = moments.count * jnp.square(1e-6 * jnp.maximum(1.0, jnp.abs(moments.mean[0])))
  defined = moments.deviation[0] > floor
  ratio = moments.deviation[1] / jnp.where(defined, moments.deviation[0], 1.0)
  return jnp.where(defined, 1.0 - ratio, jnp.nan)


def explained_variance(
  value: Float[Array, "*B T"], returns: Float[Array, "*B T"], mask: Bool[Array, "*B T"]
) -> Float[Array, ""]:
  """1 - Var(R - v) / Var(R) over all masked tokens: 1 is perfect, 0 no better than a constant, no lower bound.

  Over the whole batch, never a mean over parts: add up `value_moments` of microbatches. NaN, to be reported and
  skipped, where all returns are equal. Says nothing of the policy's gain.
  Source: arXiv 2609.11042 (T1). Ours differs: the case of equal returns.
  """
  return explained_variance_of(value_moments(value, returns, mask))


def _float(x):
  return jnp.asarray(x, jnp.float32)
