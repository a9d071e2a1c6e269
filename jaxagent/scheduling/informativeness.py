"""How much a group of rollouts of a task can teach, from a Beta posterior of its success rate.

Reconstruction: EnvSched's paper was not available; the posterior, the two measures and the constants are ours. Rewards
in [0, 1] count as fractions of a success.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxagent.checks import check_range, check_shapes
from jaxagent.scheduling.statistics import TaskStatistics


def beta_posterior(
  state: TaskStatistics, *, prior: tuple[float, float] = (1.0, 1.0)
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
  """a = prior + S, b = prior + n - S; the expected success rate is a / (a + b)."""
  return prior[0] + state.total, prior[1] + jnp.maximum(state.count - state.total, 0.0)


def expected_variance(a: Float[Array, "*M"], b: Float[Array, "*M"]) -> Float[Array, "*M"]:
  """E[p (1 - p)] = a b / ((a + b) (a + b + 1)): the variance within a group, what group-relative advantages live on."""
  a, b = _pair(a, b)
  return a * b / ((a + b) * (a + b + 1))


def mixed_probability(a: Float[Array, "*M"], b: Float[Array, "*M"], *, group_size: int) -> Float[Array, "*M"]:
  """1 - E[p^G] - E[(1 - p)^G]: the probability that G rollouts are neither all right nor all wrong.

  With a Beta function B: E[p^G] = B(a + G, b) / B(a, b), here a product of G factors.
  """
  a, b = _pair(a, b)
  j = jnp.arange(group_size)
  whole = (a + b)[..., None] + j
  return 1.0 - jnp.prod((a[..., None] + j) / whole, -1) - jnp.prod((b[..., None] + j) / whole, -1)


def posterior_deviation(a: Float[Array, "*M"], b: Float[Array, "*M"]) -> Float[Array, "*M"]:
  """sqrt(a b / ((a + b)^2 (a + b + 1))): how uncertain the success rate still is."""
  a, b = _pair(a, b)
  return jnp.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))


def task_score(
  informativeness: Float[Array, "*M"], uncertainty: Float[Array, "*M"], *, uncertainty_share: float = 0.5
) -> Float[Array, "*M"]:
  """informativeness + c uncertainty."""
  check_shapes(informativeness=(informativeness, "*M"), uncertainty=(uncertainty, "*M"))
  return jnp.asarray(informativeness) + uncertainty_share * jnp.asarray(uncertainty)


def recency_bonus(state: TaskStatistics, version: Int[Array, ""], *, coefficient: float = 0.01) -> Float[Array, "M"]:
  """c log(1 + versions since the task was last seen), to be added to a score."""
  return coefficient * jnp.log1p(jnp.maximum(version - state.version, 0).astype(jnp.float32))


def solve_rate_spread(rate: Float[Array, "*M"], *, floor: float = 0.05) -> Float[Array, "*M"]:
  """sqrt(v (1 - v)) + floor: a sampling weight from an estimated solve rate v in [0, 1].

  Source: arXiv 2608.24870 (SPO++). Ours differs: nothing.
  """
  check_range("rate", rate, 0.0, 1.0)
  rate = jnp.asarray(rate, jnp.float32)
  return jnp.sqrt(jnp.maximum(rate * (1 - rate), 0.0)) + floor


def _pair(a, b):
  check_shapes(a=(a, "*M"), b=(b, "*M"))
  return jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
