"""Who attends to whom: one rule for packed rows and for a prefix of its own in every sequence."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def visible(key, query, start, prefix_end, window: int | None):
  """start <= key <= query and (key < prefix_end or query - key < window), by broadcasting indices of one row.

  The one statement of the mask, in every implementation. The window counts the query itself.
  """
  seen = (start <= key) & (key <= query)
  return seen if window is None else seen & ((key < prefix_end) | (query - key < window))


def segment_start(segment: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Index in the row of the first token of each token's segment; t + 1 where segment is -1: nothing is visible there.

  A segment's tokens are consecutive, so start <= key <= query says "of the same segment" without the key's segment.
  It does not fall along a row.
  """
  t = jnp.arange(segment.shape[1], dtype=jnp.int32)
  before = jnp.pad(segment, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  first = jnp.where(segment < 0, t + 1, jnp.where(segment != before, t, 0))
  return lax.cummax(first, axis=1)


def window_start(start: Int[Array, "B T"], window: int | None) -> Int[Array, "B T"]:
  """The first key that each query sees in its window."""
  if window is None:
    return start
  return jnp.maximum(start, jnp.arange(start.shape[1], dtype=jnp.int32) - (window - 1))


def dense_mask(
  segment: Int[Array, "B T"], prefix_end: Int[Array, "B T"], window: int | None
) -> Bool[Array, "B T T"]:
  """mask[b, t, s]: query t sees key s. From segments as they are given; for tests and pictures, quadratic."""
  t = jnp.arange(segment.shape[1])
  same = (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
  return same & visible(t[None, None], t[None, :, None], 0, prefix_end[:, :, None], window)
