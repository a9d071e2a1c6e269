"""Iterations that take a matrix to a nearby one with orthonormal rows: X = U S V^T to U p(S) V^T, p(s) near 1.

Each is a function of one matrix `[m, n]` with m <= n, of any magnitude: it is divided by its own Frobenius norm, so
that the result does not depend on its scale and a zero matrix stays zero. p is a composition of odd quintics.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Quintic(NamedTuple):
  """p(s) = a s + b s^3 + c s^5."""

  a: float
  b: float
  c: float


JORDAN = (Quintic(3.4445, -4.7750, 2.0315),) * 5
"""Jordan et al. 2024: steep at 0, and p(s) in [0.67, 1.21] for s >= 2e-3 rather than 1."""

_SAFETY = 1.01
POLAR_EXPRESS = tuple(
  Quintic(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
  for a, b, c in (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
  )
)
"""Amsel et al. 2025, arXiv 2505.16932: each step the best quintic for where the last one left [1e-3, 1]; six steps."""

BLOCK = 128  # smallest block of a symmetric product


def newton_schulz(
  x: Float[Array, "m n"], coefficients: tuple[Quintic, ...] = JORDAN, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "m n"]:
  """X <- (a + b A + c A A) X with A = X X^T, once for each quintic, from X / |X|_F.

  `dtype` is that of the iteration; bfloat16 products accumulate in float32. Returns float32.
  Source: Jordan et al. 2024. Ours differs: A and A A are symmetric, so only their blocks on and above the diagonal are
  computed; no epsilon, so tiny matrices are orthogonalised too.
  """
  x = unit(x).astype(dtype)
  for quintic in coefficients:
    x = product(_factor(quintic, symmetric_product(x, x), dtype), x).astype(dtype)
  return x.astype(jnp.float32)


def gram_newton_schulz(
  x: Float[Array, "m n"],
  coefficients: tuple[Quintic, ...] = JORDAN,
  *,
  restart: tuple[int, ...] = (),
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "m n"]:
  """The same polynomial as `newton_schulz`, on m x m matrices: R = X X^T, Q = h(R) Q, R = h(R) R h(R), at the end Q X.

  h(r) = a + b r + c r^2, so Q collects what X is multiplied with and R is always its Gram matrix. Squaring the
  singular values costs accuracy, which grows with the steps since R was computed: before the steps in `restart` it is
  computed anew from X = Q X. In float32 the result is within 1e-3 (relative Frobenius norm) of `newton_schulz` where
  singular values span three orders of magnitude, with `restart=(3,)` within 1e-4; bfloat16 needs the restart.
  Saves work where n is well above m; where it would not, `newton_schulz` is used.
  Source: Gram Newton-Schulz (the idea; the restart's place is ours).
  """
  starts = sorted({0, *restart})
  if not all(0 <= i < len(coefficients) for i in starts):
    raise ValueError(f"restart names steps of {len(coefficients)}, the first being 0, got {restart}")
  if _gram_cost(x.shape, len(coefficients), len(starts)) >= _plain_cost(x.shape, len(coefficients)):
    return newton_schulz(x, coefficients, dtype=dtype)
  x = unit(x).astype(dtype)
  for start, end in zip(starts, [*starts[1:], len(coefficients)]):
    x = product(_gram_steps(symmetric_product(x, x), coefficients[start:end], dtype), x).astype(dtype)
  return x.astype(jnp.float32)


def unit(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
  """x / |x|_F in float32, without overflow or underflow of the squares; 0 for 0."""
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x))
  x = x / jnp.where(largest > 0, largest, 1.0)
  return x / jnp.maximum(jnp.linalg.norm(x), 1.0)


def product(x: Float[Array, "m k"], y: Float[Array, "k n"]) -> Float[Array, "m n"]:
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def symmetric_product(x: Float[Array, "m k"], y: Float[Array, "m k"]) -> Float[Array, "m m"]:
  """x y^T where that is symmetric, in the dtype of x: rows of blocks from the diagonal on, the rest mirrored."""
  m, count = x.shape[0], blocks(x.shape[0])
  if count == 1:
    return product(x, y.T).astype(x.dtype)
  size = m // count
  upper = [product(x[i : i + size], y[i:].T).astype(x.dtype) for i in range(0, m, size)]  # whole rows: no strided copy
  rows = []
  for i, row in enumerate(upper):
    mirrored = [upper[j][:, (i - j) * size : (i - j + 1) * size].T for j in range(i)]
    rows.append(jnp.concatenate([*mirrored, row], axis=1))
  return jnp.concatenate(rows)


def blocks(m: int) -> int:
  """Rows of blocks of a symmetric product: the most of 4, 2 and 1 that gives whole blocks of at least BLOCK."""
  return next((count for count in (4, 2) if m % count == 0 and m // count >= BLOCK), 1)


def _gram_steps(gram, coefficients, dtype):
  """Q, the product of h(R) over the steps, for X X^T = gram."""
  factor = total = _factor(coefficients[0], gram, dtype)
  for quintic in coefficients[1:]:
    gram = symmetric_product(symmetric_product(factor, gram), factor)
    factor = _factor(quintic, gram, dtype)
    total = symmetric_product(total, factor)
  return total


def _factor(quintic, gram, dtype):
  """h(R) = a + b R + c R R, with a on the diagonal: a pass over the small matrix in place of one over the wide."""
  a, b, c = quintic
  return (a * jnp.eye(gram.shape[0]) + b * gram + c * symmetric_product(gram, gram)).astype(dtype)


def _plain_cost(shape, steps):
  """Multiplications, over m^3: X X^T and A A as symmetric products, and one by X."""
  aspect, symmetric = shape[1] / shape[0], _symmetric_share(shape[0])
  return steps * (symmetric * aspect + symmetric + aspect)


def _gram_cost(shape, steps, starts):
  aspect, symmetric = shape[1] / shape[0], _symmetric_share(shape[0])
  return starts * (symmetric + 1) * aspect + symmetric * (4 * steps - 3 * starts)


def _symmetric_share(m):
  return (1 + 1 / blocks(m)) / 2
