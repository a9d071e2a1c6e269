"""Rows padded to tiles of one group each, then one batched product: the form that XLA runs best on a CPU."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


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


def spread(x: Float[Array, "M D"], layout: Layout) -> Float[Array, "tiles tile D"]:
  """Rows to their places in the tiles, 0 in padding."""
  rows = jnp.where((layout.source >= 0)[:, None], x[jnp.maximum(layout.source, 0)], 0)
  return rows.reshape(layout.group.shape[0], -1, x.shape[1])


def gather(rows: Float[Array, "tiles tile D"], layout: Layout, sizes: Int[Array, "E"], count: int) -> Array:
  """The first `count` rows back from their places, 0 for those past all groups."""
  stop, row = jnp.cumsum(sizes), jnp.arange(count)
  shift = layout.shift[jnp.minimum(jnp.searchsorted(stop, row, side="right"), sizes.shape[0] - 1)]
  y = rows.reshape(-1, rows.shape[-1])[jnp.minimum(row + shift, layout.source.shape[0] - 1)]
  return jnp.where((row < stop[-1])[:, None], y, 0)


def product(spec: str, a, b):
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def layout_of(x, sizes) -> Layout:
  return tile_layout(sizes, x.shape[0], tile_rows(x.shape[0], sizes.shape[0], most=256))


def forward(x, weights, sizes):
  layout = layout_of(x, sizes)
  y = product("tmd,tdf->tmf", spread(x, layout), weights[layout.group])
  return gather(y, layout, sizes, x.shape[0]).astype(x.dtype)


def backward(x, weights, sizes, g):
  layout = layout_of(x, sizes)
  rows, g = spread(x, layout), spread(g, layout)
  dx = product("tmf,tdf->tmd", g, weights[layout.group])
  dw = jnp.zeros(weights.shape, jnp.float32).at[layout.group].add(product("tmd,tmf->tdf", rows, g))
  return gather(dx, layout, sizes, x.shape[0]).astype(x.dtype), dw.astype(weights.dtype)
