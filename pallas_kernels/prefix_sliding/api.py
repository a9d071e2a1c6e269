"""Attention for training: arguments checked, an implementation chosen, one custom gradient for all of them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation, choose
from pallas_kernels.prefix_sliding import reference, tpu, xla
from pallas_kernels.prefix_sliding.checks import check_heads, check_integers, check_not_negative, check_options
from pallas_kernels.prefix_sliding.softmax import Options


def _on_hopper(*arguments):
  from pallas_kernels.prefix_sliding import gpu  # experimental: imported only where asked for

  return gpu.forward(*arguments)


# forward(q, k, v, segment, prefix_end, options) -> (out, base-2 log-sum-exp of the scores [B, H, T])
IMPLEMENTATIONS = {
  "tpu": Implementation(tpu.forward, tpu.backward, ("tpu",)),
  "xla": Implementation(xla.forward, xla.backward),
  "gpu": Implementation(_on_hopper, xla.backward, ("gpu", "cuda")),
  "reference": Implementation(reference.forward, reference.backward),
}


def prefix_sliding_attention(
  q: Float[Array, "B H T D"],
  k: Float[Array, "B K T D"],
  v: Float[Array, "B K T D"],
  *,
  segment: Int[Array, "B T"],
  prefix_end: Int[Array, "B T"],
  window: int | None,
  scale: float,
  soft_cap: float | None = None,
  implementation: str | None = None,
) -> Float[Array, "B H T D"]:
  """out_t = softmax_s(cap(scale q_t k_s)) v_s over keys s <= t of t's segment with s < prefix_end or t - s < window.

  `window=None` is causal attention; prefix_end at or before the segment's start, a plain sliding window. Linear in T
  in time and memory for a finite window and bounded prefixes, gradients included. A packed row costs what its longest
  prefix costs, in all rows of the batch.

  H is a multiple of K; query head h reads key head h // (H / K). A segment's tokens are consecutive and have one
  prefix_end, an index in the row; beyond the segment's end it means all of the segment. segment -1 is padding: output
  and gradients are 0 there, but q, k and v must be finite. cap(x) = soft_cap tanh(x / soft_cap), or x without a
  soft_cap. Products have float32 sums. On a mesh, call it under `jax.shard_map` over batch and key heads.
  `implementation`: "xla", "tpu", "gpu" (Hopper, 16 bits, gradients by "xla") or "reference" (dense, for tests); None
  takes "tpu" on a TPU, else "xla".
  ValueError: shapes that disagree, window below 1, a negative prefix_end, an implementation that the backend lacks.
  Source: Muennighoff et al. 2026 (Prefix Sliding). Ours differs: rows are packed; the window counts the query itself.
  """
  check_attention(q, k, v, segment, prefix_end)
  options = check_options(window, scale, soft_cap)
  if window is not None and window >= q.shape[2]:
    options = options._replace(window=None)
  chosen = choose(implementation, IMPLEMENTATIONS)
  return _attention(chosen, options, q, k, v, segment.astype(jnp.int32), prefix_end.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(chosen: Implementation, options: Options, q, k, v, segment, prefix_end):
  return chosen.forward(q, k, v, segment, prefix_end, options)[0]


def _forward(chosen, options, *arrays):
  out, lse = chosen.forward(*arrays, options)
  return out, (*arrays, out, lse)


def _backward(chosen, options, residuals, g):
  return *chosen.backward(*residuals, g, options), None, None


_attention.defvjp(_forward, _backward)


def check_attention(q, k, v, segment, prefix_end) -> None:
  if q.ndim != 4 or k.ndim != 4:
    raise ValueError(f"q must be [B, H, T, D] and k [B, K, T, D], got {q.shape} and {k.shape}")
  check_heads(q, k, v)
  batch, _, length, _ = q.shape
  if k.shape[2] != length:
    raise ValueError(f"q and k must have one length, got {length} and {k.shape[2]}; use prefix_sliding_decode")
  check_integers("segment", segment, (batch, length))
  check_integers("prefix_end", prefix_end, (batch, length))
  check_not_negative("prefix_end", prefix_end)
