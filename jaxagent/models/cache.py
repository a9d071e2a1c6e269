"""The key-value cache of the decoder: slot p of a row holds the token at position p."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.config import DecoderConfig
from jaxagent.types import pytree


@pytree
class Cache:
  """Keys and values, one array per layer, in the dtype of the compute; `position` says what each slot holds, -1 nothing.

  A query sees the slots with 0 <= position <= its own, so that a row may be rewound by extending it from an earlier
  position, and is emptied by `reset_rows` without touching keys or values.
  """

  keys: tuple[Float[Array, "rows K capacity d"], ...]
  values: tuple[Float[Array, "rows K capacity d"], ...]
  position: Int[Array, "rows capacity"]

  @property
  def capacity(self) -> int:
    return self.position.shape[1]


def empty(config: DecoderConfig, rows: int, capacity: int) -> Cache:
  """A cache of `rows` sequences of at most `capacity` tokens each, all slots empty."""
  if rows < 1 or capacity < 1:
    raise ValueError(f"a cache needs at least one row and one slot, got rows={rows} and capacity={capacity}")
  shape = (rows, config.kv_heads, capacity, config.head_dim)
  layers = [tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers)) for _ in range(2)]
  return Cache(*layers, position=jnp.full((rows, capacity), -1, jnp.int32))


def reset_rows(cache: Cache, rows: Bool[Array, "rows"]) -> Cache:
  """Empties the rows where `rows` is True."""
  return dataclasses.replace(cache, position=jnp.where(rows[:, None], -1, cache.position))


def grow(cache: Cache, capacity: int) -> Cache:
  """The same content with `capacity` slots a row: attention costs capacity, so a cache that grows in steps is cheaper."""
  if capacity < cache.capacity:
    raise ValueError(f"a cache of {cache.capacity} slots cannot shrink to {capacity}: tokens would be lost")
  more = capacity - cache.capacity
  widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
  return Cache(
    keys=tuple(map(widen, cache.keys)),
    values=tuple(map(widen, cache.values)),
    position=jnp.pad(cache.position, ((0, 0), (0, more)), constant_values=-1),
  )
