"""A graph of tasks and environments that lends evidence to tasks that were never tried.

Reconstruction: EnvSched's paper was not available; the form of the similarity and of the propagation is ours.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes
from jaxagent.scheduling.statistics import TaskStatistics


def tool_jaccard(tools: Bool[Array, "E U"]) -> Float[Array, "E E"]:
  """|A and B| / |A or B| of the environments' sets of tools; 1 on the diagonal, 0 for two different empty sets."""
  check_shapes(tools=(tools, "E U"))
  x = jnp.asarray(tools, jnp.float32)
  both = x @ x.T
  size = jnp.diag(both)
  either = size[:, None] + size[None] - both
  same = jnp.eye(x.shape[0])
  return jnp.where(either > 0, both / jnp.maximum(either, 1.0), same)


def task_similarity(
  feature: Float[Array, "M D"],
  env: Int[Array, "M"],
  *,
  env_similarity: Float[Array, "E E"] | None = None,
  env_share: float = 0.5,
  neighbours: int = 16,
  floor: float = 0.2,
) -> Float[Array, "M M"]:
  """a s(env_i, env_j) + (1 - a) max(cos(e_i, e_j), 0) for the nearest neighbours of either task, 0 elsewhere.

  a is `env_share`; s is 1 for one environment and 0 for two, or `env_similarity` (`tool_jaccard`). Each task keeps its
  `neighbours` nearest others of at least `floor`; the result is symmetric with a zero diagonal. Ties go to the lower
  number. Holds M^2 numbers.
  """
  check_shapes(feature=(feature, "M D"), env=(env, "M"), env_similarity=(env_similarity, "E E"))
  feature, env = jnp.asarray(feature, jnp.float32), jnp.asarray(env)
  if env_similarity is None:
    near = (env[:, None] == env[None]).astype(jnp.float32)
  else:
    check_ids("env", env, len(env_similarity))
    near = jnp.asarray(env_similarity, jnp.float32)[env[:, None], env[None]]
  norm = jnp.sqrt(jnp.sum(feature**2, -1, keepdims=True))
  unit = feature / jnp.where(norm > 0, norm, 1.0)
  full = env_share * near + (1 - env_share) * jnp.maximum(unit @ unit.T, 0.0)
  full = jnp.where(jnp.eye(env.shape[0], dtype=bool) | (full < floor), 0.0, full)
  rank = jnp.argsort(jnp.argsort(-full, axis=1, stable=True), axis=1)
  nearest = jnp.where(rank < neighbours, full, 0.0)
  return jnp.maximum(nearest, nearest.T)


def neighbour_weights(similarity: Float[Array, "M M"]) -> Float[Array, "M M"]:
  """Rows of the similarity divided by their sums; a task without neighbours has a row of zeros."""
  check_shapes(similarity=(similarity, "M M"))
  similarity = jnp.asarray(similarity, jnp.float32)
  total = jnp.sum(similarity, 1, keepdims=True)
  return similarity / jnp.where(total > 0, total, 1.0)


def propagate(
  state: TaskStatistics, weights: Float[Array, "M M"], *, group_size: int, share: float = 0.5, hops: int = 1
) -> TaskStatistics:
  """Adds to each task m pseudo-rollouts of its neighbours' mean reward, m = share min(weighted count, group_size).

  So neighbours never weigh more than `share` of one group; a task's own evidence soon dominates. Nothing is sampled.
  A task without (tried) neighbours is unchanged. `hops`: how far evidence travels. Call `statistics_at` before.
  """
  check_shapes(count=(state.count, "M"), weights=(weights, "M M"))
  weights = jnp.asarray(weights, jnp.float32)
  lent = state
  for _ in range(hops):
    count = weights @ lent.count
    pseudo = share * jnp.minimum(count, group_size) / jnp.where(count > 0, count, 1.0)
    lent = TaskStatistics(
      state.count + pseudo * count,
      state.total + pseudo * (weights @ lent.total),
      state.square + pseudo * (weights @ lent.square),
      state.failed,
      state.version,
    )
  return lent
