"""Mosaic TPU kernels. Scores stand transposed, [keys, queries]: what belongs to a query is a row along the lanes.

Forward and dq: grid (batch, head, query tile, step), a step is a key tile of the prefix or of the window. dk and dv:
grid (batch, key head, key tile, step, head of the group), twice: over the windows of all key tiles, then over the rest
of the row for tiles that hold a prefix, into the same buffers. The last extents are known only while running: the most
that any tile needs. A step beyond what a tile needs repeats the block before it, so that nothing is loaded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.prefix_sliding.mask import segment_start, visible
from pallas_kernels.prefix_sliding.plan import Tiles, bounds, key_plans, query_plan
from pallas_kernels.prefix_sliding.softmax import FLOOR, LOG2E, MASKED, TINY, Options

LANES = 128


def tile_size(length: int) -> int:
  """512, or a smaller multiple of 128 lanes where 512 would pad a row by more than an eighth."""
  least = LANES * -(-length // LANES)
  return next(size for size in (512, 256, LANES) if size * -(-length // size) <= least * 9 // 8)


def layout(segment, prefix_end, q, k, v, *more):
  """Rows padded to whole tiles, and the tiles."""
  length = segment.shape[1]
  size = tile_size(length)
  count = -(-length // size)
  pad = functools.partial(jnp.pad, mode="constant")
  extra = (0, count * size - length)
  start = segment_start(pad(segment, ((0, 0), extra), constant_values=-1))
  end = pad(prefix_end, ((0, 0), extra))
  arrays = [pad(x, ((0, 0), (0, 0), extra, (0, 0))[: x.ndim]) for x in (q, k, v, *more)]
  return Tiles(size, size, count, count), start, end, arrays


def dot(a, b, contract: tuple[int, int]):
  """Product over one axis of each, float32 sums; float32 operands are not rounded."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def scores(q, k, options: Options):
  """Base-2 scores [keys, queries], and the tanh of the capped ones or None."""
  raw = dot(k, q, (1, 1))
  if options.soft_cap is None:
    return raw * (options.scale * LOG2E), None
  capped = jnp.tanh(raw * (options.scale / options.soft_cap))
  return capped * (options.soft_cap * LOG2E), capped


def seen(key_tile, row_tile, start, end, window, tiles: Tiles):
  """The mask of a pair of tiles, [keys, queries]; `start` and `end` are [1, queries]."""
  shape = tiles.keys, tiles.rows
  key = key_tile * tiles.keys + lax.broadcasted_iota(jnp.int32, shape, 0)
  query = row_tile * tiles.rows + lax.broadcasted_iota(jnp.int32, shape, 1)
  return visible(key, query, start, end, window)


def step(live, key_tile, row_tile, last_start, least_end, window, tiles: Tiles, body):
  """body(masked) where the pair is live, without a mask where every query sees every key."""
  first_key, last_key = key_tile * tiles.keys, (key_tile + 1) * tiles.keys - 1
  first_row, last_row = row_tile * tiles.rows, (row_tile + 1) * tiles.rows - 1
  whole = (last_start <= first_key) & (last_key <= first_row)
  if window is not None:
    whole &= (last_key < least_end) | (last_row - first_key < window)
  pl.when(live & whole)(lambda: body(False))
  pl.when(live & jnp.logical_not(whole))(lambda: body(True))


def walk_tile(plan, n, j):
  """The key tile of step j of query tile n; the last one again beyond its count."""
  prefix, prefix_count, window, count = plan[:4]
  j = jnp.minimum(j, count[n] - 1)
  return jnp.where(j < prefix_count[n], prefix[n] + j, window[n] + j - prefix_count[n])


# Forward and dq: query tiles walk key tiles


