"""Mosaic GPU kernel for Hopper, forward only: the gradients come from `xla.backward`, which takes what this gives.

One warpgroup to a tile of 64 queries of a head: tensor cores do the products, TMA copies bring key tiles two ahead.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefix_sliding.mask import segment_start, visible
from pallas_kernels.prefix_sliding.plan import Tiles, query_plan
from pallas_kernels.prefix_sliding.softmax import FLOOR, LOG2E, MASKED, TINY, Options

TILE, STAGES = 64, 2


def check_gpu(q) -> None:
  if jax.__version_info__ < (0, 12):
    raise ValueError(f"implementation 'gpu' needs JAX 0.12, this is {jax.__version__}; use implementation='xla'")
  if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[3] % 64 or q.shape[3] > 256:
    raise ValueError(
      "implementation 'gpu' takes bfloat16 or float16 and a head width of 64, 128, 192 or 256, got "
      f"{q.dtype} and {q.shape[3]}; use implementation='xla'"
    )


def per_query(x):
  return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))


def over_keys(x, shape):
  return lax.broadcast_in_dim(x, shape, [0])


def forward_kernel(q, k, v, start, end, prefix, prefix_count, window, count, out, lse, *scratch, group, options):
  q_tile, k_tiles, v_tiles, lse_tile, q_here, k_here, v_here = scratch
  batch, head, i = (lax.axis_index(name) for name in ("batch", "head", "tile"))
  rows, width, pairs = pl.ds(i * TILE, TILE), q_tile.shape[1], (TILE, TILE)
  steps, kv_head = count[batch, i], lax.div(head, jnp.int32(group))
  load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
  first, stop = load(start.at[batch, rows]), load(end.at[batch, rows])

  def key_tile(j):
    return jnp.where(j < prefix_count[batch, i], prefix[batch, i] + j, window[batch, i] + j - prefix_count[batch, i])

  def fetch(j):
    slot, keys = lax.rem(j, jnp.int32(STAGES)), pl.ds(key_tile(j) * TILE, TILE)
    plgpu.copy_gmem_to_smem(k.at[batch, kv_head, keys], k_tiles.at[slot], k_here.at[slot])
    plgpu.copy_gmem_to_smem(v.at[batch, kv_head, keys], v_tiles.at[slot], v_here.at[slot])

  plgpu.copy_gmem_to_smem(q.at[batch, head, rows], q_tile, q_here)
  for j in range(STAGES):
    pl.when(j < steps)(functools.partial(fetch, jnp.int32(j)))
  plgpu.barrier_wait(q_here)

  def seen(j):
    query = i * TILE + plgpu.broadcasted_iota(jnp.int32, pairs, 0, layout=plgpu.Layout.WGMMA)
    key = key_tile(j) * TILE + plgpu.broadcasted_iota(jnp.int32, pairs, 1, layout=plgpu.Layout.WGMMA)
    return visible(key, query, over_keys(first, pairs), over_keys(stop, pairs), options.window)

  def step(j, carry):
    top, total, acc = carry
    slot = lax.rem(j, jnp.int32(STAGES))
    plgpu.barrier_wait(k_here.at[slot])

    def product(raw):
      plgpu.wgmma(raw, q_tile, k_tiles.at[slot].transpose((1, 0)))
      return raw[...]

    s = pl.run_scoped(product, plgpu.ACC(pairs, jnp.float32))
    s = s * (options.scale * LOG2E) if options.soft_cap is None else capped(s, options)
    s = jnp.where(seen(j), s, MASKED)
    higher = jnp.maximum(top, s.max(axis=1))
    p, shrink = jnp.exp2(s - over_keys(higher, pairs)), jnp.exp2(top - higher)
    plgpu.barrier_wait(v_here.at[slot])

    def read(acc):
      plgpu.wgmma(acc, p.astype(q_tile.dtype), v_tiles.at[slot])

    acc = pl.run_state(read)(plgpu.ACC.init(acc * over_keys(shrink, acc.shape)))
    pl.when(j + STAGES < steps)(lambda: fetch(j + STAGES))
    return higher, total * shrink + p.sum(axis=1), acc

  full = functools.partial(jnp.full, dtype=jnp.float32)
  zero = plgpu.layout_cast(full((TILE, width), 0), plgpu.Layout.WGMMA)
  top, total, acc = lax.fori_loop(
    jnp.int32(0), steps, step, (per_query(full((TILE,), FLOOR)), per_query(full((TILE,), 0)), zero)
  )
  some = jnp.maximum(total, TINY)
  q_tile[...] = (acc / over_keys(some, acc.shape)).astype(q_tile.dtype)
  lse_tile[...] = jnp.where(total > 0, top + jnp.log(some) * LOG2E, 0.0)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(q_tile, out.at[batch, head, rows])
  plgpu.copy_smem_to_gmem(lse_tile, lse.at[batch, head, rows])
  plgpu.wait_smem_to_gmem(0)


def capped(s, options: Options):
  return jnp.tanh(s * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2E)


def forward(q, k, v, segment, prefix_end, options: Options, *, interpret=None):
  """As `xla.forward`."""
  check_gpu(q)
  length = q.shape[2]
  extra = (0, -length % TILE)
  q, k, v = (jnp.pad(x, ((0, 0), (0, 0), extra, (0, 0))) for x in (q, k, v))
  start = segment_start(jnp.pad(segment, ((0, 0), extra), constant_values=-1))
  end = jnp.pad(prefix_end, ((0, 0), extra))
  batch, heads, rows, width = q.shape
  tiles = rows // TILE
  plan = query_plan(start, end, options.window, Tiles(TILE, TILE, tiles, tiles))
  swizzled = dict(transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
  kernel = plgpu.kernel(
    functools.partial(forward_kernel, group=heads // k.shape[1], options=options),
    out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)),
    scratch_types=(
      plgpu.SMEM((TILE, width), q.dtype, **swizzled),
      plgpu.SMEM((STAGES, TILE, width), q.dtype, **swizzled),
      plgpu.SMEM((STAGES, TILE, width), q.dtype, **swizzled),
      plgpu.SMEM((TILE,), jnp.float32),
      plgpu.Barrier(),
      plgpu.Barrier(num_barriers=STAGES),
      plgpu.Barrier(num_barriers=STAGES),
    ),
    grid=(heads, tiles, batch),
    grid_names=("head", "tile", "batch"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )
  out, lse = kernel(q, k, v, start, end, *plan)
  return out[:, :, :length], lse[:, :, :length]
