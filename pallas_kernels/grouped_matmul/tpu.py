"""Mosaic TPU kernels in the manner of megablox: a walk over the pairs of a tile of rows and a group with rows in it.

Products: grid (column tiles, visits, depth tiles). Gradients of the matrices: grid (column tiles, depth tiles, visits).
The number of visits is known only while running: at most tiles + groups.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int


class Visits(NamedTuple):
  """Of each visit its group and tile of rows; of each group its first row, and the row after its last."""

  group: Int[Array, "V"]
  tile: Int[Array, "V"]
  start: Int[Array, "G"]
  stop: Int[Array, "G"]


def tile_rows(rows: int) -> int:
  return min(512, 128 * -(-rows // 128))


def tile_of(size: int) -> int:
  """The largest of 512, 256 and 128 that divides `size`, else all of it."""
  return next((tile for tile in (512, 256, 128) if size % tile == 0), size)


def visits(sizes: Int[Array, "E"], rows: int, tile: int) -> tuple[Visits, Int[Array, "G"]]:
  """The visits in order of rows, and how many each group has. The last group is that of the rows past all others."""
  sizes = jnp.append(sizes, rows - jnp.sum(sizes)).astype(jnp.int32)
  stop = jnp.cumsum(sizes)
  start = stop - sizes
  count = jnp.where(sizes > 0, (stop - 1) // tile - start // tile + 1, 0)
  most = rows // tile + sizes.shape[0]
  visit, done = jnp.arange(most, dtype=jnp.int32), jnp.cumsum(count)
  group = jnp.minimum(jnp.searchsorted(done, visit, side="right"), sizes.shape[0] - 1).astype(jnp.int32)
  at = start[group] // tile + visit - (done - count)[group]
  return Visits(group, jnp.clip(at, 0, rows // tile - 1), start, stop), count


def dot(a, b, contract: tuple[int, int]):
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def in_group(shape, visit, plan: Visits):
  """Which rows of the visit's tile belong to its group."""
  row = plan.tile[visit] * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
  group = plan.group[visit]
  return (plan.start[group] <= row) & (row < plan.stop[group])


def product_kernel(group, tile, start, stop, x, w, y, acc, *, groups: int, contract: int):
  visit, depth = pl.program_id(1), pl.program_id(2)
  plan = Visits(group, tile, start, stop)

  @pl.when(depth == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(group[visit] < groups)
  def _():
    acc[...] += dot(x[...], w[...], (1, contract))

  @pl.when(depth == pl.num_programs(2) - 1)
  def _():
    y[...] = jnp.where(in_group(y.shape, visit, plan), acc[...], y[...].astype(jnp.float32)).astype(y.dtype)


def padded(x, tile: int):
  return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))


def matmul(x, weights, sizes, *, contract: int, interpret):
  """x[m] times its group's matrix [D, F] over axis `contract - 1` of it: 1 is the product, 2 with the transposed."""
  length, depth = x.shape
  groups, width = weights.shape[0], weights.shape[3 - contract]
  tile, tile_d, tile_f = tile_rows(length), tile_of(depth), tile_of(width)
  x = padded(x, tile)
  plan, count = visits(sizes, x.shape[0], tile)

  def matrix(f, v, d, group, *rest):
    at = jnp.minimum(group[v], groups - 1)
    return (at, d, f) if contract == 1 else (at, f, d)

  y = pl.pallas_call(
    functools.partial(product_kernel, groups=groups, contract=contract - 1),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(width // tile_f, jnp.sum(count), depth // tile_d),
      in_specs=[
        pl.BlockSpec((tile, tile_d), lambda f, v, d, group, tile, *rest: (tile[v], d)),
        pl.BlockSpec((None, tile_d, tile_f) if contract == 1 else (None, tile_f, tile_d), matrix),
      ],
      out_specs=pl.BlockSpec((tile, tile_f), lambda f, v, d, group, tile, *rest: (tile[v], f)),
      scratch_shapes=[pltpu.VMEM((tile, tile_f), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    cost_estimate=pl.CostEstimate(
      flops=2 * x.shape[0] * depth * width,
      transcendentals=0,
      bytes_accessed=x.dtype.itemsize * (x.size * (width // tile_f) + weights.size + x.shape[0] * width),
    ),
    interpret=interpret,
    name="grouped_matmul",
  )(*plan, x, weights)
  return y[:length]


def matrix_kernel(group, tile, start, stop, x, g, dw, acc):
  visit, last = pl.program_id(2), pl.num_programs(2) - 1
  plan = Visits(group, tile, start, stop)
  before, after = group[jnp.maximum(visit - 1, 0)], group[jnp.minimum(visit + 1, last)]

  @pl.when((visit == 0) | (before != group[visit]))
  def _():
    acc[...] = jnp.zeros_like(acc)

  rows, more = (jnp.where(in_group(r.shape, visit, plan), r[...], 0) for r in (x, g))  # rows left over hold anything
  acc[...] += dot(rows, more, (0, 0))

  @pl.when((visit == last) | (after != group[visit]))
  def _():
    dw[...] = acc[...].astype(dw.dtype)


def matrix_gradient(x, g, sizes, dtype, *, interpret):
  """dW[e] = x_e^T g_e over the rows of group e."""
  groups, (depth, width) = sizes.shape[0], (x.shape[1], g.shape[1])
  tile, tile_d, tile_f = tile_rows(x.shape[0]), tile_of(depth), tile_of(width)
  x, g = padded(x, tile), padded(g, tile)
  plan, count = visits(sizes, x.shape[0], tile)

  def matrix(f, d, v, group, *rest):
    return jnp.minimum(group[v], groups - 1), d, f

  dw = pl.pallas_call(
    matrix_kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(width // tile_f, depth // tile_d, jnp.maximum(jnp.sum(count[:groups]), 1)),
      in_specs=[
        pl.BlockSpec((tile, tile_d), lambda f, d, v, group, tile, *rest: (tile[v], d)),
        pl.BlockSpec((tile, tile_f), lambda f, d, v, group, tile, *rest: (tile[v], f)),
      ],
      out_specs=pl.BlockSpec((None, tile_d, tile_f), matrix),
      scratch_shapes=[pltpu.VMEM((tile_d, tile_f), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((groups, depth, width), dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    cost_estimate=pl.CostEstimate(
      flops=2 * x.shape[0] * depth * width,
      transcendentals=0,
      bytes_accessed=x.dtype.itemsize * (x.size * (width // tile_f) + g.size * (depth // tile_d)),
    ),
    interpret=interpret,
    name="grouped_matmul_gradient",
  )(*plan, x, g)
  return jnp.where((sizes > 0)[:, None, None], dw, 0)  # a group without rows has no visit


def forward(x, weights, sizes, *, interpret=False):
  return matmul(x, weights, sizes, contract=1, interpret=interpret)


def backward(x, weights, sizes, g, *, interpret=False):
  dx = matmul(g, weights, sizes, contract=2, interpret=interpret)
  return dx, matrix_gradient(x, g, sizes, weights.dtype, interpret=interpret)