def walk_call(kernel, tiles: Tiles, plan, shape, kv_heads: int, *, scratch, out, interpret, **names):
  """A pallas_call on grid (B, H, query tiles, most steps); `names` are the operands' kinds in order."""
  batch, heads, _, width = shape
  group, n = heads // kv_heads, tiles.row_tiles

  def row(b, h, i, j, *plan):
    return b, h, i, 0

  def key(b, h, i, j, *plan):
    return b, lax.div(h, group), walk_tile(plan, b * n + i, j), 0

  specs = {
    "q": pl.BlockSpec((None, None, tiles.rows, width), row),
    "k": pl.BlockSpec((None, None, tiles.keys, width), key),
    "ids": pl.BlockSpec((None, 1, tiles.rows), lambda b, h, i, j, *plan: (b, 0, i)),
    "per_row": pl.BlockSpec((None, None, 1, tiles.rows), lambda b, h, i, j, *plan: (b, h, 0, i)),
  }
  tables = [x.reshape(-1) for x in plan]
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=len(tables),
    grid=(batch, heads, n, jnp.max(plan[3])),
    in_specs=[specs[kind] for kind in names["operands"]],
    out_specs=[specs[kind] for kind, _ in out],
    scratch_shapes=scratch,
  )
  call = pl.pallas_call(
    kernel,
    grid_spec=grid_spec,
    out_shape=[x for _, x in out],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    cost_estimate=names["cost"],
    interpret=interpret,
    name=names["name"],
  )
  return functools.partial(call, *tables)


def cost(q, products: int, options: Options, tiles: Tiles) -> pl.CostEstimate:
  """Of tiles in windows and one of a prefix; a longer prefix is known only while running."""
  batch, heads, length, width = q.shape
  keys = length if options.window is None else min(length, options.window + tiles.rows + tiles.keys)
  pairs = batch * heads * length * keys
  moved = q.dtype.itemsize * width * (2 * batch * heads * length + 2 * pairs // tiles.rows)
  return pl.CostEstimate(flops=2 * products * pairs * width, transcendentals=pairs, bytes_accessed=moved)


def forward_kernel(*refs, options: Options, tiles: Tiles):
  plan, refs = refs[:6], refs[6:]
  q, k, v, start, end, out, lse, top, total, acc = refs
  i, j = pl.program_id(2), pl.program_id(3)
  n = pl.program_id(0) * tiles.row_tiles + i
  key_tile = walk_tile(plan, n, j)

  @pl.when(j == 0)
  def _():
    top[...] = jnp.full_like(top, FLOOR)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def body(masked):
    s, _ = scores(q[...], k[...], options)
    if masked:
      s = jnp.where(seen(key_tile, i, start[...], end[...], options.window, tiles), s, MASKED)
    higher = jnp.maximum(top[...], jnp.max(s, 0, keepdims=True))
    p = jnp.exp2(s - higher)
    shrink = jnp.exp2(top[...] - higher)
    top[...] = higher
    total[...] = shrink * total[...] + jnp.sum(p, 0, keepdims=True)
    acc[...] = shrink * acc[...] + dot(v[...], p.astype(v.dtype), (0, 0))

  step(j < plan[3][n], key_tile, i, plan[4][n], plan[5][n], options.window, tiles, body)

  @pl.when(j == pl.num_programs(3) - 1)
  def _():
    some = jnp.maximum(total[...], TINY)
    out[...] = (acc[...] / some).T.astype(out.dtype)
    lse[...] = jnp.where(total[...] > 0, top[...] + jnp.log2(some), 0.0)


def forward(q, k, v, segment, prefix_end, options: Options, *, interpret=False):
  """As `xla.forward`."""
  length = q.shape[2]
  tiles, start, end, (q, k, v) = layout(segment, prefix_end, q, k, v)
  plan = (*query_plan(start, end, options.window, tiles), *bounds(start, end, tiles))
  batch, heads, rows, width = q.shape
  call = walk_call(
    functools.partial(forward_kernel, options=options, tiles=tiles),
    tiles,
    plan,
    q.shape,
    k.shape[1],
    operands=("q", "k", "k", "ids", "ids"),
    out=(
      ("q", jax.ShapeDtypeStruct(q.shape, q.dtype)),
      ("per_row", jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.float32)),
    ),
    scratch=[pltpu.VMEM(shape, jnp.float32) for shape in ((1, tiles.rows), (1, tiles.rows), (width, tiles.rows))],
    cost=cost(q, 2, options, tiles),
    interpret=interpret,
    name="prefix_sliding_forward",
  )
  out, lse = call(q, k, v, start[:, None], end[:, None])
  return out[:, :, :length], lse[:, :, 0, :length]


