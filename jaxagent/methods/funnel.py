"""Experience Funnel: reinforcement without a state of text, and distillation of what the state gained."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages import group_relative
from jaxagent.checks import check_range
from jaxagent.losses import (
  distillation_weights,
  mean_one_attribution,
  sampled_jensen_shannon,
  sampled_student_kl,
  sequence_mean,
  token_mean,
)
from jaxagent.methods.annotators import Given
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Annotator, Coefficient, Method
from jaxagent.metrics import distilled_shares

SELECTION = Given(("selection", "logp_privileged"))


def state_free_relative(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  selection: Float[Array, "N"],
  valid: Bool[Array, "N"],
  rollout: Int[Array, "N"],
) -> Float[Array, "N"]:
  """`group_relative` among the rows without the state (selection below 0), 0 for those with it."""
  check_range("selection", selection, -1, float("inf"), where=valid)
  return group_relative(reward, group, valid=valid & (selection < 0), rollout=rollout)


def mean_of_kind(
  keep: Bool[Array, "N T"], selection: Float[Array, "N"], rollout: Int[Array, "N"]
) -> Float[Array, "N T"]:
  """`sequence_mean`, as in GRPO, of the rows without the state; `token_mean` of those with it. Each adds up to 1."""
  free = keep & (selection < 0)[:, None]
  return sequence_mean(free, rollout) + token_mean(keep & ~free)


def distillation(
  selection: Float[Array, "N"],
  logp_privileged: Float[Array, "N T"],
  logp_old: Float[Array, "N T"],
  keep: Bool[Array, "N T"],
  aggregate: Float[Array, "N T"],
  divergence: Float[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
  """`distillation_weights` over `aggregate`, so that the token weights of the loss are those of the paper.

  `divergence`: of the whole vocabulary, where the batch holds it; else `sampled_jensen_shannon` of the two log-probs.
  """
  kept = keep & (selection >= 0)[:, None]
  if divergence is None:
    divergence = sampled_jensen_shannon(jnp.where(kept, logp_privileged, 0.0), jnp.where(kept, logp_old, 0.0))
  weight = distillation_weights(jnp.maximum(selection, 0.0), mean_one_attribution(divergence, kept), kept)
  return jnp.where(kept, weight / jnp.where(aggregate > 0, aggregate, 1.0), 0.0)


def distilled_kl(
  logp: Float[Array, "B T"], logp_privileged: Float[Array, "B T"], distilled: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """`sampled_student_kl` times the column of `distillation`."""
  chosen = ~(distilled == 0)  # NaN is not left out
  gap = jnp.where(chosen, logp_privileged, logp)
  return jnp.where(chosen, distilled * sampled_student_kl(logp, gap), 0.0)


def experience_funnel(coefficient: Coefficient = 1.0, annotator: Annotator = SELECTION) -> Method:
  """arXiv 2609.08919: GRPO on the rollouts without the state, and distillation of selected ones that had it.

  A batch holds both kinds. `selection [N]`: -1 without the state, else `losses.selection_weight` of the row's three
  rollouts. A row with the state stands under the prompt without it: `rollout.restate.with_prefix`. The others have both
  columns too; their `logp_privileged` may hold anything.
  `logp_privileged [N, T]`: the teacher's log-probs (nats) of its tokens, which the teacher sampled seeing the state;
  for the frozen policy itself these are the row's `logp_rollout`; a row that the policy sampled and a larger teacher
  only scored would bias the divergence. `coefficient` is the distillation's weight beside 1 for GRPO. Gates, edits of
  the state and what remains of it belong to the loop around: `losses.accept_state`, `accept_policy`, `residual_items`.
  Reconstruction in part: only notes of the paper were available. Ours differs: divergences are of the sampled tokens,
  unbiased, where the paper sums the vocabulary; a column `divergence [N, T]` replaces the attribution's.
  """
  objective = replace(
    grpo.objective, advantage=(state_free_relative,), aggregate=mean_of_kind, terms=((coefficient, distilled_kl),),
    columns=(("distilled", distillation),),
  )  # fmt: skip
  return replace(grpo, objective=objective, annotators=(annotator,), metrics=(("distilled", distilled_shares),))
