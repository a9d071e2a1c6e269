"""The half of an objective without a gradient: a whole batch of rollouts to advantages, masks and token weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxagent.checks import check_shapes, concrete
from jaxagent.methods.objective import Method, Slot, slot_parameters
from jaxagent.types import Rollouts, check, pytree

ADVANTAGE = "advantage"  # the column between the two stages
FLOATS = ("logp_rollout", "logp_old", "logp_ref", "entropy", "value")  # per-token float columns of Rollouts


@pytree
class Prepared:
  """Rollouts with what one optimizer update trains on; all but `rollouts` is `[N, T]`.

  `keep` is mask, valid, the objective's keeps and the minibatch, and-ed. Float columns are 0 where it is False.
  """

  rollouts: Rollouts
  advantage: Float[Array, "N T"]
  weight: Float[Array, "N T"]
  keep: Bool[Array, "N T"]
  aggregate: Float[Array, "N T"]


def prepare(method: Method, rollouts: Rollouts, *, minibatch: Bool[Array, "N"] | None = None) -> Prepared:
  """`weigh` of `credit`: rewards, advantages, keeps and weights on the whole batch.

  Jittable with `method` closed over; values are checked only on concrete arrays. A ValueError names a column that a
  slot reads and the batch lacks, rows to be trained at temperature 0, and a batch in which the policy sampled nothing.
  """
  return weigh(method, credit(method, rollouts)[0], minibatch=minibatch)


def credit(method: Method, rollouts: Rollouts) -> tuple[Rollouts, dict[str, Float[Array, ""]]]:
  """The batch with its rewards shaped and a column `advantage` `[N, T]`, 0 where the policy did not sample; and
  the numbers of `Method.metrics`.

  The stage that must see rollouts whole: what is cut from them afterwards takes its advantages along. Errors as in
  `prepare`, and for a batch that has been through it.
  """
  if ADVANTAGE in rollouts.columns:
    raise ValueError("the batch has a column 'advantage' already; credit takes rollouts as they were collected")
  _check_trainable(check(rollouts))
  rollouts = _shaped(method, _clean(rollouts))
  mask, columns = rollouts.mask, as_columns(rollouts)
  advantage = _advantage(method.objective.advantage, {**columns, "keep": mask})
  advantage = jnp.where(mask, _lift(advantage, mask), 0.0)
  metrics = _metrics(method, {**columns, "advantage": advantage})
  return dataclasses.replace(rollouts, columns={**rollouts.columns, ADVANTAGE: advantage}), metrics


def returns(method: Method, credited: Rollouts) -> Float[Array, "N T"]:
  """What a critic learns from a `credit`-ed batch: `Method.returns`, 0 where the policy did not sample."""
  if ADVANTAGE not in credited.columns:
    raise ValueError("returns takes a batch with shaped rewards; pass it through credit first")
  if method.returns is None:
    raise ValueError("the method does not say what a critic is to learn; set Method.returns")
  return jnp.where(credited.mask, call(method.returns, as_columns(credited)), 0.0)


def weigh(method: Method, credited: Rollouts, *, minibatch: Bool[Array, "N"] | None = None) -> Prepared:
  """Keeps and weights of a `credit`-ed batch, then token weights and own columns on the `minibatch`.

  `minibatch[i]` says whether logical rollout i is in this update (None: all are).
  """
  if ADVANTAGE not in credited.columns:
    raise ValueError("weigh takes a batch with advantages; pass it through credit first, or call prepare")
  _check_trainable(check(credited))
  check_shapes(rollout=(credited.rollout, "N"), minibatch=(minibatch, "N"))
  o, rollouts = method.objective, _clean(credited)
  advantage = rollouts.columns[ADVANTAGE]
  rollouts = dataclasses.replace(rollouts, columns={k: x for k, x in rollouts.columns.items() if k != ADVANTAGE})
  mask = rollouts.mask
  columns = {**as_columns(rollouts), "advantage": advantage}
  keep = mask
  for slot in o.keep:
    keep = keep & _lift(call(slot, {**columns, "keep": keep}), mask)
  weight = jnp.ones(mask.shape, jnp.float32)
  for slot in o.weight:
    weight = weight * _lift(call(slot, {**columns, "keep": keep}), mask)
  if minibatch is not None:
    keep = keep & jnp.asarray(minibatch, bool)[rollouts.rollout][:, None]
  columns |= {"keep": keep}
  aggregate = _lift(call(o.aggregate, columns), mask)
  own = {name: call(slot, {**columns, "aggregate": aggregate}) for name, slot in o.columns}
  rollouts = dataclasses.replace(rollouts, columns={**rollouts.columns, **own})
  kept = [jnp.where(keep, x, 0.0) for x in (advantage, weight, aggregate)]
  return Prepared(_zeroed(rollouts, keep), kept[0], kept[1], keep, kept[2])


def plain(rollouts: Rollouts) -> Prepared:
  """The batch before any objective, for scoring passes: every action kept, advantage and token weights 0."""
  rollouts = _clean(check(rollouts))
  zero = jnp.zeros(rollouts.mask.shape, jnp.float32)
  return Prepared(rollouts, zero, zero, rollouts.mask, zero)


def minibatches(rollouts: Rollouts, count: int, *, key: Array) -> Bool[Array, "K N"]:
  """A random partition of the valid logical rollouts into `count` masks for `prepare`; sizes differ by at most 1."""
  if count < 1:
    raise ValueError(f"minibatches: count must be at least 1, got {count}")
  n = rollouts.rollout.shape[0]
  present = jnp.zeros(n, bool).at[rollouts.rollout].max(rollouts.valid & (rollouts.length > 0))
  order = jnp.argsort(jnp.where(present, jax.random.uniform(key, (n,)), 2.0))
  rank = jnp.zeros(n, int).at[order].set(jnp.arange(n))
  return present & (rank % count == jnp.arange(count)[:, None])


def call(slot: Slot, columns: Mapping[str, Any]) -> Array:
  """`slot` on the columns that its parameters name; a column that is None leaves the parameter's default."""
  parameters = slot_parameters(slot)
  given = {name: columns[name] for name in parameters if columns.get(name) is not None}
  absent = [k for k, p in parameters.items() if k not in given and p.default is p.empty]
  if absent:
    name = getattr(slot, "__name__", None) or getattr(getattr(slot, "func", None), "__name__", repr(slot))
    raise ValueError(
      f"{name} reads {', '.join(absent)}, which this batch does not have; run the scoring pass, annotator or"
      " tracker that provides it"
    )
  return slot(**given)


