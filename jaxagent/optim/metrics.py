"""What a Muon update looked like: is it as large as it should be, and did its matrices, or the momentum, collapse."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

PROBES = 8


class MuonState(NamedTuple):
  """`mu` is the momentum; `measured` what `muon_metrics` reads, of the last update."""

  count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # Optax's name for it
  mu: Any
  measured: dict[str, Float[Array, ""]]


class Spectrum(NamedTuple):
  """Of one matrix; 0 for a zero matrix."""

  norm: Float[Array, ""]
  rank: Float[Array, ""]


def muon_metrics(opt_state: Any) -> dict[str, Float[Array, ""]]:
  """Scalars of the last update, from the Muon states anywhere in `opt_state`; empty where there is none.

  `update_rms`: root mean square of the update before the learning rate, over all entries. `spectral_norm`: the largest
  of its matrices before their scale, near 1 by design. `effective_rank` and `momentum_rank`: mean over matrices of
  (sum s^2)^2 / sum s^4 over the smaller dimension, of the update and of the momentum that it was made from; near
  0 the matrix has collapsed to a few directions. Zero matrices are left out. The norm is estimated from below and the
  ranks to some 10 %, with eight fixed random vectors. Several states: the mean, for the norm the maximum.
  """
  leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, MuonState))
  states = [x.measured for x in leaves if isinstance(x, MuonState)]
  if not states:
    return {}
  reduce = {"spectral_norm": jnp.max}
  return {name: reduce.get(name, jnp.mean)(jnp.stack([s[name] for s in states])) for name in states[0]}


def nothing_measured() -> dict[str, Float[Array, ""]]:
  return {name: jnp.zeros(()) for name in ("update_rms", "spectral_norm", "effective_rank", "momentum_rank")}


def spectrum(x: Float[Array, "m n"]) -> Spectrum:
  """Estimates from X X^T Z, Z of random signs: |X X^T z|^2 is sum s^4 on average, and leans to the largest s."""
  probes = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (x.shape[0], PROBES)).T
  size = _above_zero(jnp.max(jnp.abs(x)))  # squares of what is divided by it neither overflow nor vanish
  image = ((probes / size) @ x) @ x.T / size  # rows, of which a CPU multiplies few at a time faster than columns
  scaled = x / size
  square, fourth = jnp.sum(scaled * scaled), jnp.mean(jnp.sum(image * image, 1))
  steeper = size * jnp.sqrt(jnp.sum((image / size @ x) ** 2, 1) / _above_zero(jnp.sum(image * image, 1)))
  return Spectrum(jnp.max(steeper), square * square / _above_zero(fourth) / x.shape[0])


def summary(
  before: list[Spectrum], after: list[Spectrum], squares: list[Float[Array, ""]], entries: int
) -> dict[str, Float[Array, ""]]:
  """Of spectra `[matrices]`, one for each shape, and the sums of squares of the update's arrays."""
  if not before:
    return nothing_measured()
  norm, rank, momentum_rank = (
    jnp.concatenate(x) for x in ([s.norm for s in after], [s.rank for s in after], [s.rank for s in before])
  )
  seen = momentum_rank > 0
  count = jnp.maximum(jnp.sum(seen), 1)
  return {
    "update_rms": jnp.sqrt(sum(squares) / entries),
    "spectral_norm": jnp.max(norm),
    "effective_rank": jnp.sum(rank) / count,
    "momentum_rank": jnp.sum(momentum_rank) / count,
  }


def _above_zero(x):
  return jnp.where(x > 0, x, 1.0)
