"""Anybody's Flax NNX module as a `Policy`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxagent.models.policy import Hidden, Params, Policy
from jaxagent.types import pytree


@pytree
class TokenCache:
  """The tokens themselves, slot p of a row holds the one at position p; `position` is -1 where a slot is empty."""

  tokens: Int[Array, "rows capacity"]
  position: Int[Array, "rows capacity"]


def policy_from_nnx(build: Callable[[nnx.Rngs], nnx.Module], *, vocab_size: int) -> Policy:
  """The module that `build` returns, as a policy that samples and trains.

  The module is called as `module(tokens, position, segment) -> logits [B, T, V]`, each argument int [B, T] as in
  `TokenBatch`: token t sees the tokens s <= t of its own segment, and segment -1 is padding. A module with a method
  `head(states [..., D]) -> logits [..., V]` returns states [B, T, D] from its call instead; then training needs no
  [B, T, V] array. `build` may return a module that was made before (`lambda rngs: module`): its values are the initial
  parameters.

  Right for any causal module, and slow to sample from: `extend` keeps tokens, not keys, and runs the module over the
  whole row each time. For long rollouts write `prepare`, `cache` and `extend` for your module and `dataclasses.replace`
  them. No routing is recorded or replayed. No axis is named in `axes`: every parameter is
  replicated.
  Errors: a ValueError if the module has state that is not an `nnx.Param` (dropout keys, batch statistics).
  """
  module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  if jax.tree.leaves(rest):
    names = ", ".join(".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest))
    raise ValueError(
      f"a policy is a pure function of its nnx.Param values, but {type(module).__name__} also has {names};"
      " build it without dropout and running statistics"
    )
  has_head = callable(getattr(module, "head", None))
  forward = functools.partial(_forward, graph)
  return Policy(
    init=lambda key: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(key)), nnx.Param)),
    forward=forward,
    head=functools.partial(_head, graph) if has_head else lambda params, states: states.astype(jnp.float32),
    prepare=lambda params: params,
    cache=lambda rows, capacity: TokenCache(*(jnp.full((rows, capacity), fill, jnp.int32) for fill in (0, -1))),
    extend=functools.partial(_extend, forward),
    axes=jax.tree.map(lambda x: (None,) * x.ndim, nnx.to_pure_dict(params)),
    vocab_size=vocab_size,
  )


def _forward(graph, params: Params, tokens, position, segment, *, prefix_end=None, routing=None) -> Hidden:
  if routing is not None:
    raise ValueError("routing was given, but a policy from an nnx module cannot replay it; pass routing=None")
  return Hidden(nnx.merge(graph, params)(tokens, position, segment))


def _head(graph, params: Params, states: Array) -> Array:
  return nnx.merge(graph, params).head(states).astype(jnp.float32)


def _extend(forward, params: Params, cache: TokenCache, tokens, position) -> tuple[Hidden, TokenCache]:
  rows, capacity = cache.tokens.shape
  row = jnp.arange(rows)[:, None]
  slot = jnp.where(position >= 0, position, capacity)  # past the end: dropped
  cache = TokenCache(
    tokens=cache.tokens.at[row, slot].set(tokens.astype(jnp.int32), mode="drop"),
    position=cache.position.at[row, slot].set(position.astype(jnp.int32), mode="drop"),
  )
  place = jnp.broadcast_to(jnp.arange(capacity), cache.tokens.shape)
  whole = forward(params, cache.tokens, place, jnp.where(cache.position >= 0, 0, -1))
  return Hidden(whole.states[row, jnp.maximum(position, 0)]), cache
