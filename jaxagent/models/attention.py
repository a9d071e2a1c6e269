"""Attention of packed rows, by kind of layer: through a dense mask where rows are short, else by blocks."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.config import Attention, DecoderConfig
from jaxagent.models.layers import attention, packed_mask
from pallas_kernels.prefix_sliding import prefix_sliding_attention
from pallas_kernels.prefix_sliding.mask import dense_mask

# tokens: attention to longer rows goes by blocks; on a CPU twice as fast there, in linear memory
DENSE = {"full": 1024, "sliding": 192, "prefix_sliding": 192}
ROW_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)


def packed_attention(
  config: DecoderConfig, kind: Attention, segment: Int[Array, "B T"], prefix_end: Int[Array, "B T"] | None
) -> Callable[[Array, Array, Array], Float[Array, "B T H*d"]]:
  """attend(q [B, T, H, d], k, v [B, T, K, d]) of the layers of one kind; padding reads zeros."""
  window = None if kind == "full" else config.window
  prefix = prefix_end if kind == "prefix_sliding" else jnp.zeros_like(segment)
  if segment.shape[1] <= DENSE[kind]:
    mask = packed_mask(segment) if window is None else dense_mask(segment, prefix, window)
    return functools.partial(_dense, config, mask, (segment >= 0)[..., None])
  return functools.partial(_by_blocks, config, window, segment, prefix)


def _dense(config: DecoderConfig, mask: Bool[Array, "B T T"], seen: Bool[Array, "B T 1"], q, k, v):
  read = attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask, config.dtype)
  return jnp.where(seen, read, 0)


def _by_blocks(config: DecoderConfig, window: int | None, segment, prefix_end, q, k, v):
  q, k, v = (x.astype(config.dtype).swapaxes(1, 2) for x in (q, k, v))

  def run(q, k, v, segment, prefix_end):
    scale = config.head_dim**-0.5
    return prefix_sliding_attention(q, k, v, segment=segment, prefix_end=prefix_end, window=window, scale=scale)

  read = _over_mesh(run, q, k, v, segment, prefix_end)
  return read.swapaxes(1, 2).reshape(*segment.shape, -1).astype(jnp.float32)


def _over_mesh(run: Callable, q, k, v, segment, prefix_end) -> Float[Array, "B H T d"]:
  """`run` on each device for its rows and key heads: the compiler cannot split a kernel.

  The mesh is the one in use, if any. Keys are repeated where there are fewer key heads than devices to split them over,
  and rows or heads that do not divide stay whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  free = {name for name, of in zip(mesh.axis_names, mesh.axis_types) if of == AxisType.Auto}
  if math.prod(mesh.shape[name] for name in free) == 1:
    return run(q, k, v, segment, prefix_end)
  rows, heads = (tuple(a for a in names if a in free) for names in (ROW_AXES, HEAD_AXES))
  rows = rows if q.shape[0] % math.prod(mesh.shape[a] for a in rows) == 0 else None
  split = math.lcm(k.shape[1], math.prod(mesh.shape[a] for a in heads))
  if q.shape[1] % split:
    heads = None
  else:
    k, v = (jnp.repeat(x, split // x.shape[1], axis=1) for x in (k, v))
  by_head, by_row = PartitionSpec(rows, heads), PartitionSpec(rows)
  specs = {"in_specs": (by_head,) * 3 + (by_row,) * 2, "out_specs": by_head}
  return jax.shard_map(run, mesh=mesh, **specs, axis_names=free, check_vma=False)(q, k, v, segment, prefix_end)
