"""Checks of arguments, before anything is traced; values only where they are concrete."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.prefix_sliding.softmax import Options


def check_options(window, scale, soft_cap) -> Options:
  if window is not None and (not isinstance(window, int | np.integer) or isinstance(window, bool) or window < 1):
    raise ValueError(f"window must be an int of at least 1 (the query itself), got {window!r}; None is causal")
  if soft_cap is not None and not soft_cap > 0:
    raise ValueError(f"soft_cap must be above 0, got {soft_cap}; None is no cap")
  return Options(None if window is None else int(window), float(scale), None if soft_cap is None else float(soft_cap))


def check_heads(q, k, v) -> None:
  (batch, heads, _, width), shape = q.shape, k.shape
  if v.shape != shape:
    raise ValueError(f"k and v must have one shape, got {shape} and {v.shape}")
  if shape[0] != batch or shape[3] != width:
    raise ValueError(f"q, k and v must agree in batch and head width, got q {q.shape} and k {shape}")
  if shape[1] < 1 or heads % shape[1]:
    raise ValueError(f"key heads must divide query heads, got {heads} query and {shape[1]} key heads; repeat key heads")
  if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
    raise ValueError(f"q, k and v must have one float dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast them")


def check_integers(name: str, x, shape: tuple[int, ...]) -> None:
  if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
    raise ValueError(f"{name} must be integers of shape {list(shape)}, got {x.dtype}{list(x.shape)}")


def check_not_negative(name: str, x) -> None:
  if concrete(x) and x.size and np.asarray(x).min() < 0:
    raise ValueError(f"{name} must not be negative, got {np.asarray(x).min()}; 0 is no prefix")


def concrete(x) -> bool:
  return not isinstance(x, jax.core.Tracer)
