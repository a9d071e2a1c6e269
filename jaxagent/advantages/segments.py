"""Turns and groups inside arrays: the parts that the advantages are made of, without loops over tokens.

A turn is a run of action tokens (`mask`) with the same number in `turn`; context tokens between and inside turns are
skipped. Places where `mask` is False may hold anything, NaN included. The helpers are jitted: a call outside
jit compiles a few programs and not one per operation.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.group import EQUAL
from jaxagent.checks import check_ids


class Turns(NamedTuple):
  """Where the turns of each row lie; everything is `[N, T]`."""

  mask: Bool[Array, "N T"]
  number: Int[Array, "N T"]  # of the token's turn within its row, counted from 0; 0 off actions
  first: Bool[Array, "N T"]  # the first action token of a turn
  last: Bool[Array, "N T"]  # the last one
  following: Int[Array, "N T"]  # place of the next action token, T if there is none


class Moments(NamedTuple):
  """Statistics of each entry's segment, one entry per entry."""

  centered: Float[Array, "..."]
  std: Float[Array, "..."]
  size: Float[Array, "..."]
  differs: Bool[Array, "..."]  # the segment's numbers are not all equal


@jax.jit
def find_turns(mask: Bool[Array, "N T"], turn: Int[Array, "N T"]) -> Turns:
  mask, turn = jnp.asarray(mask, bool), jnp.asarray(turn)
  width = mask.shape[1]
  place = jnp.broadcast_to(jnp.arange(width), mask.shape)
  before = jax.lax.cummax(jnp.where(mask, place, -1), axis=1)
  before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  following = jax.lax.cummin(jnp.where(mask, place, width), axis=1, reverse=True)
  following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=width)
  first = mask & ((before < 0) | (jnp.take_along_axis(turn, jnp.maximum(before, 0), 1) != turn))
  last = mask & ((following == width) | (take(turn, following, -1) != turn))
  index = jnp.where(mask, jnp.cumsum(first, axis=1) - 1, 0)
  return Turns(mask, index, first, last, following)


def take(x: Array, place: Int[Array, "N T"], fill) -> Array:
  """x[n, place[n, t]]; `fill` (a scalar or `[N, 1]`) where place is the width of x."""
  width = x.shape[1]
  return jnp.where(place == width, fill, jnp.take_along_axis(x, jnp.minimum(place, width - 1), 1))


@jax.jit
def turn_sum(x: Float[Array, "N T"], turns: Turns) -> Float[Array, "N T"]:
  """The sum of x over the action tokens of the turn, at each of them; 0 off actions."""
  width = turns.mask.shape[1]
  total = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, width)[i])(jnp.where(turns.mask, x, 0.0), turns.number)
  return jnp.where(turns.mask, total, 0.0)


@jax.jit
def turn_max(x: Float[Array, "N T"], turns: Turns) -> Float[Array, "N T"]:
  width = turns.mask.shape[1]
  high = jax.vmap(lambda x, i: jax.ops.segment_max(x, i, width)[i])(jnp.where(turns.mask, x, -jnp.inf), turns.number)
  return jnp.where(turns.mask, high, 0.0)


def turn_mean(x: Float[Array, "N T"], turns: Turns) -> Float[Array, "N T"]:
  return turn_sum(x, turns) / jnp.maximum(turn_sum(jnp.ones(turns.mask.shape), turns), 1.0)


@jax.jit
def from_first(x: Float[Array, "N T"], turns: Turns) -> Float[Array, "N T"]:
  """The number at the first token of the turn, at each of its action tokens; 0 off actions."""
  place = jax.lax.cummax(jnp.where(turns.first, jnp.arange(x.shape[1]), 0), axis=1)
  return jnp.where(turns.mask, jnp.take_along_axis(x, place, 1), 0.0)


