"""What is remembered of each task: discounted counts, sums and squares of rewards, as a state with a pure `update`.

M tasks; rewards in [0, 1]. Time is the version of the policy that produced a rollout, not the moment it arrived: late
results merge to the same state in any order.

Reconstruction: EnvSched's paper was not available. The statistics, the Beta prior and all constants are ours.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_range, check_shapes
from jaxagent.types import pytree


@pytree
class TaskStatistics:
  """Discounted to `version`, the newest policy version seen for the task."""

  count: Float[Array, "M"]  # rollouts
  total: Float[Array, "M"]  # of their rewards
  square: Float[Array, "M"]  # of their squared rewards
  failed: Float[Array, "M"]  # rollouts lost to a failure: a cost, no evidence
  version: Int[Array, "M"]


def no_statistics(tasks: int) -> TaskStatistics:
  zero = jnp.zeros(tasks, jnp.float32)
  return TaskStatistics(zero, zero, zero, zero, jnp.zeros(tasks, jnp.int32))


def update_statistics(
  state: TaskStatistics,
  task: Int[Array, "N"],
  reward: Float[Array, "N"],
  version: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  discount: float = 0.98,
) -> TaskStatistics:
  """n, S, Q <- discount^dv (n, S, Q) + (1, r, r^2) for each logical rollout, dv counted in policy versions.

  `task` in [0, M) and `reward` in [0, 1] per row; rows of one logical rollout (`rollout`, ids in [0, N)) count once.
  `valid=False` rollouts add to `failed` alone. Commutative: the order of updates does not matter. Without a discount
  a task that always or never succeeded would not be tried again.
  """
  tasks, n = state.count.shape[0], jnp.shape(task)[0]
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid)
  rollout = jnp.arange(n) if rollout is None else jnp.asarray(rollout)
  check_shapes(
    task=(task, "N"), reward=(reward, "N"), version=(version, "N"), valid=(valid, "N"), rollout=(rollout, "N")
  )
  check_ids("task", task, tasks)
  check_ids("rollout", rollout, n)
  check_range("reward", reward, 0.0, 1.0, where=valid)
  task, version = jnp.asarray(task), jnp.asarray(version, jnp.int32)
  reward = jnp.where(valid, jnp.asarray(reward, jnp.float32), 0.0)
  first = _first_row(rollout, valid)
  seen = jax.ops.segment_max(version, task, tasks)  # the least integer where there is none
  old = statistics_at(state, jnp.maximum(state.version, seen), discount=discount)
  weight = jnp.where(first, discount ** (old.version[task] - version).astype(jnp.float32), 0.0)

  def added(x):
    return jax.ops.segment_sum(weight * x, task, tasks)

  return TaskStatistics(
    old.count + added(valid), old.total + added(reward), old.square + added(reward**2), old.failed + added(~valid),
    old.version,
  )  # fmt: skip


def statistics_at(state: TaskStatistics, version: Int[Array, "..."], *, discount: float = 0.98) -> TaskStatistics:
  """The same statistics seen from `version` (one for all tasks, or `[M]`): older evidence weighs less."""
  version = jnp.broadcast_to(jnp.asarray(version, jnp.int32), state.version.shape)
  d = discount ** jnp.maximum(version - state.version, 0).astype(jnp.float32)
  newest = jnp.maximum(version, state.version)
  return TaskStatistics(d * state.count, d * state.total, d * state.square, d * state.failed, newest)


def mean_reward(state: TaskStatistics) -> Float[Array, "M"]:
  """S / n; NaN for a task without evidence."""
  return jnp.where(state.count > 0, state.total / jnp.where(state.count > 0, state.count, 1.0), jnp.nan)


def reward_variance(state: TaskStatistics) -> Float[Array, "M"]:
  """max(Q / n - (S / n)^2, 0); NaN for a task without evidence."""
  n = jnp.where(state.count > 0, state.count, 1.0)
  return jnp.where(state.count > 0, jnp.maximum(state.square / n - (state.total / n) ** 2, 0.0), jnp.nan)


def _first_row(rollout, valid):
  """The first valid row of each logical rollout, or its first row if none is valid."""
  n = rollout.shape[0]
  rank = jnp.where(valid, 0, n) + jnp.arange(n)
  return rank == jax.ops.segment_min(rank, rollout, n)[rollout]
