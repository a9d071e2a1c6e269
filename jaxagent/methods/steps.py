"""Methods that judge single turns: against the same state in other rollouts, or by the progress they made."""

from dataclasses import replace
from functools import partial

from jaxagent.advantages import add_step_advantage, add_step_credit, turn_relative
from jaxagent.methods.annotators import Given
from jaxagent.methods.batch import reinforce_plus_plus
from jaxagent.methods.clips import dppo
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Annotator, Method
from jaxagent.metrics import credited_shares, paid_turn_share
from jaxagent.rewards import add_potential_shaping, progress_rewards

ANCHORS = Given(("anchor",))
MATCHES = Given(("anchor", "step_credit"))
POTENTIAL = Given(("potential",))


def gigpo(weight: float = 1.0, gamma: float = 0.95, annotator: Annotator = ANCHORS) -> Method:
  """Feng et al. 2025, arXiv 2505.10978: GRPO's advantage plus the one among steps taken in the same state.

  `anchor [N, S]`: numbers that tell apart the states of a group, -1 for none; `advantages.anchor_groups`, or a hash.
  """
  advantage = (*grpo.objective.advantage, partial(add_step_advantage, weight=weight, gamma=gamma))
  return replace(grpo, objective=replace(grpo.objective, advantage=advantage), annotators=(annotator,))


def scpo(weight: float = 0.2, annotator: Annotator = MATCHES) -> Method:
  """Xu et al. 2026, arXiv 2606.25852: GiGPO, with a bonus for steps that match a successful sibling's.

  `step_credit [N, S]` of failed rollouts: `advantages.matched_credit`. Reconstruction: `weight` is ours.
  """
  return replace(
    gigpo(annotator=annotator), reward=(partial(add_step_credit, weight=weight),),
    metrics=(("credited", credited_shares), ("paid_turns", paid_turn_share)),
  )  # fmt: skip


def tev(weight: float = 0.25, annotator: Annotator = POTENTIAL) -> Method:
  """Hu et al. 2026: progress pays turn by turn, returns-to-go against the same turn of the group, DPPO's mask.

  `potential [N, S+1]`: `rewards.contract_progress` at the start and after each turn.
  """
  parent = dppo()
  return replace(
    parent, objective=replace(parent.objective, advantage=(turn_relative,)), annotators=(annotator,),
    reward=(partial(progress_rewards, weight=weight),), metrics=(("paid_turns", paid_turn_share),),
  )  # fmt: skip


def shaping(gamma: float = 1.0, annotator: Annotator = POTENTIAL) -> Method:
  """Hounwanou et al. 2026, arXiv 2608.18008: REINFORCE++ with potential-based shaping, which leaves the optimum alone.

  One `gamma` for both. `potential [N, S+1]`: a score of the state at the start and after each turn. Each row (an agent,
  a branch) ends for itself, as REINFORCE++ takes its returns. Ours differs: the paper trains a critic.
  """
  shaped = partial(add_potential_shaping, gamma=gamma, rollout=None)
  return replace(
    reinforce_plus_plus(gamma), reward=(shaped,), annotators=(annotator,), metrics=(("paid_turns", paid_turn_share),)
  )
