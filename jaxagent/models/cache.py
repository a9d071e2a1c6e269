"""The key-value cache of the decoder: slot p of a row holds the token at position p."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.config import DecoderConfig
from jaxagent.types import pytree


@pytree
class Cache:
  """Keys and values, one array per layer, in the dtype of the compute; `position` is what each slot holds, -1 nothing.

  Keys are transposed, which halves the time of a decoding step's attention on a CPU. A query sees the slots with
  0 <= position <= its own, so that a row may be rewound by extending it from an earlier position, and is emptied by
  `reset_rows` without touching keys or values.
  """

  keys: tuple[Float[Array, "rows K d capacity"], ...]
  values: tuple[Float[Array, "rows K capacity d"], ...]
  position: Int[Array, "rows capacity"]

  @property
  def capacity(self) -> int:
    return self.position.shape[1]


def empty(config: DecoderConfig, rows: int, capacity: int) -> Cache:
  """A cache of `rows` sequences of at most `capacity` tokens each, all slots empty."""
  if rows < 1 or capacity < 1:
    raise ValueError(f"a cache needs at least one row and one slot, got rows={rows} and capacity={capacity}")
  heads, d = config.kv_heads, config.head_dim
  return Cache(
    keys=tuple(jnp.zeros((rows, heads, d, capacity), config.dtype) for _ in range(config.layers)),
    values=tuple(jnp.zeros((rows, heads, capacity, d), config.dtype) for _ in range(config.layers)),
    position=jnp.full((rows, capacity), -1, jnp.int32),
  )


def reset_rows(cache: Cache, rows: Bool[Array, "rows"]) -> Cache:
  """Empties the rows where `rows` is True."""
  return dataclasses.replace(cache, position=jnp.where(rows[:, None], -1, cache.position))


def grow(cache: Cache, capacity: int) -> Cache:
  """The same content with `capacity` slots a row. A step costs its capacity: a cache that grows in steps is cheaper."""
  more = capacity - cache.capacity
  if more < 0:
    raise ValueError(f"a cache of {cache.capacity} slots cannot shrink to {capacity}: tokens would be lost")
  return Cache(
    keys=tuple(jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, more))) for k in cache.keys),
    values=tuple(jnp.pad(v, ((0, 0), (0, 0), (0, more), (0, 0))) for v in cache.values),
    position=jnp.pad(cache.position, ((0, 0), (0, more)), constant_values=-1),
  )
