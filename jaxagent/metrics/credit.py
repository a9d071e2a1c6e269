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


def advantage_shape(
  advantage: Float[Array, "N T"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"], valid: Bool[Array, "N"]
) -> dict[str, Float[Array, ""]]:
  """`size`: mean |A| of the action tokens. `within_rows`, `within_turns`: share of the variance of A that lies within
  rows, and within turns: 0 for one number a row, or a turn.
  """
  sizes = check_shapes(advantage=(advantage, "N T"), mask=(mask, "N T"), turn=(turn, "N T"), valid=(valid, "N"))
  n, length = sizes["N"], sizes["T"]
  taken = (jnp.asarray(mask, bool) & jnp.asarray(valid, bool)[:, None]).ravel()
  a = jnp.where(taken, jnp.asarray(advantage, jnp.float32).ravel(), 0.0)
  row = jnp.repeat(jnp.arange(n), length)
  of_turn = row * length + jnp.clip(jnp.asarray(turn).ravel(), 0, length - 1)
  whole = _spread(a, taken, jnp.zeros_like(row), 1)
  share = lambda part: jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1.0), 0.0)  # noqa: E731
  return {
    "size": jnp.sum(jnp.abs(a)) / jnp.maximum(jnp.sum(taken), 1),
    "within_rows": share(_spread(a, taken, row, n)),
    "within_turns": share(_spread(a, taken, of_turn, n * length)),
  }


def reward_change(
  reward: Float[Array, "N"], outcome: Float[Array, "N"], valid: Bool[Array, "N"]
) -> dict[str, Float[Array, ""]]:
  """Of a reward made from the outcome. `mean`: of reward - outcome over the valid rows; `rows`: share of those in which
  they differ; `partial`: share of those with a reward strictly between 0 and 1.
  """
  check_shapes(reward=(reward, "N"), outcome=(outcome, "N"), valid=(valid, "N"))
  valid, reward = jnp.asarray(valid, bool), jnp.asarray(reward, jnp.float32)
  change = jnp.where(valid, reward - jnp.asarray(outcome, jnp.float32), 0.0)
  return {
    "mean": jnp.sum(change) / jnp.maximum(jnp.sum(valid), 1),
    "rows": _share(change != 0, valid),
    "partial": _share((reward > 0) & (reward < 1), valid),
  }


def paid_turn_share(
  turn_reward: Float[Array, "N S"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"], valid: Bool[Array, "N"]
) -> Float[Array, ""]:
  """Share of the turns taken that have a reward of their own."""
  sizes = check_shapes(turn_reward=(turn_reward, "N S"), mask=(mask, "N T"), turn=(turn, "N T"), valid=(valid, "N"))
  return _share(jnp.asarray(turn_reward) != 0, _turns(mask, turn, valid, sizes["S"]))


def penalised_gap(
  advantage: Float[Array, "N T"], penalties: Float[Array, "N R"], mask: Bool[Array, "N T"], valid: Bool[Array, "N"]
) -> Float[Array, ""]:
  """Mean advantage of the action tokens of rows with a penalty, minus that of the others; 0 where either is empty."""
  check_shapes(advantage=(advantage, "N T"), penalties=(penalties, "N R"), mask=(mask, "N T"), valid=(valid, "N"))
  taken = jnp.asarray(mask, bool) & jnp.asarray(valid, bool)[:, None]
  punished = jnp.any(jnp.asarray(penalties) < 0, axis=1)[:, None]
  parts = [taken & punished, taken & ~punished]
  means = [jnp.sum(jnp.where(p, advantage, 0.0)) / jnp.maximum(jnp.sum(p), 1) for p in parts]
  return jnp.where(jnp.any(parts[0]) & jnp.any(parts[1]), means[0] - means[1], 0.0)


def _spread(a, taken, cell, cells: int) -> Float[Array, ""]:
  """Sum of squares around the mean of each cell."""
  count = jax.ops.segment_sum(taken.astype(jnp.float32), cell, cells)
  mean = jax.ops.segment_sum(jnp.where(taken, a, 0.0), cell, cells) / jnp.maximum(count, 1)
  return jnp.sum(jnp.where(taken, (a - mean[cell]) ** 2, 0.0))


def _turns(mask, turn, rows, turns: int) -> Bool[Array, "N S"]:
  """Which turns the rows took."""
  check_ids("turn", turn, turns, where=jnp.asarray(mask, bool) & jnp.asarray(rows, bool)[:, None])
  place = jnp.where(jnp.asarray(mask, bool) & jnp.asarray(rows, bool)[:, None], jnp.asarray(turn), turns)
  found = jnp.zeros((place.shape[0], turns), bool)
  return found.at[jnp.arange(place.shape[0])[:, None], place].set(True, mode="drop")


def _share(part: Bool[Array, "..."], whole: Bool[Array, "..."]) -> Float[Array, ""]:
  return jnp.sum(part & whole) / jnp.maximum(jnp.sum(whole), 1)
