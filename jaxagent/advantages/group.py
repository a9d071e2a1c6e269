"""Advantages against the other rollouts of the same task.

All functions take `reward [N]` and `group [N]` (ids in [0, N), in any order) and return `[N]`, float32. Rows of one
logical rollout (`rollout`, ids in [0, N)) share its reward and count once. Rows with `valid=False` may hold any
reward: they enter no statistic and get 0. A group of one, and a group with max - min <= 1e-6 max(1, max |reward|),
get exactly 0. Under jit only shapes are checked; outside it a ValueError also names ids out of range and rewards of
valid rows that are not finite.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import concrete

EQUAL = 1e-6  # relative spread below which the rewards of a group are the same number


class _Group(NamedTuple):
  """Statistics of each row's group, one entry per row."""

  centered: Float[Array, "N"]
  variance: Float[Array, "N"]
  size: Float[Array, "N"]
  differs: Bool[Array, "N"]  # valid, and the group's rewards are not all equal


def group_relative(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  scale_eps: float = 1e-6,
) -> Float[Array, "N"]:
  """(r - mean) / (std + scale_eps) within the group.

  The standard deviation is the population's, in two passes. Dividing by it lifts tasks that are nearly always or nearly
  never solved; `group_centered` does not.
  Source: Shao et al. 2024, arXiv 2402.03300 (GRPO). Ours differs: TRL and verl divide by n - 1.
  """
  s = _statistics(reward, group, valid, rollout)
  return jnp.where(s.differs, s.centered / (jnp.sqrt(s.variance) + scale_eps), 0.0)


def group_centered(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
) -> Float[Array, "N"]:
  """r - mean within the group.

  Source: Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO). Ours differs: nothing.
  """
  s = _statistics(reward, group, valid, rollout)
  return jnp.where(s.differs, s.centered, 0.0)


def leave_one_out(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
) -> Float[Array, "N"]:
  """r_i minus the mean of the others: k / (k - 1) (r_i - mean) in a group of k.

  Source: Ahmadian et al. 2024, arXiv 2402.14740 (RLOO). Ours differs: nothing.
  """
  s = _statistics(reward, group, valid, rollout)
  return jnp.where(s.differs, s.centered * s.size / jnp.maximum(s.size - 1, 1), 0.0)


def _statistics(reward, group, valid, rollout) -> _Group:
  reward, group, valid, rollout = _checked(reward, group, valid, rollout)
  n = reward.shape[0]
  reward = jnp.where(valid, reward, 0.0)
  counted = first_rows(rollout, valid)

  def total(x):
    return jax.ops.segment_sum(jnp.where(counted, x, 0.0), group, n)[group]

  size = total(jnp.ones_like(reward))
  centered = reward - total(reward) / jnp.maximum(size, 1)
  centered -= total(centered) / jnp.maximum(size, 1)  # the first mean is rounded at the size of the rewards
  high = jax.ops.segment_max(jnp.where(counted, reward, -jnp.inf), group, n)[group]
  low = jax.ops.segment_min(jnp.where(counted, reward, jnp.inf), group, n)[group]
  scale = jnp.maximum(1.0, jnp.maximum(jnp.abs(high), jnp.abs(low)))
  return _Group(centered, total(centered**2) / jnp.maximum(size, 1), size, valid & (high - low > EQUAL * scale))


def first_rows(rollout: Int[Array, "N"], valid: Bool[Array, "N"]) -> Bool[Array, "N"]:
  """The first valid row of each logical rollout."""
  n = rollout.shape[0]
  row = jnp.arange(n)
  return valid & (row == jax.ops.segment_min(jnp.where(valid, row, n), rollout, n)[rollout])


def _checked(reward, group, valid, rollout):
  reward = jnp.asarray(reward)
  if not jnp.issubdtype(reward.dtype, jnp.floating):
    reward = reward.astype(jnp.float32)
  n = reward.shape[0] if reward.ndim else -1
  valid = jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid)
  rollout = jnp.arange(max(n, 0)) if rollout is None else jnp.asarray(rollout)
  group = jnp.asarray(group)
  for name, x in (("reward", reward), ("group", group), ("valid", valid), ("rollout", rollout)):
    if x.shape != (n,):
      raise ValueError(f"{name} must have one entry per row, shape ({max(n, 0)},), got {x.shape}")
  if concrete(reward, group, valid, rollout):
    for name, ids in (("group", np.asarray(group)), ("rollout", np.asarray(rollout))):
      if n and not (ids.min() >= 0 and ids.max() < n):
        raise ValueError(f"{name} must hold ids in [0, {n}), got {ids.min()}..{ids.max()}; renumber them")
    bad = np.flatnonzero(np.asarray(valid) & ~np.isfinite(np.asarray(reward, np.float32)))
    if len(bad):
      raise ValueError(
        f"reward is {reward[bad[0]]} in row {bad[0]}; a rollout without a reward must have valid=False, or it spoils"
        " its group"
      )
  return reward, group, valid, rollout
