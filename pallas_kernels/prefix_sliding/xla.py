"""Blockwise attention in plain XLA: each block of queries walks the tiles of its prefix, then those of its window.

Time and memory are linear in the row for a finite window. How many tiles a block walks is found while running, so that
nothing static has to bound the prefix. All rows of a batch walk as many as the longest needs; the rest are masked.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.prefix_sliding.mask import segment_start, visible, window_start
from pallas_kernels.prefix_sliding.softmax import FLOOR, LOG2E, MASKED, TINY, Options


class Block(NamedTuple):
  """A block of queries, the group's heads as rows: arrays [B, K, G, c, ...], and what it walks."""

  query: Int[Array, "c"]
  start: Int[Array, "B c"]
  prefix_end: Int[Array, "B c"]
  first: Int[Array, "B"]  # key at which the prefix tiles begin
  tiles: Int[Array, "B"]  # of the prefix, before the window
  window: Int[Array, "B"]  # key at which the window tiles begin
  count: Int[Array, ""]  # tiles to walk, of prefix and window, in the row that needs most


def block_sizes(length: int, window: int | None) -> tuple[int, int]:
  """Queries in a block and keys in a tile: small against the window, so that little is computed to be masked."""
  most = 128 if window is not None and window <= 1024 else 256
  rows = min(most, 8 * math.ceil(length / 8))
  return rows, rows


def rows_at(x: Float[Array, "B K S D"], at: Int[Array, "B"], size: int) -> Float[Array, "B K size D"]:
  """x[b, :, at[b] : at[b] + size]."""
  return jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, size, axis=1))(x, at)


