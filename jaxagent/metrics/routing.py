"""How far two routings of the same tokens are apart: sampler against trainer, or replayed against live.

A routing is `[N, T, L, K]`: the experts used when the model processed token t. The order of the K experts means
nothing. A router with a -1 (not recorded) in either routing is left out.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_shapes


def rerouted_tokens(
  routing: Int[Array, "N T L K"], other: Int[Array, "N T L K"], mask: Bool[Array, "N T"]
) -> Float[Array, ""]:
  """Share of the masked tokens whose expert sets differ in at least one layer; 0 where nothing can be compared.

  `mask` names processed tokens: to judge what the actions were predicted from, shift the action mask left by one.
  Source: Ma et al. 2025, arXiv 2510.11370 (R3).
  """
  differs, known = _compared(routing, other, mask)
  return jnp.sum(jnp.any(differs, -1)) / jnp.maximum(jnp.sum(jnp.any(known, -1)), 1)


def rerouted_routers(
  routing: Int[Array, "N T L K"], other: Int[Array, "N T L K"], mask: Bool[Array, "N T"]
) -> Float[Array, ""]:
  """Share of the (masked token, layer) pairs whose expert sets differ; see `rerouted_tokens`."""
  differs, known = _compared(routing, other, mask)
  return jnp.sum(differs) / jnp.maximum(jnp.sum(known), 1)


def _compared(routing, other, mask):
  check_shapes(routing=(routing, "N T L K"), other=(other, "N T L K"), mask=(mask, "N T"))
  a, b = jnp.sort(jnp.asarray(routing), -1), jnp.sort(jnp.asarray(other), -1)
  known = jnp.asarray(mask)[..., None] & (a[..., 0] >= 0) & (b[..., 0] >= 0)
  return known & jnp.any(a != b, -1), known
