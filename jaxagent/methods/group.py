"""Methods whose baseline is the other rollouts of the same task. Each is a diff against another.

Where a batch is split over several updates, the surrogates with a clip are meant; `rloo` has none. Hyper-parameters
are the papers'; change one by `dataclasses.replace` and `functools.partial`.
"""

from dataclasses import replace
from functools import partial

from jaxtyping import Array, Bool

from jaxagent.advantages import group_centered, group_relative, leave_one_out
from jaxagent.losses import constant, kl_k3, ppo_clip, reinforce, sequence_mean, sequence_sum, token_mean
from jaxagent.losses import gspo as sequence_clip
from jaxagent.methods.objective import Coefficient, Method, Objective
from jaxagent.rewards import soft_overlong


def not_truncated(truncated: Bool[Array, "N"]) -> Bool[Array, "N"]:
  """Keeps the rollouts that ended by themselves: DAPO's overlong filtering. The others still count in their group."""
  return ~truncated


grpo = Method(Objective(advantage=(group_relative,), surrogate=ppo_clip, aggregate=sequence_mean))
"""Shao et al. 2024, arXiv 2402.03300, with the sequence mean of the paper and without its KL term (see `grpo_kl`)."""


def grpo_kl(coefficient: Coefficient = 0.04) -> Method:
  """GRPO with the paper's k3 term against the reference policy; the paper's coefficient is 0.04, R1's is 0.001."""
  return replace(grpo, objective=replace(grpo.objective, terms=((coefficient, kl_k3),)))


def dr_grpo_within(max_tokens: int = 3000) -> Method:
  """Liu et al. 2025, arXiv 2503.20783: no division by the std, and a constant in place of the lengths."""
  aggregate = partial(constant, max_tokens=max_tokens)
  return replace(grpo, objective=replace(grpo.objective, advantage=(group_centered,), aggregate=aggregate))


dr_grpo = dr_grpo_within()


def dapo_within(limit: int = 20480, margin: int = 4096) -> Method:
  """Yu et al. 2025, arXiv 2503.14476: clip-higher, token mean, overlong filtering and the soft overlong punishment.

  `limit` and `margin` in tokens of the whole row. Dynamic sampling is a matter of the scheduler: groups of equal
  rewards have advantage 0 here, and their tokens count in the mean.
  """
  objective = replace(
    grpo.objective, surrogate=partial(ppo_clip, high=0.28), aggregate=token_mean, keep=(not_truncated,)
  )
  return replace(grpo, objective=objective, reward=(partial(soft_overlong, limit=limit, margin=margin),))


dapo = dapo_within()

rloo = replace(
  grpo, objective=replace(grpo.objective, advantage=(leave_one_out,), surrogate=reinforce, aggregate=sequence_sum)
)
"""Ahmadian et al. 2024, arXiv 2402.14740, without its KL in the reward. For one update per batch: it has no ratio."""

gspo = replace(grpo, objective=replace(grpo.objective, surrogate=sequence_clip))
"""Zheng et al. 2025, arXiv 2507.18071: the sequence's ratio, clipped at 3e-4 and 4e-4."""
