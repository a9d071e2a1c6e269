"""Sums over the segments and turns of a row, at every token of them; no loop over tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_total(x: Float[Array, "B T"], mask: Bool[Array, "B T"], ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
  """The sum of x over the masked tokens of the row with the same id, ids in [0, T)."""
  width = x.shape[-1]
  x, ids = jnp.where(mask, x, 0.0), jnp.asarray(ids)
  return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, width)[ids])(x, ids)


def turn_ids(turn: Int[Array, "B T"], segment: Int[Array, "B T"] | None = None) -> Int[Array, "B T"]:
  """A number in [0, T) for each (segment, turn) of the row: its rank among them, whatever range they come in."""
  pair = jnp.asarray(turn) + 1
  if segment is not None:
    pair = (jnp.asarray(segment) + 1) * (jnp.max(pair, initial=0) + 1) + pair
  return jax.vmap(lambda pair: jnp.searchsorted(jnp.sort(pair), pair))(pair)
