"""Which tiles meet: linear tables of scalars that the kernels on a grid look up, no table of pairs."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.prefix_sliding.mask import window_start


class Tiles(NamedTuple):
  """Rows of a query tile and of a key tile, and the tiles of a row."""

  rows: int
  keys: int
  row_tiles: int
  key_tiles: int


class QueryPlan(NamedTuple):
  """Of each query tile: `prefix_count` key tiles from `prefix`, then those from `window`, `count` in all."""

  prefix: Int[Array, "B n"]
  prefix_count: Int[Array, "B n"]
  window: Int[Array, "B n"]
  count: Int[Array, "B n"]


class Bounds(NamedTuple):
  """Of each query tile: what decides that every query of it sees every key of another tile."""

  last_start: Int[Array, "B n"]
  least_end: Int[Array, "B n"]


class KeyPlan(NamedTuple):
  """A list of key tiles, each with the query tiles `first`, ..., `first + count - 1`."""

  tile: Int[Array, "B n"]
  first: Int[Array, "B n"]
  count: Int[Array, "B n"]


def query_plan(start: Int[Array, "B T"], end: Int[Array, "B T"], window: int | None, tiles: Tiles) -> QueryPlan:
  """Only a tile's first segment can have keys before its window: those after it begin inside the tile."""
  low = window_start(start, window)[:, :: tiles.rows] // tiles.keys
  first, end = start[:, :: tiles.rows] // tiles.keys, end[:, :: tiles.rows]
  prefix = jnp.maximum(jnp.minimum(-(-end // tiles.keys), low) - first, 0)
  prefix = jnp.where(end > start[:, :: tiles.rows], prefix, 0)
  last = (jnp.arange(1, tiles.row_tiles + 1, dtype=jnp.int32) * tiles.rows - 1) // tiles.keys
  return QueryPlan(first, prefix, low, prefix + last - low + 1)


def bounds(start: Int[Array, "B T"], end: Int[Array, "B T"], tiles: Tiles) -> Bounds:
  return Bounds(start[:, tiles.rows - 1 :: tiles.rows], end.reshape(end.shape[0], -1, tiles.rows).min(-1))


def key_plans(
  start: Int[Array, "B T"], end: Int[Array, "B T"], window: int | None, tiles: Tiles
) -> tuple[KeyPlan, KeyPlan | None]:
  """Every key tile with the query tiles from its own to the end of its window; then the tiles that hold a prefix,
  with the query tiles after those, in the same order of memory as the first: None for a causal mask, which has none.
  """
  at = jnp.arange(tiles.key_tiles, dtype=jnp.int32)
  low, high = at * tiles.keys, (at + 1) * tiles.keys - 1
  start_at, end_at, stop = (x[:, tiles.keys - 1 :: tiles.keys] for x in (start, end, segment_end(start)))
  reach = jnp.maximum(stop - 1, high)  # the last query of the tile's last segment; none after padding
  near = reach if window is None else jnp.minimum(reach, high + window - 1)
  first = jnp.broadcast_to(low // tiles.rows, near.shape)
  windowed = KeyPlan(jnp.broadcast_to(at, near.shape), first, near // tiles.rows - first + 1)
  if window is None:
    return windowed, None
  far = jnp.where(jnp.minimum(end_at, stop) > jnp.maximum(start_at, low), reach // tiles.rows - near // tiles.rows, 0)
  order = jnp.argsort(far == 0, axis=1, stable=True).astype(jnp.int32)  # a permutation: each tile once
  first = near // tiles.rows + 1
  return windowed, KeyPlan(order, *(jnp.take_along_axis(x, order, 1) for x in (first, far)))


def segment_end(start: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """One past the last token of each token's segment, from `segment_start`."""
  length = start.shape[1]
  t = jnp.arange(length, dtype=jnp.int32)
  last = jnp.pad(start[:, 1:] != start[:, :-1], ((0, 0), (0, 1)), constant_values=True)
  return lax.cummin(jnp.where(last, t + 1, length), axis=1, reverse=True)