def add_rows_at(x: Float[Array, "B K S D"], at: Int[Array, "B"], y: Float[Array, "B K size D"]):
  def add(row, i, part):
    part = part + lax.dynamic_slice_in_dim(row, i, part.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(row, part, i, axis=1)

  return jax.vmap(add)(x, at, y)


def dot(spec: str, a, b):
  """einsum of equal dtypes with float32 sums; float32 operands are not rounded."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def rows_by_keys(rows, keys):
  """[B, K, G, c, D] by [B, K, s, D] over D: the rows of a group are those of one product."""
  batch, kv_heads, group, count, width = rows.shape
  out = dot("bkrd,bksd->bkrs", rows.reshape(batch, kv_heads, -1, width), keys)
  return out.reshape(batch, kv_heads, group, count, -1)


def over_keys(weights, values):
  """[B, K, G, c, s] by [B, K, s, D] over keys."""
  batch, kv_heads, group, count, keys = weights.shape
  out = dot("bkrs,bksd->bkrd", weights.reshape(batch, kv_heads, -1, keys), values)
  return out.reshape(batch, kv_heads, group, count, -1)


def over_rows(weights, rows):
  """[B, K, G, c, s] by [B, K, G, c, D] over the rows of the group."""
  batch, kv_heads = weights.shape[:2]
  merged = (x.reshape(batch, kv_heads, -1, x.shape[-1]) for x in (weights, rows))
  return dot("bkrs,bkrd->bksd", *merged)


def scores(q, k, options: Options):
  """(base-2 scores, tanh of the capped ones or None)."""
  raw = rows_by_keys(q, k)
  if options.soft_cap is None:
    return raw * (options.scale * LOG2E), None
  capped = jnp.tanh(raw * (options.scale / options.soft_cap))
  return capped * (options.soft_cap * LOG2E), capped


class Walk:
  """The blocks of one call and the tiles of each."""

  def __init__(self, q, k, start, prefix_end, options: Options):
    self.options, self.length = options, q.shape[2]
    self.rows, self.keys = block_sizes(self.length, options.window)
    self.blocks = -(-self.length // self.rows)
    more = self.blocks * self.rows - self.length
    pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, more)))
    nothing = jnp.arange(self.length, self.length + more, dtype=jnp.int32) + 1
    self.start = pad(start).at[:, self.length :].set(nothing)
    self.prefix_end = pad(prefix_end)
    self.low = window_start(self.start, options.window)
    self.group = q.shape[1] // k.shape[1]

  def padded_keys(self, x):
    return jnp.pad(x, ((0, 0), (0, 0), (0, self.blocks * self.rows - self.length + self.keys), (0, 0)))

  def split(self, x: Float[Array, "B H T *D"]) -> Float[Array, "n B K G c *D"]:
    """Queries by block."""
    batch, heads, length, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, self.blocks * self.rows - length), *((0, 0),) * len(rest)))
    x = x.reshape(batch, heads // self.group, self.group, self.blocks, self.rows, *rest)
    return jnp.moveaxis(x, 3, 0)

  def join(self, x: Float[Array, "n B K G c *D"]) -> Float[Array, "B H T *D"]:
    batch, heads, rest = x.shape[1], x.shape[2] * self.group, x.shape[5:]
    return jnp.moveaxis(x, 0, 3).reshape(batch, heads, -1, *rest)[:, :, : self.length]

  def block(self, i) -> Block:
    at = i * self.rows
    start, prefix_end, low = (
      lax.dynamic_slice_in_dim(x, at, self.rows, 1) for x in (self.start, self.prefix_end, self.low)
    )
    # only the first segment of a block can have keys before its window: those after it begin inside the block
    first, window = start[:, 0], low[:, 0]
    prefix = jnp.minimum(prefix_end[:, 0], window) - first
    tiles = jnp.where(prefix > 0, -(-prefix // self.keys), 0)
    count = jnp.max(tiles + -(-(at + self.rows - window) // self.keys))
    return Block(at + jnp.arange(self.rows), start, prefix_end, first, tiles, window, count)

  def tile(self, block: Block, j) -> tuple[Int[Array, "B"], Array]:
    """Where tile j begins, and which of its keys each query sees, [B, 1, 1, c, keys]."""
    in_prefix = j < block.tiles
    at = jnp.where(in_prefix, block.first + j * self.keys, block.window + (j - block.tiles) * self.keys)
    key = at[:, None] + jnp.arange(self.keys)
    once = jnp.where(in_prefix[:, None], key < block.window[:, None], True)
    seen = visible(
      key[:, None], block.query[:, None], block.start[..., None], block.prefix_end[..., None], self.options.window
    )
    return at, (seen & once[:, None])[:, None, None]


def forward(q, k, v, segment, prefix_end, options: Options):
  """Output like q, and the base-2 log-sum-exp of the scores [B, H, T] in float32, 0 where there is no key."""
  walk = Walk(q, k, segment_start(segment), prefix_end, options)
  keys, values = walk.padded_keys(k), walk.padded_keys(v)

  def one(_, ins):
    i, queries = ins
    block = walk.block(i)

    def tile(j, carry):
      top, total, out = carry
      at, seen = walk.tile(block, j)
      s = jnp.where(seen, scores(queries, rows_at(keys, at, walk.keys), options)[0], MASKED)
      higher = jnp.maximum(top, jnp.max(s, -1))
      p = jnp.exp2(s - higher[..., None])
      shrink = jnp.exp2(top - higher)
      more = over_keys(p.astype(v.dtype), rows_at(values, at, walk.keys))
      return higher, total * shrink + jnp.sum(p, -1), out * shrink[..., None] + more

    shape = queries.shape[:-1]
    zero = jnp.zeros(shape, jnp.float32), jnp.zeros(queries.shape, jnp.float32)
    top, total, out = lax.fori_loop(0, block.count, tile, (jnp.full(shape, FLOOR), *zero))
    out = out / jnp.maximum(total, TINY)[..., None]
    return None, (out.astype(q.dtype), jnp.where(total > 0, top + jnp.log2(jnp.maximum(total, TINY)), 0.0))

  _, (out, lse) = lax.scan(one, None, (jnp.arange(walk.blocks), walk.split(q)))
  return walk.join(out), walk.join(lse)


def backward(q, k, v, segment, prefix_end, out, lse, g, options: Options):
  """Gradients of q, k and v; the scores are computed again, tile by tile."""
  walk = Walk(q, k, segment_start(segment), prefix_end, options)
  keys, values = walk.padded_keys(k), walk.padded_keys(v)
  mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)

  def one(sums, ins):
    i, queries, g, lse, mean = ins
    block = walk.block(i)

    def tile(j, carry):
      dq, dk, dv = carry
      at, seen = walk.tile(block, j)
      key, value = rows_at(keys, at, walk.keys), rows_at(values, at, walk.keys)
      s, capped = scores(queries, key, options)
      p = jnp.exp2(jnp.where(seen, s - lse[..., None], MASKED))
      ds = p * (rows_by_keys(g, value) - mean[..., None])
      ds = (ds if capped is None else ds * (1 - capped**2)).astype(q.dtype)
      dk = add_rows_at(dk, at, over_rows(ds, queries))
      dv = add_rows_at(dv, at, over_rows(p.astype(g.dtype), g))
      return dq + over_keys(ds, key), dk, dv

    dq, *sums = lax.fori_loop(0, block.count, tile, (jnp.zeros(queries.shape, jnp.float32), *sums))
    return tuple(sums), (dq * options.scale).astype(q.dtype)

  zero = jnp.zeros(keys.shape, jnp.float32)
  blocks = jnp.arange(walk.blocks), *(walk.split(x) for x in (q, g, lse, mean))
  (dk, dv), dq = lax.scan(one, (zero, zero), blocks)
  dk, dv = dk[:, :, : walk.length] * options.scale, dv[:, :, : walk.length]
  return walk.join(dq), dk.astype(k.dtype), dv.astype(v.dtype)
