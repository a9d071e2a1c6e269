"""The key-value cache of the decoder: slots that say which position they hold, laid out by kind of attention.

A layer of full attention has a slot for each position. One that slides has [prefix | ring], whatever the length: a slot
for each token of the first prompt, where it is kept, then a ring of window + slack. The slack is what lets a row be cut
back: tokens that are taken back have overwritten that many keys which the window needs again.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.config import Attention, DecoderConfig
from jaxagent.types import pytree
from pallas_kernels.prefix_sliding import cache_slot
from pallas_kernels.prefix_sliding.mask import visible


@pytree
class Cache:
  """Keys and values, one array per layer, in the dtype of the compute; `position` is what each slot holds, -1 nothing,
  for each kind of attention that layers have. `kinds`, of the layers, is static.

  Keys are transposed, which halves the time of a decoding step's attention on a CPU. A query sees slots with
  0 <= position <= its own, so that a row may be rewound by extending it from an earlier position, and is emptied by
  `reset_rows` without touching keys or values.
  """

  keys: tuple[Float[Array, "rows K d slots"], ...]
  values: tuple[Float[Array, "rows K slots d"], ...]
  position: dict[str, Int[Array, "rows slots"]]
  kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})

  @property
  def rows(self) -> int:
    return self.keys[0].shape[0]

  @property
  def capacity(self) -> int | None:
    """Positions that a row has slots for; None where every layer slides, and there is no limit."""
    return self.position["full"].shape[1] if "full" in self.position else None


class View(NamedTuple):
  """How the layers of one kind write and read t new tokens a row: `slot` past the end is not written.

  `mask` is of the first `slots` slots after the tokens are written, or, with `beside`, of the slots before that and the
  tokens themselves.
  """

  stored: Int[Array, "B slots"]  # afterwards
  slot: Int[Array, "B t"]
  mask: Bool[Array, "B t S"]
  slots: int
  beside: bool


def empty(config: DecoderConfig, rows: int, capacity: int, *, slack: int = 0) -> Cache:
  """A cache of `rows` sequences, all slots empty; layers of full attention have room for `capacity` tokens each."""
  if rows < 1 or capacity < 1:
    raise ValueError(f"a cache needs at least one row and one slot, got rows={rows} and capacity={capacity}")
  ring = config.window + slack
  slots = {"full": capacity, "sliding": ring, "prefix_sliding": config.max_prefix + ring}
  heads, d, kinds = config.kv_heads, config.head_dim, config.kinds
  return Cache(
    keys=tuple(jnp.zeros((rows, heads, d, slots[kind]), config.dtype) for kind in kinds),
    values=tuple(jnp.zeros((rows, heads, slots[kind], d), config.dtype) for kind in kinds),
    position={kind: jnp.full((rows, slots[kind]), -1, jnp.int32) for kind in sorted(set(kinds))},
    kinds=kinds,
  )


def axes(config: DecoderConfig) -> Cache:
  """A tree like the cache, of tuples of logical axis names."""
  kinds = config.kinds
  return Cache(
    keys=(("rows", "kv_heads", None, None),) * len(kinds),
    values=(("rows", "kv_heads", None, None),) * len(kinds),
    position={kind: ("rows", None) for kind in sorted(set(kinds))},
    kinds=kinds,
  )


def view(
  config: DecoderConfig,
  kind: Attention,
  stored: Int[Array, "B slots"],
  position: Int[Array, "B t"],
  prefix_length: Int[Array, "B"] | None,
  slots: int | None,
) -> View:
  """The view of tokens at `position` (-1 padding); `slots` is how many are read of full attention, None for all."""
  if kind == "full":
    return _whole(stored, position, slots or stored.shape[1])
  if kind == "sliding":
    return _sliding(stored, position, jnp.zeros(position.shape[0], jnp.int32), 0, config.window)
  return _sliding(stored, position, prefix_length, config.max_prefix, config.window)


def _whole(stored, position, slots) -> View:
  slot = jnp.where(position >= 0, position, stored.shape[1])
  stored = stored.at[jnp.arange(position.shape[0])[:, None], slot].set(position, mode="drop")
  held = stored[:, None, :slots]
  return View(stored, slot, (held >= 0) & (held <= position[..., None]), slots, False)


def _sliding(stored, position, prefix_length, max_prefix, window) -> View:
  (rows, t), slots = position.shape, stored.shape[1]
  ring, prefix = slots - max_prefix, prefix_length[:, None]
  # what is held from the first new position on is of tokens taken back, or of another sequence
  first = jnp.min(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
  before = jnp.where(stored < first, stored, -1)
  lasts = (position < prefix) | (position > jnp.max(position, axis=1, keepdims=True) - ring)
  slot = cache_slot(position, prefix, slots=slots, ring=ring)
  slot = jnp.where((position >= 0) & lasts, slot, slots)
  after = before.at[jnp.arange(rows)[:, None], slot].set(position, mode="drop")
  beside = t > ring - window + 1  # else no new token overwrites what another one needs
  held = jnp.concatenate([before, position], axis=1) if beside else after
  mask = visible(held[:, None], position[..., None], 0, prefix[..., None], window)
  return View(after, slot, mask, slots, beside)


def reset_rows(cache: Cache, rows: Bool[Array, "rows"]) -> Cache:
  """Empties the rows where `rows` is True."""
  position = jax.tree.map(lambda held: jnp.where(rows[:, None], -1, held), cache.position)
  return dataclasses.replace(cache, position=position)


def grow(cache: Cache, capacity: int) -> Cache:
  """The same content with `capacity` slots a row of full attention; layers that slide stay as they are.

  A step costs its capacity: a cache that grows in steps is cheaper.
  """
  if cache.capacity is None:
    return cache
  more = capacity - cache.capacity
  if more < 0:
    raise ValueError(f"a cache of {cache.capacity} slots cannot shrink to {capacity}: tokens would be lost")

  def padded(arrays, axis):
    width = [(0, 0)] * 4
    width[axis] = (0, more)
    return tuple(jnp.pad(x, width) if kind == "full" else x for kind, x in zip(cache.kinds, arrays))

  position = jnp.pad(cache.position["full"], ((0, 0), (0, more)), constant_values=-1)
  return dataclasses.replace(
    cache, keys=padded(cache.keys, 3), values=padded(cache.values, 2), position={**cache.position, "full": position}
  )
