"""A policy is a record of pure functions over a pytree of parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxagent.types import pytree

Params = Any
Cache = Any


@pytree
class Hidden:
  """Last hidden states and what layers report: for MoE `routing` [B, T, L, K], in the smallest integer type,
  `router_probs` [B, T, L, E], and where a record was replayed `live_routing`, what each router would have chosen."""

  states: Float[Array, "B T D"]
  aux: dict[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Policy:
  """`init(key) -> params`.

  `forward(params, tokens, position, segment, *, prefix_end=None, routing=None) -> Hidden` over packed rows `[B, T]`:
  token t attends to s iff same segment and s <= t, in a sliding layer of window W also s < prefix_end (an index in the
  row) or t - s < W; `segment == -1` is padding. With `routing` [B, T, L, K] the experts
  come from the record wherever it is >= 0, and how much always from the live router.
  `head(params, states [..., D]) -> logits [..., V]` in float32; it takes prepared weights as well.
  `prepare(params) -> weights`: once per weight update, the layout decoding wants (layers unstacked, products fused).
  `cache(rows, capacity) -> Cache`: empty, with a stored position per slot (-1 empty).
  `extend(weights, cache, tokens [B, t], position [B, t]) -> (Hidden, Cache)`: writes t tokens per row, each in place of
  what the row held at its position, and attends to the row's positions up to its own, so a row is reused or cut back
  without being cleared; a position of -1 is padding: nothing is written and the state there is unspecified. Prefill is
  a large t, decoding t = 1. A row is extended from where it ended, from at most `rewind` tokens before (None: from
  anywhere before), or from position 0, a new sequence.
  `max_prefix`: None, or the longest first prompt of a policy that keeps it while the rest slides: then `extend` takes
  `prefix_length=` int32[B] too, the same at every call for one sequence, as `forward` takes `prefix_end`.
  `axes`: a tree like `params` of tuples of logical axis names, for the sharding rules; `prepared_axes` and `cache_axes`
  are the same of prepared weights and of a cache, whose axis of rows is "rows" (None: the compiler places the weights,
  and only rows of the cache are split).
  """

  init: Callable[[Array], Params]
  forward: Callable[..., Hidden]
  head: Callable[[Params, Array], Float[Array, "... V"]]
  prepare: Callable[[Params], Any]
  cache: Callable[[int, int], Cache]
  extend: Callable[[Any, Cache, Int[Array, "B t"], Int[Array, "B t"]], tuple[Hidden, Cache]]
  axes: Any
  vocab_size: int
  prepared_axes: Any = None
  cache_axes: Any = None
  config: Any = None  # of the built-in decoder: what an export writes
  max_prefix: int | None = None  # tokens
  rewind: int | None = None  # tokens


def on_mesh(policy: Policy, mesh: jax.sharding.Mesh) -> Policy:
  """The policy with `forward` and `extend` that know the mesh they are compiled for: kernels and experts are split.

  The compiler splits everything else by itself. Rows go over the axes "data" and "fsdp", heads over "tensor", experts
  over "expert".
  """

  def known(run):
    def on_it(*arguments, **options):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run(*arguments, **options)

    return on_it

  return dataclasses.replace(policy, forward=known(policy.forward), extend=known(policy.extend))
