"""Blockwise attention in plain XLA: each block of queries walks the tiles of its prefix, then those of its window.

Time and memory are linear in the row for a finite window. How many tiles a block walks is found while running, so that
nothing static has to bound the prefix. All rows of a batch walk as many as the longest needs; the rest are masked.
Blocks are sliced where they stand and results are written in place, without copies of whole rows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.prefix_sliding.mask import segment_start, visible, window_start
from pallas_kernels.prefix_sliding.softmax import FLOOR, LOG2E, MASKED, TINY, Options


class Block(NamedTuple):
  """A block of queries, and the tiles that it walks, in the row that needs most."""

  at: Int[Array, ""]  # its first query
  query: Int[Array, "c"]
  start: Int[Array, "B c"]
  prefix_end: Int[Array, "B c"]
  first: Int[Array, "B"]  # key at which the prefix tiles begin
  window: Int[Array, "B"]  # key at which the window tiles begin
  prefix_tiles: Int[Array, ""]
  window_tiles: Int[Array, ""]


class Tile(NamedTuple):
  """Where its keys begin, and which of them each query sees."""

  at: Int[Array, "B"]
  seen: Bool[Array, "B keys c"]


def block_sizes(length: int, window: int | None) -> tuple[int, int]:
  """Queries in a block and keys in a tile: small against the window, so that little is computed to be masked."""
  most = 128 if window is not None and window <= 1024 else 256
  rows = min(most, 8 * math.ceil(length / 8))
  return rows, rows


def keys_at(x: Float[Array, "B K S D"], at: Int[Array, "B"], size: int) -> Float[Array, "B K size D"]:
  """x[b, :, at[b] : at[b] + size]."""
  return jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, size, axis=1))(x, at)


def add_keys_at(x: Float[Array, "B K S D"], at: Int[Array, "B"], y: Float[Array, "B K size D"]):
  def add(row, i, part):
    part = part + lax.dynamic_slice_in_dim(row, i, part.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(row, part, i, axis=1)

  return jax.vmap(add)(x, at, y)


def dot(spec: str, a, b):
  """einsum of equal dtypes with float32 sums; float32 operands are not rounded."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def by_query(x: Float[Array, "... r"], group: int) -> Float[Array, "... G c"]:
  return x.reshape(*x.shape[:-1], group, -1)


def scores(raw, options: Options):
  """(base-2 scores, tanh of the capped ones or None)."""
  if options.soft_cap is None:
    return raw * (options.scale * LOG2E), None
  capped = jnp.tanh(raw * (options.scale / options.soft_cap))
  return capped * (options.soft_cap * LOG2E), capped


