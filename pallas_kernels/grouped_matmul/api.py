"""One product for each group of rows: arguments checked, an implementation chosen, one custom gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation, choose
from pallas_kernels.grouped_matmul import ragged, reference, tiles, tpu

# forward(x, weights, sizes) -> y, backward(x, weights, sizes, g) -> (dx, dweights)
IMPLEMENTATIONS = {
  "tiles": Implementation(tiles.forward, tiles.backward, ("cpu",)),
  "tpu": Implementation(tpu.forward, tpu.backward, ("tpu",)),
  "ragged": Implementation(ragged.forward, ragged.backward),
  "reference": Implementation(reference.forward, reference.backward),
}


def grouped_matmul(
  x: Float[Array, "M D"],
  weights: Float[Array, "E D F"],
  group_sizes: Int[Array, "E"],
  *,
  implementation: str | None = None,
) -> Float[Array, "M F"]:
  """y[m] = x[m] @ weights[e], e the group of row m: the first group_sizes[0] rows are group 0's, and so on.

  No row is dropped, whatever the sizes; rows past their sum give 0 and have no gradient. Products have float32 sums, y
  has the dtype of x. `implementation`: "tiles" (a loop over tiles of a group's rows, on a CPU), "tpu", "ragged"
  (`lax.ragged_dot`) or "reference" (one-hot, for tests); None takes the backend's own.
  ValueError: shapes that disagree, sizes that are negative or exceed M, an implementation that the backend lacks.
  Source: Gale et al. 2022 (MegaBlocks). Ours differs: nothing.
  """
  check_grouped(x, weights, group_sizes)
  chosen = choose(implementation, IMPLEMENTATIONS)
  if x.shape[0] == 0:  # no tile to walk
    return jnp.zeros((0, weights.shape[2]), x.dtype)
  return _grouped(chosen, x, weights, group_sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(chosen: Implementation, x, weights, sizes):
  return chosen.forward(x, weights, sizes)


def _forward(chosen, *arrays):
  return chosen.forward(*arrays), arrays


def _backward(chosen, arrays, g):
  return *chosen.backward(*arrays, g), None


_grouped.defvjp(_forward, _backward)


def check_grouped(x, weights, sizes) -> None:
  if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
    raise ValueError(f"x must be [M, D] and weights [E, D, F], got {x.shape} and {weights.shape}")
  if sizes.shape != weights.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
    raise ValueError(f"group_sizes must be {weights.shape[0]} integers, one a matrix, got {sizes.dtype}{sizes.shape}")
  if x.dtype != weights.dtype:
    raise ValueError(f"x and weights must have one dtype, got {x.dtype} and {weights.dtype}; cast one")
  if not isinstance(sizes, jax.core.Tracer) and sizes.size:
    known = np.asarray(sizes)
    if known.min() < 0 or known.sum() > x.shape[0]:
      raise ValueError(f"group_sizes must be at least 0 and sum to at most M={x.shape[0]}, got {known.tolist()}")
