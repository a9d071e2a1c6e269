"""What the policy says of packed rows: one forward pass, then log-probs a slice of tokens at a time.

This is the one place where predictions are shifted: `logp[:, t]` comes from the hidden state at t - 1.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxagent.models.policy import Policy
from jaxagent.types import Scores, TokenBatch

Column = Literal["logp", "entropy"]


def score(
  policy: Policy,
  params: Any,
  tokens: TokenBatch,
  *,
  chunk: int,
  columns: tuple[Column, ...] = ("logp",),
  constant: tuple[Column, ...] = (),
) -> Scores:
  """log softmax(logits / temperature) of every token given its segment before it, and the entropy it was drawn with.

  The first token of a segment and padding get 0. At most `chunk` tokens (at least one per row) have logits at any
  time, in the backward pass too, where they are computed again. No gradient flows through the columns in `constant`.
  """
  hidden = policy.forward(
    params, tokens.tokens, tokens.position, tokens.segment, prefix_end=tokens.prefix_end, routing=tokens.routing
  )
  read = _reader(policy, params, columns, constant)
  inputs = (hidden.states[:, :-1], tokens.tokens[:, 1:], tokens.temperature[:, 1:])
  continues = (tokens.segment[:, 1:] == tokens.segment[:, :-1]) & (tokens.segment[:, 1:] >= 0)
  out = _in_slices(read, inputs, max(chunk // tokens.tokens.shape[0], 1))
  shifted = {k: jnp.pad(jnp.where(continues, x, 0.0), ((0, 0), (1, 0))) for k, x in out.items()}
  return Scores(logp=shifted.get("logp"), entropy=shifted.get("entropy"), aux=hidden.aux)


def _reader(policy: Policy, params: Any, columns, constant) -> Callable[..., dict[str, Array]]:
  """From states [B, t, D], targets and temperatures [B, t] to the wanted columns [B, t]."""

  def read(states: Float[Array, "B t D"], target: Int[Array, "B t"], temperature: Float[Array, "B t"]):
    logits = policy.head(params, states).astype(jnp.float32) / temperature[..., None]
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    moving, still = logits - total, jax.lax.stop_gradient(logits - total)
    return {k: READERS[k](still if k in constant else moving, target) for k in columns}

  return read


def _logp(logp, target):
  return jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0]


def _entropy(logp, target):
  del target
  return -jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp), axis=-1)


READERS: dict[str, Callable] = {"logp": _logp, "entropy": _entropy}


def _in_slices(read, inputs, width: int):
  """`read` on slices of `width` tokens of axis 1, one after the other; axis 0 stays whole, and sharded if it is."""
  length = inputs[0].shape[1]
  width = min(width, max(length, 1))
  count = -(-length // width)

  def cut(x, fill=0):
    x = jnp.pad(x, ((0, 0), (0, count * width - length)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)

  states, target, temperature = inputs
  slices = (cut(states), cut(target), cut(temperature, 1))
  _, out = jax.lax.scan(lambda _, x: (None, jax.checkpoint(read, prevent_cse=False)(*x)), None, slices)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length], out)
