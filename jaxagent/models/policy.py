"""A policy is a record of pure functions over a pytree of parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from jaxagent.types import pytree

Params = Any
Cache = Any


@pytree
class Hidden:
  """Last hidden states and what layers report: `routing` [B, T, L, K] int16, `router_probs` [B, T, L, E] for MoE."""

  states: Float[Array, "B T D"]
  aux: dict[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Policy:
  """`init(key) -> params`.

  `forward(params, tokens, position, segment, *, prefix_end=None, routing=None) -> Hidden` over packed rows `[B, T]`:
  token t attends to s iff same segment and s <= t; `segment == -1` is padding. With `routing` [B, T, L, K] the experts
  come from the record wherever it is >= 0, and how much always from the live router.
  `head(params, states [..., D]) -> logits [..., V]` in float32; it takes prepared weights as well.
  `prepare(params) -> weights`: once per weight update, the layout decoding wants (layers unstacked, products fused).
  `cache(rows, capacity) -> Cache`: empty, with a stored position per slot (-1 empty).
  `extend(weights, cache, tokens [B, t], position [B, t]) -> (Hidden, Cache)`: writes t tokens per row, each in place of
  what the row held at its position, and attends to the row's positions up to its own, so a row is reused or cut back
  without being cleared; a position of -1 is padding: nothing is written and the state there is unspecified. Prefill is
  a large t, decoding t = 1.
  `axes`: a tree like `params` of tuples of logical axis names, for the sharding rules.
  """

  init: Callable[[Array], Params]
  forward: Callable[..., Hidden]
  head: Callable[[Params, Array], Float[Array, "... V"]]
  prepare: Callable[[Params], Any]
  cache: Callable[[int, int], Cache]
  extend: Callable[[Any, Cache, Int[Array, "B t"], Int[Array, "B t"]], tuple[Hidden, Cache]]
  axes: Any
  vocab_size: int
  config: Any = None  # of the built-in decoder: what an export writes