def probabilities(q, k, v, g, lse, mean, mask, options: Options):
  """p and the gradient of the scores over `scale`, [keys, queries]."""
  s, capped = scores(q, k, options)
  s = s - lse
  p = jnp.exp2(s if mask is None else jnp.where(mask, s, MASKED))
  ds = p * (dot(v, g, (1, 1)) - mean)
  return p, ds if capped is None else ds * (1 - capped * capped)


def dq_kernel(*refs, options: Options, tiles: Tiles):
  plan, refs = refs[:6], refs[6:]
  q, k, v, start, end, g, lse, mean, dq, acc = refs
  i, j = pl.program_id(2), pl.program_id(3)
  n = pl.program_id(0) * tiles.row_tiles + i
  key_tile = walk_tile(plan, n, j)

  @pl.when(j == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)

  def body(masked):
    mask = seen(key_tile, i, start[...], end[...], options.window, tiles) if masked else None
    _, ds = probabilities(q[...], k[...], v[...], g[...], lse[...], mean[...], mask, options)
    acc[...] += dot(k[...], ds.astype(k.dtype), (0, 0))

  step(j < plan[3][n], key_tile, i, plan[4][n], plan[5][n], options.window, tiles, body)

  @pl.when(j == pl.num_programs(3) - 1)
  def _():
    dq[...] = (acc[...] * options.scale).T.astype(dq.dtype)


# dk and dv: key tiles walk query tiles


def dkv_kernel(*refs, options: Options, tiles: Tiles):
  (tile, first, count, last_start, least_end), refs = refs[:5], refs[5:]
  q, k, v, start, end, g, lse, mean, dk_before, dv_before, dk, dv, dk_acc, dv_acc = refs
  n, j, head = pl.program_id(2), pl.program_id(3), pl.program_id(4)
  at = pl.program_id(0) * tiles.key_tiles + n
  row_tile = jnp.minimum(first[at] + j, tiles.row_tiles - 1)
  row = pl.program_id(0) * tiles.row_tiles + row_tile

  @pl.when((j == 0) & (head == 0))
  def _():
    dk_acc[...] = dk_before[...]
    dv_acc[...] = dv_before[...]

  def body(masked):
    mask = seen(tile[at], row_tile, start[...], end[...], options.window, tiles) if masked else None
    p, ds = probabilities(q[...], k[...], v[...], g[...], lse[...], mean[...], mask, options)
    dv_acc[...] += dot(p.astype(g.dtype), g[...], (1, 0))
    dk_acc[...] += dot(ds.astype(q.dtype), q[...], (1, 0))

  step(j < count[at], tile[at], row_tile, last_start[row], least_end[row], options.window, tiles, body)

  @pl.when((j == pl.num_programs(3) - 1) & (head == pl.num_programs(4) - 1))
  def _():
    dk[...] = dk_acc[...]
    dv[...] = dv_acc[...]


