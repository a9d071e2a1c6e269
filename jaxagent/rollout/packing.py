"""Rollouts of ragged length to rows of one fixed shape, on the host, and scores back to rollouts.

A rollout's row is never split and everything per token rides with its token, so a packed batch has the same loss as a
padded one.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxagent.methods.prepare import Prepared
from jaxagent.types import TokenBatch


@dataclasses.dataclass(frozen=True)
class PackPlan:
  """Where each rollout row went: flat packed row `row[n]` (-1: left out) from index `offset[n]`."""

  row: Int[np.ndarray, "N"]
  offset: Int[np.ndarray, "N"]
  length: Int[np.ndarray, "N"]
  width: int  # T of the rollouts
  shape: tuple[int, int, int]  # microbatches, rows, row_tokens
  microbatches: int  # how many of them hold tokens: the trip count of the train step

  @property
  def efficiency(self) -> float:
    """Share of the processed token places that hold a token."""
    _, rows, row_tokens = self.shape
    return float(self.length[self.row >= 0].sum() / max(self.microbatches * rows * row_tokens, 1))


def pack(
  prepared: Prepared, *, row_tokens: int, rows: int, microbatches: int | None = None
) -> tuple[TokenBatch, PackPlan]:
  """First-fit decreasing into microbatches `[M, rows, row_tokens]` of NumPy arrays.

  Rows without a kept token are left out: they have no part in the loss. `microbatches` (M) defaults to what N
  rollouts need at worst, so that the shape, and the compiled program, is the same for every batch;
  `plan.microbatches` of them hold tokens. Columns `[N]` of the method are repeated at every token, those `[N, T,
  ...]` ride with it, others stay behind. A ValueError names a rollout longer than `row_tokens`, and an M that is too
  small.
  """
  host = jax.tree.map(np.asarray, prepared)
  plan = _plan(host, row_tokens=row_tokens, rows=rows, microbatches=microbatches)
  return _gather(host, plan), plan


def unpack(values: Float[np.ndarray, "M B T"], plan: PackPlan) -> Float[np.ndarray, "N T"]:
  """Per-token values of packed rows as `[N, T]`, 0 where no token was packed."""
  values = np.asarray(values)
  flat = values.reshape(-1, *values.shape[3:])
  source = _source(plan).reshape(-1)
  out = np.zeros((len(plan.row) * plan.width, *flat.shape[1:]), flat.dtype)
  out[source[source >= 0]] = flat[source >= 0]
  return out.reshape(len(plan.row), plan.width, *flat.shape[1:])


def _plan(host: Prepared, *, row_tokens, rows, microbatches) -> PackPlan:
  length = np.where(host.keep.any(1), host.rollouts.length, 0)
  n = len(length)
  if n and length.max() > row_tokens:
    worst = int(length.argmax())
    raise ValueError(
      f"rollout row {worst} has {length[worst]} tokens but a packed row holds {row_tokens}; raise training.row_tokens"
      " or lower rollout.max_tokens"
    )
  row, offset = np.full(n, -1), np.zeros(n, int)
  room = np.full(n, row_tokens)
  for i in np.argsort(-length, kind="stable")[: np.count_nonzero(length)]:
    row[i] = np.argmax(room >= length[i])
    offset[i] = row_tokens - room[row[i]]
    room[row[i]] -= length[i]
  used = -(-int(row.max(initial=-1) + 1) // rows)
  m = max(-(-n // rows), 1) if microbatches is None else microbatches
  if used > m:
    raise ValueError(
      f"these rollouts fill {used} microbatches of {rows} rows but only {m} were asked for; raise microbatches"
    )
  return PackPlan(row, offset, length, host.keep.shape[1], (m, rows, row_tokens), used)


def _source(plan: PackPlan) -> Int[np.ndarray, "R T"]:
  """For each place of the packed rows the flat index of its token in [N, T], -1 at padding."""
  m, rows, row_tokens = plan.shape
  source = np.full((m * rows, row_tokens), -1)
  for n in np.flatnonzero(plan.row >= 0):
    start = plan.offset[n]
    source[plan.row[n], start : start + plan.length[n]] = n * plan.width + np.arange(plan.length[n])
  return source


def _gather(host: Prepared, plan: PackPlan) -> TokenBatch:
  r, source = host.rollouts, _source(plan)
  n, width = host.keep.shape
  empty, token, owner = source < 0, np.maximum(source, 0), np.maximum(source, 0) // width

  def shaped(x):
    return x.reshape(*plan.shape, *x.shape[2:])

  def per_token(x, fill=0):
    x = x.reshape(n * width, *x.shape[2:])[token]
    x[empty] = fill
    return shaped(x)

  def per_row(x, fill=0):
    x = x[owner]
    x[empty] = fill
    return shaped(x)

  def optional(x, fill=0):
    return None if x is None else per_token(x, fill)

  def column(x):
    return per_token(x) if x.shape[:2] == (n, width) else per_row(x)

  segment, turn = _numbered(plan, r.turn)
  return TokenBatch(
    tokens=per_token(r.tokens),
    position=per_token(r.position),
    segment=per_row(segment, -1),
    turn=per_token(turn, -1),
    prefix_end=per_row(plan.offset + r.prefix_length),
    mask=per_token(host.keep, False),
    advantage=per_token(host.advantage),
    weight=per_token(host.weight),
    aggregate=per_token(host.aggregate),
    temperature=per_row(r.temperature, 1),
    logp_rollout=per_token(r.logp_rollout),
    logp_old=optional(r.logp_old),
    logp_ref=optional(r.logp_ref),
    value=optional(r.value),
    routing=optional(r.routing, -1),
    columns={k: column(x) for k, x in r.columns.items() if x.ndim == 1 or x.shape[:2] == (n, width)},
  )


def _numbered(plan: PackPlan, turn: Int[np.ndarray, "N T"]):
  """Segments within each packed row from 0, and turns renumbered densely over the segments of a row."""
  segment, dense = np.full(len(plan.row), -1), np.full_like(turn, -1)
  segments, turns = np.zeros(len(plan.row), int), np.zeros(len(plan.row), int)
  for n in np.lexsort((plan.offset, plan.row)):
    row = plan.row[n]
    if row < 0:
      continue
    segment[n], segments[row] = segments[row], segments[row] + 1
    action = turn[n] >= 0
    present, order = np.unique(turn[n][action], return_inverse=True)
    dense[n, action] = turns[row] + order
    turns[row] += len(present)
  return segment, dense
