"""Rows in tiles of one group each, the form that XLA runs best on a CPU: a loop over them in place, or their layout."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class Layout(NamedTuple):
  """Where rows sorted by group stand when each group's rows are padded to whole tiles."""

  shift: Int[Array, "E"]  # a group's padded rows less its rows
  source: Int[Array, "R"]  # the row that a padded row holds, -1 in padding
  group: Int[Array, "tiles"]


def tile_rows(rows: int, groups: int, most: int = 128) -> int:
  """Rows in a tile: about the mean group, between 8 and `most`, so that padding stays below the work."""
  mean = max(1, rows // groups)
  return min(most, max(8, 1 << (mean.bit_length() - 1)))


def tile_layout(sizes: Int[Array, "E"], rows: int, tile: int) -> Layout:
  """As many tiles as `rows` rows in groups of any sizes can need."""
  groups = sizes.shape[0]
  tiles = min((rows + groups * (tile - 1)) // tile, rows)
  padded = -(-sizes // tile) * tile
  start, end = jnp.cumsum(sizes) - sizes, jnp.cumsum(padded)
  first = end - padded
  group = jnp.minimum(jnp.searchsorted(end, jnp.arange(tiles) * tile, side="right"), groups - 1)
  within = jnp.arange(tiles * tile) - jnp.repeat(first[group], tile)
  inside = within < jnp.repeat(sizes[group], tile)
  source = jnp.where(inside, jnp.repeat(start[group], tile) + within, -1)
  return Layout(first - start, source, group)


class Walk(NamedTuple):
  """Tiles of consecutive rows of one group: the first `count` of these."""

  at: Int[Array, "tiles"]  # first row
  stop: Int[Array, "tiles"]  # the row after the group's last
  group: Int[Array, "tiles"]
  count: Int[Array, ""]


def walk(sizes: Int[Array, "E"], rows: int, tile: int) -> Walk:
  groups = sizes.shape[0]
  tiles = jnp.arange(min((rows + groups * (tile - 1)) // tile, rows))
  stop, needs = jnp.cumsum(sizes), -(-sizes // tile)
  done = jnp.cumsum(needs)
  group = jnp.minimum(jnp.searchsorted(done, tiles, side="right"), groups - 1)
  at = (stop - sizes)[group] + (tiles - (done - needs)[group]) * tile
  return Walk(at, stop[group], group, done[-1])


def product(spec: str, a, b):
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def size_of_tile(rows: int, groups: int) -> int:
  return min(tile_rows(rows, groups, most=256), rows)


def tile_at(plan: Walk, t, rows: int, tile: int) -> tuple[Int[Array, ""], Bool[Array, "tile 1"]]:
  """First row of tile t and which are its own; one that would reach beyond the rows is moved back, not padded."""
  at = jnp.minimum(plan.at[t], rows - tile)
  row = at + jnp.arange(tile)
  return at, ((plan.at[t] <= row) & (row < plan.stop[t]))[:, None]


def multiply(spec: str, x, weights, sizes, width: int):
  count, tile = x.shape[0], size_of_tile(x.shape[0], sizes.shape[0])
  plan = walk(sizes, count, tile)

  def one(t, y):
    at, own = tile_at(plan, t, count, tile)
    part = product(spec, lax.dynamic_slice_in_dim(x, at, tile), weights[plan.group[t]]).astype(x.dtype)
    part = jnp.where(own, part, lax.dynamic_slice_in_dim(y, at, tile))
    return lax.dynamic_update_slice_in_dim(y, part, at, 0)

  return lax.fori_loop(0, plan.count, one, jnp.zeros((count, width), x.dtype))


def matrix_gradient(x, g, sizes):
  """x_e^T g_e for every group e, in float32."""
  count, tile = x.shape[0], size_of_tile(x.shape[0], sizes.shape[0])
  plan = walk(sizes, count, tile)

  def one(t, dw):
    at, own = tile_at(plan, t, count, tile)
    rows, more = (jnp.where(own, lax.dynamic_slice_in_dim(a, at, tile), 0) for a in (x, g))
    return dw.at[plan.group[t]].add(product("md,mf->df", rows, more))

  return lax.fori_loop(0, plan.count, one, jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32))


def forward(x, weights, sizes):
  return multiply("md,df->mf", x, weights, sizes, weights.shape[2])


def backward(x, weights, sizes, g):
  dx = multiply("mf,df->md", g, weights, sizes, weights.shape[1])
  return dx, matrix_gradient(x, g, sizes).astype(weights.dtype)
