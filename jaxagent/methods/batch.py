"""Methods whose rewards or advantages are standardised over the whole batch."""

from dataclasses import replace
from functools import partial

from jaxagent.advantages import (
  batch_standardized,
  group_centered,
  relative_per_reward,
  reward_to_go,
  reward_to_go_kl,
  standardize_tokens,
)
from jaxagent.losses import token_mean
from jaxagent.methods.annotators import Given
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Annotator, Method

REWARDS = Given(("rewards",))


def reinforce_plus_plus(gamma: float = 1.0) -> Method:
  """Hu et al. 2025, arXiv 2501.03262, without its KL (`reinforce_plus_plus_kl`): returns, standardised over tokens.

  The token mean is our reading: the standardisation makes advantages of mean 0 under it.
  """
  advantage = (partial(reward_to_go, gamma=gamma), standardize_tokens)
  return replace(grpo, objective=replace(grpo.objective, advantage=advantage, aggregate=token_mean))


def reinforce_plus_plus_kl(coefficient: float = 0.01, gamma: float = 1.0) -> Method:
  """REINFORCE++ with the KL in the reward of each token, as the paper has it; the coefficient is ours."""
  advantage = (partial(reward_to_go_kl, gamma=gamma, coefficient=coefficient), standardize_tokens)
  parent = reinforce_plus_plus(gamma)
  return replace(parent, objective=replace(parent.objective, advantage=advantage))


def reinforce_plus_plus_baseline() -> Method:
  """REINFORCE++-baseline, arXiv 2501.03262: the group's mean first, then standardised over all tokens."""
  parent = reinforce_plus_plus()
  return replace(parent, objective=replace(parent.objective, advantage=(group_centered, standardize_tokens)))


def bws(scale_eps: float = 1e-6) -> Method:
  """Batch-wise standardisation of When2Think (arXiv 2609.19671) on GRPO: one mean and std for all tasks. Token mean."""
  advantage = (partial(batch_standardized, scale_eps=scale_eps),)
  return replace(grpo, objective=replace(grpo.objective, advantage=advantage, aggregate=token_mean))


def gdpo(annotator: Annotator = REWARDS, weights: tuple[float, ...] | None = None) -> Method:
  """Liu et al. 2026, arXiv 2601.05242: every reward standardised in its group, their sum over the batch.

  `rewards [N, R]`: the single rewards; `reward` itself is not read.
  """
  advantage = (partial(relative_per_reward, weights=None if weights is None else tuple(weights)),)
  return replace(grpo, objective=replace(grpo.objective, advantage=advantage), annotators=(annotator,))
