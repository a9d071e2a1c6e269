"""How often a method's own mechanism acts: shares in [0, 1], 0 where there is nothing to count, NaN never.

A run in which a fallback always fires, or a credit never arrives, has a loss curve like any other: log these, by
`Method.metrics`. Rows with `valid=False` may hold anything. A ValueError names a column whose shape disagrees.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes


def fallback_share(assertions_passed: Int[Array, "N"], valid: Bool[Array, "N"]) -> Float[Array, ""]:
  """Share of the valid rows without a record of assertions, which `rewards.assertion_reward` pays by the outcome."""
  check_shapes(assertions_passed=(assertions_passed, "N"), valid=(valid, "N"))
  return _share(jnp.asarray(assertions_passed) < 0, jnp.asarray(valid, bool))


def uncited_shares(
  step_quality: Float[Array, "N S"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"], valid: Bool[Array, "N"]
) -> dict[str, Float[Array, ""]]:
  """`steps`: share of the turns that no verdict cites (NaN); `rows`: share of the rows in which none is cited.

  What `advantages.redistribute_by_quality` fills with the mean, and leaves as it is.
  """
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), step_quality=(step_quality, "N S"), valid=(valid, "N")
  )  # fmt: skip
  taken = _turns(mask, turn, valid, sizes["S"])
  uncited = jnp.isnan(jnp.asarray(step_quality, jnp.float32))
  return {
    "steps": _share(uncited, taken),
    "rows": _share(jnp.all(uncited | ~taken, axis=1), jnp.any(taken, axis=1)),
  }


def split_shares(
  outcome: Float[Array, "N"],
  group: Int[Array, "N"],
  first_error: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  valid: Bool[Array, "N"],
  truncated: Bool[Array, "N"],
) -> dict[str, Float[Array, ""]]:
  """Of `advantages.prefix_suffix`. `prefix`: share of the failures' tokens that stand before the first error, where it
  is known; `fallback`: share of the groups with a failure in which some failure's error is not.
  """
  n = check_shapes(
    mask=(mask, "N T"), outcome=(outcome, "N"), group=(group, "N"), first_error=(first_error, "N"),
    valid=(valid, "N"), truncated=(truncated, "N"),
  )["N"]  # fmt: skip
  check_ids("group", group, n, where=valid)
  failed = jnp.asarray(valid, bool) & ~(jnp.asarray(outcome) == 1)
  error = jnp.where(jnp.asarray(truncated, bool), 0, jnp.asarray(first_error))
  groups = [jax.ops.segment_max(x.astype(int), jnp.asarray(group), n) > 0 for x in (failed & (error < 0), failed)]
  tokens = jnp.asarray(mask, bool) & (failed & (error >= 0))[:, None]
  early = jnp.arange(tokens.shape[1]) < error[:, None]
  return {"prefix": _share(early, tokens), "fallback": _share(*groups)}


def credited_shares(
  step_credit: Float[Array, "N S"],
  outcome: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  valid: Bool[Array, "N"],
) -> dict[str, Float[Array, ""]]:
  """Of the failures that `advantages.add_step_credit` pays. `steps`: share of their turns with credit; `rows`: share of
  the failures with any.
  """
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), step_credit=(step_credit, "N S"), outcome=(outcome, "N"), valid=(valid, "N")
  )  # fmt: skip
  failed = jnp.asarray(valid, bool) & (jnp.asarray(outcome) < 1)
  taken = _turns(mask, turn, failed, sizes["S"])
  credited = taken & (jnp.asarray(step_credit) > 0)
  return {"steps": _share(credited, taken), "rows": _share(jnp.any(credited, axis=1), jnp.any(taken, axis=1))}


def distilled_shares(selection: Float[Array, "N"], valid: Bool[Array, "N"]) -> dict[str, Float[Array, ""]]:
  """Of Experience Funnel. `rows`: share of the valid rows that had the state (selection of 0 or more); `selected`:
  share of those that are distilled (above 0).
  """
  check_shapes(selection=(selection, "N"), valid=(valid, "N"))
  valid, selection = jnp.asarray(valid, bool), jnp.asarray(selection)
  with_state = valid & (selection >= 0)
  return {"rows": _share(with_state, valid), "selected": _share(selection > 0, with_state)}


def _turns(mask, turn, rows, turns: int) -> Bool[Array, "N S"]:
  """Which turns the rows took."""
  check_ids("turn", turn, turns, where=jnp.asarray(mask, bool) & jnp.asarray(rows, bool)[:, None])
  place = jnp.where(jnp.asarray(mask, bool) & jnp.asarray(rows, bool)[:, None], jnp.asarray(turn), turns)
  found = jnp.zeros((place.shape[0], turns), bool)
  return found.at[jnp.arange(place.shape[0])[:, None], place].set(True, mode="drop")


def _share(part: Bool[Array, "..."], whole: Bool[Array, "..."]) -> Float[Array, ""]:
  return jnp.sum(part & whole) / jnp.maximum(jnp.sum(whole), 1)
