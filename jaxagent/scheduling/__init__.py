"""Which task next, as pure functions: EnvSched's parts, uniform and weighted draws, dynamic sampling."""

from jaxagent.scheduling.batch import (
  Choice,
  diverse_batch,
  environment_quota,
  exploring_batch,
  lift_quota,
  uniform_batch,
  weighted_batch,
)
from jaxagent.scheduling.filtering import mixed_groups, mixed_share
from jaxagent.scheduling.graph import neighbour_weights, propagate, task_similarity, tool_jaccard
from jaxagent.scheduling.informativeness import (
  beta_posterior,
  expected_variance,
  mixed_probability,
  posterior_deviation,
  recency_bonus,
  solve_rate_spread,
  task_score,
)
from jaxagent.scheduling.statistics import (
  TaskStatistics,
  mean_reward,
  no_statistics,
  reward_variance,
  statistics_at,
  update_statistics,
)

__all__ = [
  "Choice",
  "TaskStatistics",
  "beta_posterior",
  "diverse_batch",
  "environment_quota",
  "expected_variance",
  "exploring_batch",
  "lift_quota",
  "mean_reward",
  "mixed_groups",
  "mixed_probability",
  "mixed_share",
  "neighbour_weights",
  "no_statistics",
  "posterior_deviation",
  "propagate",
  "recency_bonus",
  "reward_variance",
  "solve_rate_spread",
  "statistics_at",
  "task_score",
  "task_similarity",
  "tool_jaccard",
  "uniform_batch",
  "update_statistics",
  "weighted_batch",
]