class Walk:
  """The blocks of one call and the tiles of each. R is the length in whole blocks, r = G c the rows of a block.

  The rows of a group's heads are those of one product, merged before it: XLA fuses that better than two dimensions.
  """

  def __init__(self, q, k, start, prefix_end, options: Options):
    self.options, self.length, self.group = options, q.shape[2], q.shape[1] // k.shape[1]
    self.count, self.keys = block_sizes(self.length, options.window)
    self.blocks = -(-self.length // self.count)
    self.padded = self.blocks * self.count
    pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, self.padded - self.length)))
    nothing = jnp.arange(self.length, self.padded, dtype=jnp.int32) + 1
    self.start = pad(start).at[:, self.length :].set(nothing)
    self.prefix_end = pad(prefix_end)
    self.low = window_start(self.start, options.window)

  def whole(self, x: Float[Array, "B H T *D"]) -> Float[Array, "B H R *D"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, self.padded - self.length), *((0, 0),) * (x.ndim - 3)))

  def by_group(self, x: Float[Array, "B H T *D"]) -> Float[Array, "B K G R *D"]:
    x = self.whole(x)
    return x.reshape(x.shape[0], -1, self.group, *x.shape[2:])

  def by_head(self, x: Float[Array, "B K G R *D"]) -> Float[Array, "B H T *D"]:
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :, : self.length]

  def rows(self, x: Float[Array, "B K G R *D"], block: Block) -> Float[Array, "B K r *D"]:
    x = lax.dynamic_slice_in_dim(x, block.at, self.count, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])

  def put(self, x: Float[Array, "B K G R *D"], block: Block, rows: Float[Array, "B K r *D"]):
    rows = rows.reshape(*x.shape[:3], -1, *x.shape[4:]).astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, rows, block.at, 3)

  def block(self, i) -> Block:
    at = i * self.count
    start, prefix_end, low = (
      lax.dynamic_slice_in_dim(x, at, self.count, 1) for x in (self.start, self.prefix_end, self.low)
    )
    # only the first segment of a block can have keys before its window: those after it begin inside the block
    first, window = start[:, 0], low[:, 0]
    prefix = jnp.maximum(jnp.max(jnp.minimum(prefix_end[:, 0], window) - first), 0)
    tiles = -(-prefix // self.keys), -(-(at + self.count - jnp.min(window)) // self.keys)
    return Block(at, at + jnp.arange(self.count), start, prefix_end, first, window, *tiles)

  def tile(self, block: Block, begin: Int[Array, "B"], stop: Int[Array, "B"] | int) -> Tile:
    """The keys from `begin` to before `stop`; at the end of the row it is moved back and those before are masked."""
    at = jnp.minimum(begin, self.padded - self.keys)
    key = at[:, None] + jnp.arange(self.keys)
    once = (begin[:, None] <= key) & (key < jnp.reshape(stop, (-1, 1)))
    start, prefix_end = block.start[:, None], block.prefix_end[:, None]
    return Tile(at, once[..., None] & visible(key[..., None], block.query, start, prefix_end, self.options.window))

  def over_tiles(self, block: Block, visit, carry):
    """`visit(tile, carry) -> carry` for the tiles of the prefix, then for those of the window."""

    def prefix(j, carry):
      return visit(self.tile(block, block.first + j * self.keys, block.window), carry)

    def window(j, carry):
      return visit(self.tile(block, block.window + j * self.keys, self.padded), carry)

    return lax.fori_loop(0, block.window_tiles, window, lax.fori_loop(0, block.prefix_tiles, prefix, carry))


def forward(q, k, v, segment, prefix_end, options: Options):
  """Output like q, and the base-2 log-sum-exp of the scores [B, H, T] in float32, 0 where there is no key."""
  walk = Walk(q, k, segment_start(segment), prefix_end, options)
  q, keys, values = walk.by_group(q), walk.whole(k), walk.whole(v)

  def one(i, results):
    block = walk.block(i)
    queries = walk.rows(q, block)

    def visit(tile, carry):
      top, total, out = carry
      seen = jnp.tile(tile.seen.swapaxes(1, 2), (1, walk.group, 1))[:, None]
      raw = dot("bkrd,bksd->bkrs", queries, keys_at(keys, tile.at, walk.keys))
      s = jnp.where(seen, scores(raw, options)[0], MASKED)
      higher = jnp.maximum(top, jnp.max(s, -1))
      p = jnp.exp2(s - higher[..., None])
      shrink = jnp.exp2(top - higher)
      more = dot("bkrs,bksd->bkrd", p.astype(v.dtype), keys_at(values, tile.at, walk.keys))
      return higher, total * shrink + jnp.sum(p, -1), out * shrink[..., None] + more

    shape = queries.shape[:-1]
    zero = jnp.zeros(shape, jnp.float32), jnp.zeros(queries.shape, jnp.float32)
    top, total, out = walk.over_tiles(block, visit, (jnp.full(shape, FLOOR), *zero))
    out = out / jnp.maximum(total, TINY)[..., None]
    lse = jnp.where(total > 0, top + jnp.log2(jnp.maximum(total, TINY)), 0.0)
    return tuple(walk.put(x, block, part) for x, part in zip(results, (out, lse)))

  zero = jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], jnp.float32)
  return tuple(walk.by_head(x) for x in lax.fori_loop(0, walk.blocks, one, zero))


def backward(q, k, v, segment, prefix_end, out, lse, g, options: Options):
  """Gradients of q, k and v; the scores are computed again, tile by tile, and stand as [keys, rows].

  So dk and dv are plain products of them, and what belongs to a row lies along the vector.
  """
  walk = Walk(q, k, segment_start(segment), prefix_end, options)
  keys, values = walk.whole(k), walk.whole(v)
  mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
  arrays = tuple(walk.by_group(x) for x in (q, g, lse, mean))

  def one(i, sums):
    block = walk.block(i)
    queries, g, lse, mean = (walk.rows(x, block) for x in arrays)

    lse, mean = (by_query(x, walk.group)[:, :, None] for x in (lse, mean))

    def visit(tile, carry):
      dq, dk, dv = carry
      key, value = (keys_at(x, tile.at, walk.keys) for x in (keys, values))
      raw, dp = (by_query(dot("bksd,bkrd->bksr", *x), walk.group) for x in ((key, queries), (value, g)))
      s, capped = scores(raw, options)
      p = jnp.exp2(jnp.where(tile.seen[:, None, :, None], s - lse, MASKED))
      ds = p * (dp - mean)
      ds = ds if capped is None else ds * (1 - capped**2)
      ds, p = (x.reshape(*x.shape[:3], -1).astype(q.dtype) for x in (ds, p))
      dk = add_keys_at(dk, tile.at, dot("bksr,bkrd->bksd", ds, queries))
      dv = add_keys_at(dv, tile.at, dot("bksr,bkrd->bksd", p, g))
      return dq + dot("bksr,bksd->bkrd", ds, key), dk, dv

    dq, *rest = walk.over_tiles(block, visit, (jnp.zeros(queries.shape, jnp.float32), *sums[1:]))
    return walk.put(sums[0], block, dq * options.scale), *rest

  zero = jnp.zeros(arrays[0].shape, q.dtype), *(jnp.zeros(x.shape, jnp.float32) for x in (keys, values))
  dq, dk, dv = lax.fori_loop(0, walk.blocks, one, zero)
  dk, dv = dk[:, :, : walk.length] * options.scale, dv[:, :, : walk.length]
  return walk.by_head(dq), dk.astype(k.dtype), dv.astype(v.dtype)
