"""The definition: every row with every matrix, all but its own masked. Dense in the groups; for tests."""

import jax
import jax.numpy as jnp


def _exact(x, weights, sizes):
  row, end = jnp.arange(x.shape[0])[:, None], jnp.cumsum(sizes)
  member = ((row < end) & (row >= end - sizes)).astype(jnp.float32)

  def every(x, weights):
    return jnp.einsum("me,md,edf->mf", member, x, weights, precision=jax.lax.Precision.HIGHEST)

  return jax.vjp(every, x.astype(jnp.float32), weights.astype(jnp.float32))


def forward(x, weights, sizes):
  return _exact(x, weights, sizes)[0].astype(x.dtype)


def backward(x, weights, sizes, g):
  dx, dw = _exact(x, weights, sizes)[1](g.astype(jnp.float32))
  return dx.astype(x.dtype), dw.astype(weights.dtype)