def as_columns(batch: Any) -> dict[str, Any]:
  """Columns of Rollouts or TokenBatch by name, those of the method included."""
  fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "columns"}
  return {**batch.columns, **fields}


def _clean(rollouts: Rollouts) -> Rollouts:
  mask = rollouts.mask & rollouts.valid[:, None]
  floats = {k: jnp.where(mask, getattr(rollouts, k), 0.0) for k in FLOATS if getattr(rollouts, k) is not None}
  return dataclasses.replace(rollouts, mask=mask, turn=jnp.where(mask, rollouts.turn, -1), **floats)


def _zeroed(rollouts: Rollouts, keep: Bool[Array, "N T"]) -> Rollouts:
  def zeroed(x):
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[:2] != keep.shape:
      return x
    return jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 2)), x, 0.0)

  floats = {k: zeroed(getattr(rollouts, k)) for k in FLOATS if getattr(rollouts, k) is not None}
  columns = {k: zeroed(jnp.asarray(x)) for k, x in rollouts.columns.items()}
  return dataclasses.replace(rollouts, columns=columns, **floats)


def _shaped(method: Method, rollouts: Rollouts) -> Rollouts:
  for slot in method.reward:
    reward = call(slot, as_columns(rollouts))
    rollouts = dataclasses.replace(rollouts, **{"reward" if reward.ndim == 1 else "turn_reward": reward})
  return rollouts


def _advantage(slots, columns):
  advantage = None
  for slot in slots:
    advantage = call(slot, {**columns, "advantage": advantage})
  return advantage


def _metrics(method: Method, columns) -> dict[str, Float[Array, ""]]:
  """Numbers by name; those of a slot that returns several are `name/key`."""
  found = {name: call(slot, columns) for name, slot in method.metrics}
  named = {name: x if isinstance(x, Mapping) else {"": x} for name, x in found.items()}
  flat = {f"{name}/{key}".rstrip("/"): x for name, several in named.items() for key, x in several.items()}
  if bad := [name for name, x in flat.items() if jnp.ndim(x)]:
    raise ValueError(f"metric {bad[0]} must be one number, got shape {jnp.shape(flat[bad[0]])}; take a mean or a share")
  return {name: jnp.asarray(x, jnp.float32) for name, x in flat.items()}


def _lift(x, mask):
  """`[N]` to `[N, T]`; `[N, T]` as it is."""
  return jnp.broadcast_to(x[:, None] if x.ndim == 1 else x, mask.shape)


def _check_trainable(rollouts: Rollouts) -> None:
  if not concrete(*jax.tree.leaves(rollouts)):
    return
  mask = np.asarray(rollouts.mask) & np.asarray(rollouts.valid)[:, None]
  if not mask.any():
    n, valid, sampled = len(mask), np.asarray(rollouts.valid).sum(), np.asarray(rollouts.mask).sum()
    raise ValueError(
      f"no token to train on: {n} rows, {valid} of them valid, with {sampled} sampled tokens in all;"
      " look at the rollouts' status and cause"
    )
  cold = np.flatnonzero(mask.any(1) & ~(np.asarray(rollouts.temperature) > 0))
  if len(cold):
    raise ValueError(
      f"rollout row {cold[0]} was sampled at temperature {float(rollouts.temperature[cold[0]])}, where log-probs do not"
      " exist; sample training data at a temperature above 0"
    )
