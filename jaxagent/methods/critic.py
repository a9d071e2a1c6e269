"""Methods with a critic: how the policy is updated, and what the values are to become (`returns`).

`value` (and `bootstrap`) must be in the batch: the loop's critic puts them there, or an annotator.
"""

from dataclasses import replace
from functools import partial

from jaxagent.advantages import (
  add_token_credit,
  gae,
  length_adaptive_gae,
  turn_gae,
  value_share_between_turns,
  value_targets,
)
from jaxagent.losses import positive_nll, positive_token_weight, ppo_clip, token_mean, turn_clip
from jaxagent.methods.annotators import Given
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Annotator, Method, Slot
from jaxagent.metrics import advantage_shape, fallback_share, reward_change
from jaxagent.rewards import assertion_reward


def ppo(gamma: float = 1.0, lam: float = 0.95) -> Method:
  """Schulman et al. 2017, arXiv 1707.06347, over tokens: no reward or advantage is standardised.

  The critic learns advantage + value, with the same `lam`.
  """
  advantage, returns = (partial(gae, gamma=gamma, lam=lam),), partial(value_targets, gamma=gamma, lam=lam)
  return replace(
    grpo, objective=replace(grpo.objective, advantage=advantage, aggregate=token_mean), returns=returns
  )  # fmt: skip


ASSERTIONS = Given(("assertions_passed",))


def vapo(alpha: float = 0.05, imitation: float = 0.1) -> Method:
  """Yue et al. 2025, arXiv 2504.05118: length-adaptive GAE, clip-higher, and imitation of the successes.

  The imitation is the mean over the tokens of the rollouts with outcome 1, whatever the other means divide by. The
  critic learns with lam 1, the policy with its own (decoupled GAE).
  """
  parent = ppo()
  objective = replace(
    parent.objective, advantage=(partial(length_adaptive_gae, alpha=alpha),), surrogate=partial(ppo_clip, high=0.28),
    terms=((imitation, positive_nll),), columns=(("positive_weight", positive_token_weight),),
  )  # fmt: skip
  return replace(parent, objective=objective, returns=value_targets)


def mpo(credit: Slot = add_token_credit) -> Method:
  """Multiscale Policy Optimization: GAE over turns, token credit of the turn's mean, the complete turn's ratio.

  Reconstruction: the paper's text was not available. `credit` is `add_token_credit` or `multiply_token_credit`. The
  critic learns the return at every token (lam 1); a turn's value is the one before its first.
  """
  parent = ppo()
  return replace(
    parent, objective=replace(parent.objective, advantage=(turn_gae, credit), surrogate=turn_clip),
    returns=value_targets, metrics=(
      ("value_share_between_turns", value_share_between_turns), ("advantage", advantage_shape),
    ),
  )  # fmt: skip


def t1(scale: float = 20.0, annotator: Annotator = ASSERTIONS) -> Method:
  """Yang et al. 2026, arXiv 2609.11042: PPO with lam 1, paid by assertions over one global scale, nothing standardised.

  `assertions_passed [N]`: the verifier's count, -1 without a record (then the outcome pays).
  """
  return replace(
    ppo(lam=1.0), reward=(partial(assertion_reward, scale=scale),), annotators=(annotator,),
    metrics=(("fallback", fallback_share), ("reward", reward_change)),
  )  # fmt: skip
