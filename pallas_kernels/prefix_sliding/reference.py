"""The definition, dense, in float32: for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.prefix_sliding.mask import dense_mask
from pallas_kernels.prefix_sliding.softmax import Options

HIGHEST = jax.lax.Precision.HIGHEST


def attention(q, k, v, mask, options: Options):
  """softmax(cap(scale q k)) v over the keys of mask[B, T, S], cap(x) = soft_cap tanh(x / soft_cap); 0 without a key."""
  k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
  scores = jnp.einsum("bhtd,bhsd->bhts", q, k, precision=HIGHEST) * options.scale
  if options.soft_cap is not None:
    scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
  mask = mask[:, None]
  weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1) * mask
  return jnp.einsum("bhts,bhsd->bhtd", weights, v, precision=HIGHEST)


def _exact(q, k, v, segment, prefix_end, options):
  mask = dense_mask(segment, prefix_end, options.window)
  return jax.vjp(lambda *x: attention(*x, mask, options), *(x.astype(jnp.float32) for x in (q, k, v)))


def forward(q, k, v, segment, prefix_end, options: Options):
  return _exact(q, k, v, segment, prefix_end, options)[0].astype(q.dtype), None


def backward(q, k, v, segment, prefix_end, out, lse, g, options: Options):
  gradients = _exact(q, k, v, segment, prefix_end, options)[1](g.astype(jnp.float32))
  return tuple(dx.astype(x.dtype) for dx, x in zip(gradients, (q, k, v)))
