"""Parts of a loss: importance weights, surrogates, token weights and added terms, as pure functions of arrays."""

from jaxagent.losses.aggregation import constant, sequence_mean, sequence_sum, token_mean
from jaxagent.losses.importance import importance_within, masked_importance, truncated_importance
from jaxagent.losses.surrogates import gspo, ppo_clip, reinforce
from jaxagent.losses.terms import entropy_bonus, kl_k1, kl_k3, kl_reverse

__all__ = [
  "constant",
  "entropy_bonus",
  "gspo",
  "importance_within",
  "kl_k1",
  "kl_k3",
  "kl_reverse",
  "masked_importance",
  "ppo_clip",
  "reinforce",
  "sequence_mean",
  "sequence_sum",
  "token_mean",
  "truncated_importance",
]
