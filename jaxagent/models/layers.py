"""The arithmetic of a decoder layer: products, RMSNorm, rotary positions and grouped-query attention."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def product(spec: str, a: Array, b: Array, dtype: str = "float32") -> Float[Array, "..."]:
  """einsum(spec, a, b) with operands rounded to `dtype` and float32 sums, in the backward pass too.

  Each index of `spec` must stand in two of its three terms, so that the two gradients are einsums of the same kind.
  """
  if dtype == "float32":
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return _rounded_product(spec, dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_product(spec, dtype, a, b):
  return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _rounded_product_forward(spec, dtype, a, b):
  return _rounded_product(spec, dtype, a, b), (a, b)


def _rounded_product_backward(spec, dtype, operands, g):
  a, b = operands
  left, right, out = spec.replace("->", ",").split(",")
  da = _rounded_product(f"{out},{right}->{left}", dtype, g, b)
  db = _rounded_product(f"{left},{out}->{right}", dtype, a, g)
  return da.astype(a.dtype), db.astype(b.dtype)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
  """x / sqrt(mean(x^2) + eps) * weight."""
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps) * weight


def rotation(position: Int[Array, "B T"], head_dim: int, theta: float) -> tuple[Array, Array]:
  """cos and sin [B, T, 1, head_dim / 2] of position * theta^(-2i / head_dim)."""
  frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angle = position[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B T H d"], turn: tuple[Array, Array]) -> Float[Array, "B T H d"]:
  """Turns the pairs (x_i, x_{i + d/2}): the halves convention of `transformers`, not the interleaved one of GGUF."""
  cos, sin = turn
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
  q: Float[Array, "B T H d"],
  k: Float[Array, "B K d S"],
  v: Float[Array, "B K S d"],
  mask: Bool[Array, "B T S"],
  dtype: str = "float32",
) -> Float[Array, "B T H*d"]:
  """softmax(q k / sqrt(d)) v where `mask`; H / K query heads share a key head. An empty mask gives finite garbage.

  Keys are transposed and the queries of a group are rows of one product: the forms that XLA batches well on a CPU.
  """
  (batch, t, heads, d), (kv_heads, slots) = q.shape, v.shape[1:3]
  q = (q * d**-0.5).reshape(batch, t, kv_heads, heads // kv_heads, d).transpose(0, 2, 3, 1, 4)
  scores = product("bkqd,bkds->bkqs", q.reshape(batch, kv_heads, -1, d), k, dtype)
  scores = scores.reshape(batch, kv_heads, -1, t, slots)
  weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
  read = product("bkqs,bksd->bkqd", weights.reshape(batch, kv_heads, -1, slots), v, dtype)
  return read.reshape(batch, kv_heads, -1, t, d).transpose(0, 3, 1, 2, 4).reshape(batch, t, heads * d)


def packed_mask(segment: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
  """mask[b, t, s] = same segment, s <= t; padding (-1) sees nothing and is not seen."""
  same = (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
  return same & jnp.tri(segment.shape[1], dtype=bool)
