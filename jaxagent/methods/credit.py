"""Methods that spread a rollout's advantage over its tokens by what a judge or a teacher said of them."""

from dataclasses import replace
from functools import partial

from jaxagent.advantages import prefix_suffix, redistribute_by_quality, weigh_by_privileged
from jaxagent.losses import dual_clip, token_mean
from jaxagent.methods.annotators import Given
from jaxagent.methods.group import grpo, grpo_kl
from jaxagent.methods.objective import Annotator, Method
from jaxagent.metrics import advantage_shape, split_shares, uncited_shares
from jaxagent.rewards import rubric_reward

VERDICTS = Given(("verdict", "step_quality"))
PRIVILEGED = Given(("logp_privileged",))
FIRST_ERROR = Given(("first_error",))


def draco(coefficient: float = 0.01, annotator: Annotator = VERDICTS) -> Method:
  """Gandhi et al. 2026, arXiv 2609.04094: a rubric pays, blind to the outcome, and its citations spread the advantage.

  `verdict [N, C]` and `step_quality [N, S]` (see `rewards.step_quality`); k3 with `coefficient`,
  dual clip 3, token mean.
  """
  parent = grpo_kl(coefficient)
  objective = replace(
    parent.objective, advantage=(*grpo.objective.advantage, redistribute_by_quality), surrogate=dual_clip,
    aggregate=token_mean,
  )  # fmt: skip
  return replace(
    parent, objective=objective, reward=(rubric_reward,), annotators=(annotator,),
    metrics=(("uncited", uncited_shares), ("advantage", advantage_shape)),
  )  # fmt: skip


def taspo(bound: float = 0.5, scale: float = 1.0, annotator: Annotator = PRIVILEGED) -> Method:
  """Yang et al. 2026, arXiv 2608.31077: turns weighed by how far guidance from successful siblings supports them.

  `logp_privileged [N, T]`: the sampled tokens' log-probs (nats) with the guidance in the prompt; the batch may hold
  `executable [N, T]` too. `bound` and `scale` are ours.
  """
  advantage = (*grpo.objective.advantage, partial(weigh_by_privileged, bound=bound, scale=scale))
  return replace(
    grpo, objective=replace(grpo.objective, advantage=advantage), annotators=(annotator,),
    metrics=(("advantage", advantage_shape),),
  )  # fmt: skip


def cliff(prefix: float = 0.0, annotator: Annotator = FIRST_ERROR) -> Method:
  """Han et al. 2026, arXiv 2609.02817: failures are punished from their first error on, outcomes are 0 or 1.

  `first_error [N]`: its place in the row, -1 where the teacher found none.
  """
  advantage = (partial(prefix_suffix, prefix=prefix),)
  return replace(
    grpo, objective=replace(grpo.objective, advantage=advantage), annotators=(annotator,),
    metrics=(("failures", split_shares), ("advantage", advantage_shape)),
  )  # fmt: skip
