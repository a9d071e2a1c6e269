"""Rewards and penalties on form: length, repetition, tool errors. Lengths in tokens; results `[N]`, float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_range, check_shapes
from jaxagent.rewards.efficiency import generated_tokens, is_correct


def cosine_length(
  outcome: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
  limit: int = 16384,
  correct: tuple[float, float] = (2.0, 1.0),
  wrong: tuple[float, float] = (-10.0, 0.0),
  exceeded: float = -10.0,
) -> Float[Array, "N"]:
  """r_L + (r_0 - r_L)(1 + cos(pi L / limit)) / 2 from r_0 at length 0 to r_L at `limit`; `exceeded` at L >= limit.

  `correct` and `wrong` are (r_0, r_L); correct means outcome 1. L counts the tokens that the policy wrote. With the
  paper's values a short success is worth more, and a long failure is better than a short one.
  Source: Yeo et al. 2025, arXiv 2502.03373, constants from memory; `limit` is ours.
  """
  check_shapes(mask=(mask, "N T"), outcome=(outcome, "N"))
  length = generated_tokens(mask, rollout=rollout)
  right = is_correct(outcome)
  start, end = (jnp.where(right, correct[i], wrong[i]) for i in (0, 1))
  reward = end + (start - end) * (1 + jnp.cos(jnp.pi * length / limit)) / 2
  return jnp.where(length >= limit, exceeded, reward)


def repetition_penalty(
  tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], *, size: int = 3, penalty: float = -1.0
) -> Float[Array, "N"]:
  """penalty (1 - distinct / all) over the row's n-grams of `size` tokens that the policy wrote without a gap.

  0 for a row without an n-gram. Each row counts for itself.
  Source: the form in TRL, after Yeo et al. 2025, arXiv 2502.03373. Ours differs: n-grams do not span tool results.
  """
  width = check_shapes(tokens=(tokens, "N T"), mask=(mask, "N T"))["T"]
  if size < 1:
    raise ValueError(f"size must be at least 1 token, got {size}")
  if width < size:
    return jnp.zeros(jnp.shape(tokens)[0])
  spans = [(jnp.asarray(tokens)[:, i : width - size + 1 + i], jnp.asarray(mask)[:, i : width - size + 1 + i])
           for i in range(size)]  # fmt: skip
  absent = ~jnp.stack([m for _, m in spans]).all(0)
  absent, *grams = jax.lax.sort((absent.astype(jnp.int32), *(t for t, _ in spans)), dimension=1, num_keys=size + 1)
  changed = jnp.stack([g[:, 1:] != g[:, :-1] for g in grams]).any(0)
  first = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True) & (absent == 0)
  total = jnp.sum(absent == 0, axis=1)
  return jnp.where(total > 0, penalty * (1 - jnp.sum(first, axis=1) / jnp.maximum(total, 1)), 0.0)


def tool_error_penalty(
  tool_errors: Int[Array, "N"], tool_calls: Int[Array, "N"], *, scale: float = 0.25
) -> Float[Array, "N"]:
  """-scale failed / all tool calls; 0 without a call. To be clipped and added to the advantage, or added to a reward.

  Source: Long-Horizon RL Needs Muon (2026). Reconstruction: the paper's text was not available; form and scale are
  ours.
  """
  check_shapes(tool_errors=(tool_errors, "N"), tool_calls=(tool_calls, "N"))
  calls = jnp.asarray(tool_calls, jnp.float32)
  check_range("tool_errors / tool_calls", jnp.asarray(tool_errors) / jnp.maximum(calls, 1), 0, 1)
  return -scale * jnp.asarray(tool_errors, jnp.float32) / jnp.maximum(calls, 1)


def length_penalty(
  mask: Bool[Array, "N T"], *, rollout: Int[Array, "N"] | None = None, free: int = 8192, scale: float = 0.25
) -> Float[Array, "N"]:
  """-scale max(0, L - free) / free with L the tokens that the policy wrote.

  Source: Long-Horizon RL Needs Muon (2026). Reconstruction: the paper's text was not available; form and numbers are
  ours.
  """
  check_shapes(mask=(mask, "N T"), rollout=(rollout, "N"))
  return -scale * jnp.maximum(0.0, generated_tokens(mask, rollout=rollout) - free) / free
