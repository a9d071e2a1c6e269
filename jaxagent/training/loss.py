"""The half of an objective with a gradient, on one microbatch of packed rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxagent.losses.terms import kl_k3
from jaxagent.methods.objective import Objective, slot_parameters
from jaxagent.methods.prepare import as_columns, call
from jaxagent.metrics.routing import rerouted_tokens
from jaxagent.models.policy import Policy
from jaxagent.training.scoring import score
from jaxagent.types import Scores, TokenBatch, pytree


@pytree
class Tally:
  """What microbatches add up to: sums over kept tokens, and maxima (of values that are at least 0)."""

  sums: dict[str, Float[Array, ""]]
  maxima: dict[str, Float[Array, ""]]

  def __add__(self, other: "Tally") -> "Tally":
    return Tally(jax.tree.map(jnp.add, self.sums, other.sums), jax.tree.map(jnp.maximum, self.maxima, other.maxima))


def loss(
  policy: Policy, objective: Objective, params: Any, tokens: TokenBatch, *, chunk: int, updates: Array | int = 0
) -> tuple[Float[Array, ""], Tally]:
  """sum_t aggregate_t [weight_t surrogate_t + sum_k c_k term_kt] over the kept tokens of `[B, T]` rows, and its tally.

  A plain sum: the losses and gradients of the microbatches of an update add up to the update's. Columns and scores
  are 0 at masked tokens before any slot sees them, but for what a mixture reports, which is of every token that it
  processed. Coefficients that are functions get `updates`, the count of
  updates before this.
  """
  differentiated = _reads(objective, "entropy")
  scores = score(
    policy, params, tokens, chunk=chunk, columns=("logp", "entropy"), constant=() if differentiated else ("entropy",)
  )  # fmt: skip
  mixture = {"router_probs": scores.aux.get("router_probs"), "experts": scores.aux.get("routing")}
  live = scores.aux.get("live_routing")
  scores = jax.tree.map(lambda x: jnp.where(tokens.mask, x, 0.0), dataclasses.replace(scores, aux={}))
  columns = {**_columns(tokens, scores), **mixture}
  per_token = tokens.weight * call(objective.surrogate, columns)
  for coefficient, term in objective.terms:
    c = coefficient(jnp.asarray(updates)) if callable(coefficient) else coefficient
    per_token += c * call(term, columns)
  total = jnp.sum(jnp.where(tokens.mask, tokens.aggregate * per_token, 0.0))
  return total, jax.lax.stop_gradient(_tally(objective, columns, total, live))


def sampler_gap(
  logp: Float[Array, "*B T"], logp_rollout: Float[Array, "*B T"], mask: Bool[Array, "*B T"]
) -> dict[str, Float[Array, ""]]:
  """`kl/rollout_train` (k3, nats), `logp_gap/mean` and `logp_gap/max` (|difference|, nats) over the masked tokens."""
  d = jnp.where(mask, logp - logp_rollout, 0.0)
  n = jnp.maximum(jnp.sum(mask), 1)
  return {
    "kl/rollout_train": jnp.sum(kl_k3(jnp.zeros_like(d), d)) / n,
    "logp_gap/mean": jnp.sum(jnp.abs(d)) / n,
    "logp_gap/max": jnp.max(jnp.abs(d), initial=0.0),
  }


def _columns(tokens: TokenBatch, scores: Scores) -> dict[str, Any]:
  mask = tokens.mask

  def zeroed(x):
    if x is None or x is tokens.temperature or not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0.0)

  columns = {k: zeroed(x) for k, x in as_columns(tokens).items()}
  if columns["logp_old"] is None:
    columns["logp_old"] = jax.lax.stop_gradient(scores.logp)
  return {**columns, "logp": scores.logp, "entropy": scores.entropy}


def _tally(objective: Objective, columns: dict[str, Any], total, live_routing) -> Tally:
  mask, logp, gap = (
    columns["mask"],
    columns["logp"],
    sampler_gap(columns["logp"], columns["logp_rollout"], columns["mask"]),
  )
  tokens = jnp.sum(mask).astype(jnp.float32)
  sums = {
    "loss": total,
    "tokens": tokens,
    "entropy": jnp.sum(columns["entropy"]),
    "clip_fraction": jnp.sum(_clipped(objective, columns)).astype(jnp.float32),
    "kl/rollout_train": gap["kl/rollout_train"] * tokens,
    "logp_gap/mean": gap["logp_gap/mean"] * tokens,
  }
  if columns["logp_ref"] is not None:
    sums["kl/ref"] = jnp.sum(jnp.where(mask, kl_k3(logp, columns["logp_ref"]), 0.0))
  if live_routing is not None:
    predicts = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    sums["routing/rerouted_tokens"] = rerouted_tokens(columns["routing"], live_routing, predicts) * tokens
  return Tally(sums, {"logp_gap/max": gap["logp_gap/max"]})


def _clipped(objective: Objective, columns: dict[str, Any]) -> Bool[Array, "B T"]:
  """Kept tokens that have an advantage and whose surrogate does not move with their log-prob: where a clip binds."""

  def surrogate(logp):
    return jnp.sum(jnp.where(columns["mask"], call(objective.surrogate, {**columns, "logp": logp}), 0.0))

  slope = jax.grad(surrogate)(jax.lax.stop_gradient(columns["logp"]))
  return columns["mask"] & (columns["advantage"] != 0) & (slope == 0)


def _reads(objective: Objective, column: str) -> bool:
  return any(column in slot_parameters(slot) for slot in objective.differentiated)
