"""Rewards from the assertions of a task's tests."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_range, check_shapes


class Assertions(NamedTuple):
  """Counts of one trial; -1 and a cause where the verifier left no record of single assertions."""

  passed: int
  total: int
  cause: str


def count_assertions(record: Mapping[str, bool] | None) -> Assertions:
  """Counts a verifier's record {assertion: passed}; None or an empty one is tagged with a cause, never counted as 0."""
  if record is None:
    return Assertions(-1, -1, "no record of assertions")
  if not record:
    return Assertions(-1, -1, "record without an assertion")
  return Assertions(sum(map(bool, record.values())), len(record), "")


def assertion_reward(
  assertions_passed: Int[Array, "N"],
  outcome: Float[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  scale: float = 20.0,
) -> Float[Array, "N"]:
  """r = passed / scale, may exceed 1; the outcome where passed is -1, a trial without a record (see `fell_back`).

  An absolute count under one global scale, not a ratio: 10 of 20 is 0.5, 2 of 4 is 0.1. A scale taken from the batch
  would drift, and one sample could manipulate it. Rows with `valid=False` may hold any count.
  Source: Yang et al. 2026, arXiv 2609.11042 (T1). Ours differs: nothing.
  """
  _checked(assertions_passed, outcome, valid)
  passed = jnp.asarray(assertions_passed)
  return jnp.where(passed < 0, jnp.asarray(outcome, jnp.float32), passed / jnp.float32(scale))


def fell_back(assertions_passed: Int[Array, "N"]) -> Bool[Array, "N"]:
  """Trials that were paid by the outcome for want of a record; their share is a metric."""
  return jnp.asarray(assertions_passed) < 0


def assertion_share(
  assertions_passed: Int[Array, "N"],
  assertions_total: Int[Array, "N"],
  outcome: Float[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  weight: float = 0.4,
) -> Float[Array, "N"]:
  """r = max(b, weight passed / total) in [0, max(1, b)], b the outcome: the older variant, for comparison.

  Source: Yang et al. 2026, arXiv 2609.11042 (T1).
  """
  _checked(assertions_passed, outcome, valid)
  check_shapes(assertions_passed=(assertions_passed, "N"), assertions_total=(assertions_total, "N"))
  passed, total = jnp.asarray(assertions_passed), jnp.asarray(assertions_total)
  outcome = jnp.asarray(outcome, jnp.float32)
  share = jnp.where((passed < 0) | (total <= 0), 0.0, weight * passed / jnp.maximum(total, 1))
  return jnp.clip(jnp.maximum(outcome, share), 0.0, jnp.maximum(1.0, outcome))


def _checked(passed, outcome, valid):
  check_shapes(assertions_passed=(passed, "N"), outcome=(outcome, "N"), valid=(valid, "N"))
  check_range("assertions_passed", passed, -1, float("inf"), where=valid)
