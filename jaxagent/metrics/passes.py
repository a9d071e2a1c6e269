"""pass@k and pass^k of a task from n samples of which c succeeded, without bias.

The plug-ins 1 - (1 - c/n)^k and (c/n)^k draw with replacement and are biased; they are not here. Average the results
over tasks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes, concrete


def pass_at_k(samples: Int[Array, "*M"], correct: Int[Array, "*M"], *, k: int) -> Float[Array, "*M"]:
  """1 - C(n - c, k) / C(n, k): the probability that at least one of k samples succeeds.

  ValueError where k > n, or c is not in [0, n]; under jit such a task is NaN.
  Source: Chen et al. 2021, arXiv 2107.03374. Ours differs: nothing.
  """
  _check(samples, correct, k)
  return 1.0 - _all_of(samples, jnp.asarray(samples) - jnp.asarray(correct), k)


def pass_hat_k(samples: Int[Array, "*M"], correct: Int[Array, "*M"], *, k: int) -> Float[Array, "*M"]:
  """C(c, k) / C(n, k) (pass^k): the probability that all of k samples succeed.

  ValueError where k > n, or c is not in [0, n]; under jit such a task is NaN.
  Source: Yao et al. 2024, arXiv 2406.12045 (tau-bench). Ours differs: nothing.
  """
  _check(samples, correct, k)
  return _all_of(samples, jnp.asarray(correct), k)


def success_counts(
  success: Bool[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
  """samples and successes by group id; a group without a valid rollout has 0 samples, to be left out.

  Rows of one logical rollout (`rollout`, ids in [0, N)) count once, and `valid=False` rows not at all.
  """
  success = jnp.asarray(success, bool)
  n = success.size
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid)
  rollout = jnp.arange(n) if rollout is None else jnp.asarray(rollout)
  check_shapes(success=(success, "N"), group=(group, "N"), valid=(valid, "N"), rollout=(rollout, "N"))
  check_ids("group", group, n)
  check_ids("rollout", rollout, n)
  first = jax.ops.segment_min(jnp.where(valid, jnp.arange(n), n), rollout, n)[rollout]
  counted = valid & (jnp.arange(n) == first)
  return (
    jax.ops.segment_sum(counted.astype(int), jnp.asarray(group), n),
    jax.ops.segment_sum((counted & success).astype(int), jnp.asarray(group), n),
  )


def _all_of(samples, chosen, k):
  """C(chosen, k) / C(samples, k) as a product of k factors."""
  samples = jnp.asarray(samples)
  j = jnp.arange(k)
  top, bottom = jnp.maximum(chosen[..., None] - j, 0), samples[..., None] - j
  ratio = jnp.prod(top / jnp.maximum(bottom, 1).astype(jnp.float32), axis=-1)
  defined = (k <= samples) & (0 <= chosen) & (chosen <= samples)
  return jnp.where(defined, ratio, jnp.nan)


def _check(samples, correct, k):
  if not k >= 1:
    raise ValueError(f"k must be at least 1, got {k}")
  check_shapes(samples=(samples, "*M"), correct=(correct, "*M"))
  if not concrete(samples, correct) or not np.size(samples):
    return
  n, c = np.asarray(samples), np.asarray(correct)
  if n.min() < k:
    raise ValueError(f"k is {k} but a task has only {n.min()} samples; sample each task at least k times")
  if ((c < 0) | (c > n)).any():
    bad = np.argmax((c < 0) | (c > n))
    raise ValueError(f"correct must lie between 0 and samples, got {c.flat[bad]} of {n.flat[bad]}")