def dkv_call(plan, limits, tiles: Tiles, operands, sums, options: Options, estimate, extent, interpret):
  """Adds to `sums`, (dk / scale, dv) in float32, what the pairs of `plan` give."""
  q, k = operands[:2]
  batch, heads, _, width = q.shape
  kv_heads = k.shape[1]
  group, n = heads // kv_heads, tiles.key_tiles

  def row_tile(b, i, j, first, count):
    at = b * n + i
    return jnp.minimum(first[at] + jnp.minimum(j, jnp.maximum(count[at] - 1, 0)), tiles.row_tiles - 1)

  def row(b, h, i, j, g, tile, first, count, *limits):
    return b, h * group + g, row_tile(b, i, j, first, count), 0

  def key(b, h, i, j, g, tile, *rest):
    return b, h, tile[b * n + i], 0

  def ids(b, h, i, j, g, tile, first, count, *limits):
    return b, 0, row_tile(b, i, j, first, count)

  def per_row(b, h, i, j, g, tile, first, count, *limits):
    return b, h * group + g, 0, row_tile(b, i, j, first, count)

  specs = {
    "q": pl.BlockSpec((None, None, tiles.rows, width), row),
    "k": pl.BlockSpec((None, None, tiles.keys, width), key),
    "ids": pl.BlockSpec((None, 1, tiles.rows), ids),
    "per_row": pl.BlockSpec((None, None, 1, tiles.rows), per_row),
  }
  tables = [x.reshape(-1) for x in (*plan, *limits)]
  kinds = ("q", "k", "k", "ids", "ids", "q", "per_row", "per_row", "k", "k")
  return pl.pallas_call(
    functools.partial(dkv_kernel, options=options, tiles=tiles),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(tables),
      grid=(batch, kv_heads, *extent, group),
      in_specs=[specs[kind] for kind in kinds],
      out_specs=[specs["k"], specs["k"]],
      scratch_shapes=[pltpu.VMEM((tiles.keys, width), jnp.float32)] * 2,
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sums],
    input_output_aliases={len(tables) + 8: 0, len(tables) + 9: 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")
    ),
    cost_estimate=estimate,
    interpret=interpret,
    name="prefix_sliding_dkv",
  )(*tables, *operands, *sums)


def backward(q, k, v, segment, prefix_end, out, lse, g, options: Options, *, interpret=False):
  """As `xla.backward`."""
  length = q.shape[2]
  mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
  tiles, start, end, (q, k, v, g, lse, mean) = layout(segment, prefix_end, q, k, v, g, lse, mean)
  limits = bounds(start, end, tiles)
  operands = (q, k, v, start[:, None], end[:, None], g, lse[:, :, None], mean[:, :, None])
  call = walk_call(
    functools.partial(dq_kernel, options=options, tiles=tiles),
    tiles,
    (*query_plan(start, end, options.window, tiles), *limits),
    q.shape,
    k.shape[1],
    operands=("q", "k", "k", "ids", "ids", "q", "per_row", "per_row"),
    out=(("q", jax.ShapeDtypeStruct(q.shape, q.dtype)),),
    scratch=[pltpu.VMEM((q.shape[3], tiles.rows), jnp.float32)],
    cost=cost(q, 3, options, tiles),
    interpret=interpret,
    name="prefix_sliding_dq",
  )
  (dq,) = call(*operands)
  dk, dv = dkv(operands, start, end, limits, tiles, options, interpret)
  dk, dv = ((x[:, :, :length]).astype(k.dtype) for x in (dk * options.scale, dv))
  return dq[:, :, :length], dk, dv


def dkv(operands, start, end, limits, tiles: Tiles, options: Options, interpret):
  near, far = key_plans(start, end, options.window, tiles)
  q, k = operands[:2]
  run = functools.partial(dkv_call, limits=limits, tiles=tiles, operands=operands, options=options, interpret=interpret)
  zeros = jnp.zeros(k.shape, jnp.float32)
  sums = run(
    near, sums=(zeros, zeros), estimate=cost(q, 4, options, tiles), extent=(tiles.key_tiles, jnp.max(near.count))
  )
  if far is None:
    return sums
  used, most = jnp.max(jnp.sum(far.count > 0, axis=1)), jnp.max(far.count)
  extent = jnp.maximum(used, 1), jnp.maximum(most, 1)
  return run(far, sums=sums, estimate=cost(q, 1, options, tiles), extent=extent)