@jax.jit
def decayed_sum(x: Float[Array, "... T"], factor: Float[Array, "... T"]) -> Float[Array, "... T"]:
  """y_t = x_t + factor_t y_{t+1}, with y = 0 past the end."""

  def join(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  return jax.lax.associative_scan(join, (factor, x), reverse=True, axis=x.ndim - 1)[1]


@partial(jax.jit, static_argnames="turns")
def turn_places(mask: Bool[Array, "N T"], turn: Int[Array, "N T"], turns: int) -> Bool[Array, "N S"]:
  """Whether the row has an action token in the turn of that number."""
  row = jnp.arange(mask.shape[0])[:, None]
  return jnp.zeros((mask.shape[0], turns), bool).at[row, jnp.where(mask, turn, turns)].max(mask, mode="drop")


@jax.jit
def at_tokens(x: Float[Array, "N S"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"]) -> Float[Array, "N T"]:
  """The number of each action token's turn; 0 off actions."""
  return jnp.where(mask, jnp.take_along_axis(x, jnp.clip(jnp.where(mask, turn, 0), 0, x.shape[1] - 1), 1), 0.0)


def over_rollouts(x: Float[Array, "N ..."], rollout: Int[Array, "N"] | None) -> Float[Array, "N ..."]:
  """Row sums added up over the rows of each logical rollout; a ValueError for ids out of range."""
  check_ids("rollout", rollout, x.shape[0])
  return x if rollout is None else jax.ops.segment_sum(x, rollout, x.shape[0])[rollout]


def lift(x: Array, mask: Bool[Array, "N T"]) -> Array:
  """`[N]` to `[N, T]`; `[N, T]` as it is."""
  x = jnp.asarray(x)
  return jnp.broadcast_to(x[:, None] if x.ndim == 1 else x, jnp.shape(mask))


@partial(jax.jit, static_argnames=("segments", "ddof"))
def moments(
  x: Float[Array, "..."], ids: Int[Array, "..."], counted: Bool[Array, "..."], segments: int, *, ddof: int = 0
) -> Moments:
  """Mean, standard deviation (two passes, divisor size - ddof) and size of the counted entries of each segment."""
  ids, shape = jnp.broadcast_to(ids, x.shape).reshape(-1), x.shape
  flat, counted = x.reshape(-1), jnp.broadcast_to(counted, shape).reshape(-1)

  def total(v):
    return jax.ops.segment_sum(jnp.where(counted, v, 0.0), ids, segments)[ids]

  size = total(jnp.ones_like(flat))
  centered = flat - total(flat) / jnp.maximum(size, 1.0)
  centered -= total(centered) / jnp.maximum(size, 1.0)  # the first mean is rounded at the size of x
  high = jax.ops.segment_max(jnp.where(counted, flat, -jnp.inf), ids, segments)[ids]
  low = jax.ops.segment_min(jnp.where(counted, flat, jnp.inf), ids, segments)[ids]
  differs = high - low > EQUAL * jnp.maximum(1.0, jnp.maximum(jnp.abs(high), jnp.abs(low)))
  variance = total(centered**2) / jnp.maximum(size - ddof, 1.0)
  std = jnp.where(differs, jnp.sqrt(jnp.where(differs, variance, 1.0)), 0.0)
  return Moments(*(v.reshape(shape) for v in (centered, std, size, differs)))


@partial(jax.jit, static_argnames="ddof")
def token_moments(x: Float[Array, "N T"], counted: Bool[Array, "N T"], *, ddof: int = 0) -> Moments:
  """`moments` of all counted entries together; sums by row first, exact counts, so that millions of tokens are fine."""

  def mean(v):
    return jnp.sum(jnp.sum(jnp.where(counted, v, 0.0), axis=1)) / jnp.maximum(size, 1)

  size = jnp.sum(counted)
  centered = x - mean(x)
  centered -= mean(centered)
  high, low = jnp.max(jnp.where(counted, x, -jnp.inf)), jnp.min(jnp.where(counted, x, jnp.inf))
  differs = high - low > EQUAL * jnp.maximum(1.0, jnp.maximum(jnp.abs(high), jnp.abs(low)))
  variance = mean(centered**2) * (size / jnp.maximum(size - ddof, 1))
  std = jnp.where(differs, jnp.sqrt(jnp.where(differs, variance, 1.0)), 0.0)
  return Moments(centered, std, size, differs)
