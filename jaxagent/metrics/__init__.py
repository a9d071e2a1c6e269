"""Estimators and diagnostics, as pure functions of arrays."""

from jaxagent.metrics.credit import credited_shares, distilled_shares, fallback_share, split_shares, uncited_shares
from jaxagent.metrics.mismatch import (
  chi_square_sequence,
  chi_square_token,
  extreme_share,
  perplexity_ratio,
  rollout_kl_k1,
  rollout_kl_k3,
)
from jaxagent.metrics.passes import pass_at_k, pass_hat_k, success_counts
from jaxagent.metrics.routing import rerouted_routers, rerouted_tokens
from jaxagent.metrics.team import (
  Gaps,
  distributed,
  fact_subsets,
  information_gaps,
  message_waste,
  minimal_sets,
  normalised_communication_gap,
  piu_recall,
  undelivered_share,
  unsurfaced_share,
)

__all__ = [
  "Gaps",
  "chi_square_sequence",
  "chi_square_token",
  "credited_shares",
  "distilled_shares",
  "distributed",
  "extreme_share",
  "fact_subsets",
  "fallback_share",
  "information_gaps",
  "message_waste",
  "minimal_sets",
  "normalised_communication_gap",
  "pass_at_k",
  "pass_hat_k",
  "perplexity_ratio",
  "piu_recall",
  "rerouted_routers",
  "rerouted_tokens",
  "rollout_kl_k1",
  "rollout_kl_k3",
  "split_shares",
  "success_counts",
  "uncited_shares",
  "undelivered_share",
  "unsurfaced_share",
]
