"""Methods for several agents that share one reward: the rows of one `rollout`."""

from dataclasses import replace

from jaxagent.advantages import team_relative
from jaxagent.losses import agent_mean, token_mean
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Method
from jaxagent.metrics import piu_means


def teamgym() -> Method:
  """TeamGym (2026): GRPO with a team as one member of its group, one advantage for every agent's tokens; token mean.

  Reconstruction: the paper's text was not available.
  """
  objective = replace(grpo.objective, advantage=(team_relative,), aggregate=token_mean)
  return replace(grpo, objective=objective, metrics=(("piu", piu_means),))


def teamgym_per_agent() -> Method:
  """`teamgym` in which an agent weighs the same however much it says."""
  parent = teamgym()
  return replace(parent, objective=replace(parent.objective, aggregate=agent_mean))
