"""New tokens against a cache [prefix | ring]: slots say which position they hold, so their order does not matter."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation, choose
from pallas_kernels.prefix_sliding import tpu, xla
from pallas_kernels.prefix_sliding.checks import (
  check_heads,
  check_integers,
  check_not_negative,
  check_options,
  concrete,
)
from pallas_kernels.prefix_sliding.mask import visible
from pallas_kernels.prefix_sliding.softmax import FLOOR, MASKED, TINY, Options

SUBLANES = 16  # rows of a tile of queries, for every dtype


def prefix_sliding_decode(
  q: Float[Array, "B H t D"],
  k_cache: Float[Array, "B K S D"],
  v_cache: Float[Array, "B K S D"],
  slot_position: Int[Array, "B S"],
  position: Int[Array, "B t"],
  prefix_length: Int[Array, "B"],
  *,
  window: int | None,
  scale: float,
  soft_cap: float | None = None,
  implementation: str | None = None,
) -> Float[Array, "B H t D"]:
  """`prefix_sliding_attention` of t new tokens to a cache that holds their own keys, position by position.

  slot_position is what a slot holds, -1 if nothing: key s counts where s <= position and (s < prefix_length or
  position - s < window). Positions are the sequence's own, from 0; a new token at position -1 gives zeros. `cache_slot`
  says where to write. A ring of window slots serves one new token at a time: t tokens need window + t - 1, or the
  first of them miss what the last have overwritten. No custom gradient. Not for prefill: the scores are dense in S.
  ValueError: shapes that disagree, window below 1, a prefix that does not fit in the cache beside the window.
  Source: design of Muennighoff et al. 2026 (Prefix Sliding). Ours differs: nothing.
  """
  check_decode(q, k_cache, v_cache, slot_position, position, prefix_length, window)
  options = check_options(window, scale, soft_cap)
  run = choose(implementation, IMPLEMENTATIONS).forward
  ids = (x.astype(jnp.int32) for x in (slot_position, position, prefix_length))
  return run(q, k_cache, v_cache, *ids, options)


def cache_slot(
  position: Int[Array, "*N"], prefix_length: Int[Array, "*N"], *, slots: int, ring: int
) -> Int[Array, "*N"]:
  """Where the key of a position lives: slot `position` in the prefix, else the ring of the last `ring` slots.

  ring = window for one new token at a time, and prefix_length <= slots - ring.
  """
  if not 1 <= ring <= slots:
    raise ValueError(f"ring must lie in [1, slots={slots}], got {ring}; a cache is a prefix and a ring of the window")
  return jnp.where(position < prefix_length, position, slots - ring + (position - prefix_length) % ring)


def check_decode(q, k_cache, v_cache, slot_position, position, prefix_length, window) -> None:
  if q.ndim != 4 or k_cache.ndim != 4:
    raise ValueError(f"q must be [B, H, t, D] and k_cache [B, K, S, D], got {q.shape} and {k_cache.shape}")
  check_heads(q, k_cache, v_cache)
  batch, slots = q.shape[0], k_cache.shape[2]
  check_integers("slot_position", slot_position, (batch, slots))
  check_integers("position", position, (batch, q.shape[2]))
  check_integers("prefix_length", prefix_length, (batch,))
  check_not_negative("prefix_length", prefix_length)
  if concrete(prefix_length) and batch:
    longest, room = np.asarray(prefix_length).max(), slots - (window if window and window < slots else 0)
    if longest > room:
      raise ValueError(
        f"a prefix of {longest} does not fit in a cache of {slots} slots beside a window of {window}; "
        f"use a cache of prefix + window slots, or a prefix of at most {room}"
      )


def xla_decode(q, k, v, slot_position, position, prefix_length, options: Options):
  batch, _, new, width = q.shape
  rows = q.reshape(batch, k.shape[1], -1, width)  # the new tokens of a group's heads
  mask = visible(slot_position[:, None], position[..., None], 0, prefix_length[:, None, None], options.window)
  raw = xla.dot("bkrd,bksd->bkrs", rows, k).reshape(batch, k.shape[1], -1, new, k.shape[2])
  s = jnp.where(mask[:, None, None], xla.scores(raw, options)[0], MASKED)
  p = jnp.exp2(s - jnp.maximum(jnp.max(s, -1, keepdims=True), FLOOR))
  out = xla.dot("bkrs,bksd->bkrd", p.astype(v.dtype).reshape(*rows.shape[:3], -1), v).reshape(*p.shape[:-1], width)
  return (out / jnp.maximum(jnp.sum(p, -1), TINY)[..., None]).astype(q.dtype).reshape(q.shape)


# Mosaic TPU: grid (batch, key head, tile of slots); the new tokens of a group's heads are the rows of one tile


def decode_kernel(used, count, q, k, v, slot, position, prefix, out, top, total, acc, *, options, tile, slots):
  b, j = pl.program_id(0), pl.program_id(2)

  @pl.when(j == 0)
  def _():
    top[...] = jnp.full_like(top, FLOOR)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  @pl.when(j < count[b])
  def _():
    mask = visible(slot[...].T, position[...], 0, prefix[...], options.window)
    s = jnp.where(mask, tpu.scores(q[...], k[...], options)[0], MASKED)
    higher = jnp.maximum(top[...], jnp.max(s, 0, keepdims=True))
    p, shrink = jnp.exp2(s - higher), jnp.exp2(top[...] - higher)
    inside = used[b, j] * tile + lax.broadcasted_iota(jnp.int32, v.shape, 0) < slots
    value = jnp.where(inside, v[...], 0)  # the last tile may reach beyond the cache, where anything stands
    top[...] = higher
    total[...] = shrink * total[...] + jnp.sum(p, 0, keepdims=True)
    acc[...] = shrink * acc[...] + tpu.dot(value, p.astype(v.dtype), (0, 0))

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    out[...] = (acc[...] / jnp.maximum(total[...], TINY)).T.astype(out.dtype)


def tiles_in_use(slot_position, position, prefix_length, options: Options, tile: int):
  """For each row the tiles that any new token sees, first; and how many."""
  mask = visible(slot_position[:, None], position[..., None], 0, prefix_length[:, None, None], options.window)
  some = mask.any(1).reshape(mask.shape[0], -1, tile).any(-1)
  return jnp.argsort(~some, axis=1, stable=True).astype(jnp.int32), some.sum(1).astype(jnp.int32)


def tpu_decode(q, k, v, slot_position, position, prefix_length, options: Options, *, interpret=False):
  batch, heads, new, width = q.shape
  kv_heads, slots = k.shape[1:3]
  group, tile = heads // kv_heads, min(512, tpu.LANES * math.ceil(slots / tpu.LANES))
  rows = SUBLANES * math.ceil(group * new / SUBLANES)
  more = rows - group * new
  queries = jnp.pad(q.reshape(batch, kv_heads, -1, width), ((0, 0), (0, 0), (0, more), (0, 0)))
  at = jnp.pad(jnp.tile(position, (1, group)), ((0, 0), (0, more)), constant_values=-1)
  slot = jnp.pad(slot_position, ((0, 0), (0, -slots % tile)), constant_values=-1)
  used, count = tiles_in_use(slot, position, prefix_length, options, tile)

  def key(b, h, j, used, count):
    return b, h, used[b, jnp.maximum(jnp.minimum(j, count[b] - 1), 0)], 0

  def positions(b, h, j, used, count):
    return b, 0, used[b, jnp.maximum(jnp.minimum(j, count[b] - 1), 0)]

  query = pl.BlockSpec((None, None, rows, width), lambda b, h, j, used, count: (b, h, 0, 0))
  per_row = pl.BlockSpec((None, 1, rows), lambda b, h, j, used, count: (b, 0, 0))
  keys = pl.BlockSpec((None, None, tile, width), key)
  prefix = jnp.broadcast_to(prefix_length[:, None, None], (batch, 1, rows))
  pairs = batch * heads * new * slots
  out = pl.pallas_call(
    functools.partial(decode_kernel, options=options, tile=tile, slots=slots),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch, kv_heads, used.shape[1]),
      in_specs=[query, keys, keys, pl.BlockSpec((None, 1, tile), positions), per_row, per_row],
      out_specs=query,
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in ((1, rows), (1, rows), (width, rows))],
    ),
    out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    cost_estimate=pl.CostEstimate(
      flops=4 * pairs * width, transcendentals=pairs, bytes_accessed=2 * k.size * k.dtype.itemsize
    ),
    interpret=interpret,
    name="prefix_sliding_decode",
  )(used, count, queries, k, v, slot[:, None], at[:, None], prefix)
  return out[:, :, : group * new].reshape(q.shape)


IMPLEMENTATIONS = {"tpu": Implementation(tpu_decode, platforms=("tpu",)), "xla": Implementation(xla_decode)}
