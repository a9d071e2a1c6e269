"""Who of the turns and tokens of a rollout earned its advantage.

`advantage [N]` is the outcome's, one per row; results are `[N, T]`, float32, 0 off actions. Turn s of a row is column s
of per-turn arrays `[N, S]`; with `rollout` the rows of one logical rollout share their turns' statistics. Masked places
may hold anything. A ValueError names a column whose shape disagrees and, on concrete arrays, numbers out of range.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.group import group_relative
from jaxagent.advantages.segments import at_tokens, over_rollouts, turn_places
from jaxagent.checks import check_ids, check_range, check_shapes, concrete


def redistribute_by_quality(
  advantage: Float[Array, "N"],
  step_quality: Float[Array, "N S"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
) -> Float[Array, "N T"]:
  """a_j = A N w_j / (n_j sum_k w_k): w = Q for A >= 0, 1 - Q for A < 0; n_j tokens in step j, N in all.

  `step_quality` in [0, 1], NaN for a step that no verdict cites: it gets the mean of the cited ones. The rollout keeps
  its total sum_j n_j a_j = A N and its sign. Uniform A where no step is cited, and where every w is 0. A step is a
  turn; equal qualities give every step the same total, not every token.
  Source: Gandhi et al. 2026, arXiv 2609.04094 (DRACO), equations 4 to 6. Ours differs: nothing.
  """
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), advantage=(advantage, "N"), step_quality=(step_quality, "N S"),
    rollout=(rollout, "N"),
  )  # fmt: skip
  mask, turn, quality = jnp.asarray(mask, bool), jnp.asarray(turn), jnp.asarray(step_quality, jnp.float32)
  check_ids("turn", turn, sizes["S"], where=mask)
  here = turn_places(mask, turn, sizes["S"])
  cited = here & ~jnp.isnan(quality)
  check_range("step_quality", step_quality, 0, 1, where=cited)
  counts = over_rollouts(jnp.sum(cited, axis=1), rollout)[:, None]
  mean = over_rollouts(jnp.sum(jnp.where(cited, quality, 0.0), axis=1), rollout)[:, None] / jnp.maximum(counts, 1)
  quality = jnp.where(cited, quality, mean)
  advantage = jnp.asarray(advantage, jnp.float32)[:, None]
  weight = jnp.where(here, jnp.where(advantage >= 0, quality, 1 - quality), 0.0)
  total = over_rollouts(jnp.sum(weight, axis=1), rollout)[:, None]
  tokens = over_rollouts(jnp.sum(mask, axis=1), rollout)[:, None].astype(jnp.float32)
  usable = (counts > 0) & (total > 0)
  per_token = tokens * weight / (jnp.maximum(_turn_tokens(mask, turn, sizes["S"]), 1) * jnp.where(usable, total, 1.0))
  return at_tokens(advantage * jnp.where(usable, per_token, 1.0), mask, turn)


def privileged_weights(
  advantage: Float[Array, "N"],
  logp_privileged: Float[Array, "N T"],
  logp_old: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  turns: int,
  *,
  executable: Bool[Array, "N T"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  bound: float = 0.5,
  scale: float = 1.0,
  threshold: float = 0.05,
) -> Float[Array, "N S"]:
  """w_s = 1 + (bound / 2)(q_s - mean q), q_s = tanh(sign(A)(d_s - mean d) / scale): one weight per turn.

  d_s is the mean over the turn's `executable` tokens (default: all) of logp_privileged - logp_old, with differences
  below `threshold` set to 0; log-probs in nats of the same tokens, with and without the guidance in the prompt. The
  weights have mean 1 over the rollout's turns and lie within 1 +- bound; they are 1 where A = 0, for turns without an
  executable token and where fewer than two turns have one.
  Source: Yang et al. 2026, arXiv 2608.31077 (TASPO), equations 6 to 10, from notes of the paper; bound, scale (nats)
  and threshold are ours, its values were not visible.
  """
  check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), advantage=(advantage, "N"), logp_privileged=(logp_privileged, "N T"),
    logp_old=(logp_old, "N T"), executable=(executable, "N T"), rollout=(rollout, "N"),
  )  # fmt: skip
  if concrete(bound, scale) and not (0 < bound <= 1 and scale > 0):
    raise ValueError(f"bound must lie in (0, 1] and scale above 0, got {bound} and {scale}")
  mask, turn = jnp.asarray(mask, bool), jnp.asarray(turn)
  check_ids("turn", turn, turns, where=mask)
  scored = mask if executable is None else mask & jnp.asarray(executable)
  gain = jax.lax.stop_gradient(jnp.where(scored, jnp.asarray(logp_privileged, jnp.float32) - logp_old, 0.0))
  gain = jnp.where(jnp.abs(gain) >= threshold, gain, 0.0)
  present = turn_places(scored, turn, turns)
  score = _turn_sum(gain, scored, turn, turns) / jnp.maximum(_turn_tokens(scored, turn, turns), 1)
  count = jnp.maximum(over_rollouts(jnp.sum(present, axis=1), rollout), 1)[:, None]

  def demeaned(x):
    mean = over_rollouts(jnp.sum(jnp.where(present, x, 0.0), axis=1), rollout)[:, None] / count
    return jnp.where(present, x - mean, 0.0)

  sign = jnp.sign(jnp.asarray(advantage, jnp.float32))[:, None]
  return 1 + bound / 2 * demeaned(jnp.tanh(sign * demeaned(score) / scale))


def weigh_by_privileged(
  advantage: Float[Array, "N"],
  logp_privileged: Float[Array, "N T"],
  logp_old: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  turn_reward: Float[Array, "N S"],
  *,
  executable: Bool[Array, "N T"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  bound: float = 0.5,
  scale: float = 1.0,
  threshold: float = 0.05,
) -> Float[Array, "N T"]:
  """A w_s at every action token of turn s, see `privileged_weights`; `turn_reward` only tells how many turns there are.

  The mean over turns stays A, the sum over tokens does not. A rollout for which there is no guidance has
  logp_privileged = logp_old and keeps A. On losers, actions that the guidance supports are punished less.
  Source: Yang et al. 2026, arXiv 2608.31077 (TASPO), equation 2.
  """
  check_shapes(mask=(mask, "N T"), turn_reward=(turn_reward, "N S"))
  weight = privileged_weights(
    advantage, logp_privileged, logp_old, mask, turn, np.shape(turn_reward)[1], executable=executable, rollout=rollout,
    bound=bound, scale=scale, threshold=threshold,
  )  # fmt: skip
  weighed = jnp.asarray(advantage, jnp.float32)[:, None] * weight
  return at_tokens(weighed, jnp.asarray(mask, bool), jnp.asarray(turn))


def within_group(advantage: Float[Array, "N T"], mask: Bool[Array, "N T"], group: Int[Array, "N"]) -> Array:
  """A minus its mean over the action tokens of the group."""
  n = check_shapes(advantage=(advantage, "N T"), mask=(mask, "N T"), group=(group, "N"))["N"]
  check_ids("group", group, n)
  total = jax.ops.segment_sum(jnp.sum(jnp.where(mask, advantage, 0.0), axis=1), group, n)
  count = jax.ops.segment_sum(jnp.sum(mask, axis=1), group, n)
  return jnp.where(mask, advantage - (total / jnp.maximum(count, 1))[group][:, None], 0.0)


def within_batch(advantage: Float[Array, "N T"], mask: Bool[Array, "N T"], group: Int[Array, "N"]) -> Array:
  """A minus its mean over all action tokens of the batch."""
  check_ids("group", group, len(mask))
  return within_group(advantage, mask, jnp.zeros_like(group))


def prefix_suffix(
  outcome: Float[Array, "N"],
  group: Int[Array, "N"],
  first_error: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  truncated: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  prefix: float = 0.0,
  zero_mean: Callable[..., Array] = within_group,
) -> Float[Array, "N T"]:
  """A_cor - b on successes; on failures prefix A_cor - b before the first error and A_inc - b from it on.

  A_cor = (1 - mu) / sigma and A_inc = -mu / sigma over the group's outcomes (0 or 1); b makes the token advantages
  zero-mean. `first_error` is a place in the row; successes may hold anything. Truncated failures are wrong from the
  start. -1 means that the teacher found none: then the whole group falls back to `group_relative`. Groups with one
  outcome get 0. With prefix = 0 a correct prefix gets -b, which is negative in a group that is mostly solved; a
  positive `prefix` invites long prefixes of failures.
  Source: Han et al. 2026, arXiv 2609.02817 (Cliff), from notes of the paper. Whether b is the group's or the batch's is
  not confirmed: `zero_mean` is `within_group` or `within_batch`.
  """
  n = check_shapes(
    mask=(mask, "N T"), outcome=(outcome, "N"), group=(group, "N"), first_error=(first_error, "N"), valid=(valid, "N"),
    truncated=(truncated, "N"), rollout=(rollout, "N"),
  )["N"]  # fmt: skip
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
  _check_binary(outcome, valid)
  mask, group = jnp.asarray(mask, bool) & valid[:, None], jnp.asarray(group)
  relative = group_relative(outcome, group, valid=valid, rollout=rollout, scale_eps=1e-12)
  correct = valid & (jnp.asarray(outcome) == 1)
  error = jnp.asarray(first_error)
  error = error if truncated is None else jnp.where(jnp.asarray(truncated), 0, error)
  unknown = valid & ~correct & (error < 0)
  fallback = (jax.ops.segment_sum(unknown.astype(jnp.int32), group, n)[group] > 0)[:, None]
  success = jax.ops.segment_max(jnp.where(correct, relative, 0.0), group, n)[group]
  early = ~correct[:, None] & (jnp.arange(mask.shape[1]) < error[:, None])
  split = jnp.where(early, prefix * success[:, None], relative[:, None])
  live = mask & ~fallback & (success > 0)[:, None]
  return jnp.where(live, zero_mean(split, live, group), jnp.where(mask & fallback, relative[:, None], 0.0))


def by_score(similarity: np.ndarray) -> np.ndarray:
  """Steps in falling order of their best match."""
  return np.argsort(-similarity.max(1, initial=-np.inf), kind="stable")


def in_reverse(similarity: np.ndarray) -> np.ndarray:
  return np.arange(len(similarity))[::-1]


def in_time(similarity: np.ndarray) -> np.ndarray:
  return np.arange(len(similarity))


def match_steps(
  similarity: Float[np.ndarray, "F R"],
  *,
  threshold: float = 0.8,
  order: Callable[[np.ndarray], np.ndarray] = by_score,
) -> Int[np.ndarray, "F"]:
  """The step of a successful sibling that each step of a failed rollout matches, -1 for none. Greedy, on the host.

  Steps choose in `order` (`by_score`, `in_reverse`, `in_time`): the most similar reference step at or above `threshold`
  that is free and keeps the order of all pairs so far. A reference step is matched once. `similarity` in [0, 1].
  Source: Xu et al. 2026, arXiv 2606.25852 (SCPO). Reconstruction: threshold and order were not visible; the paper says
  that its order is not chronological.
  """
  similarity = np.asarray(similarity, np.float64)
  check_shapes(similarity=(similarity, "F R"))
  check_range("similarity", similarity, 0, 1)
  match = np.full(len(similarity), -1)
  for step in order(similarity):
    for reference in np.argsort(-similarity[step], kind="stable"):
      if similarity[step, reference] < threshold:
        break
      pairs = [(i, j) for i, j in enumerate(match) if j >= 0]
      if all(j != reference and (i < step) == (j < reference) for i, j in pairs):
        match[step] = reference
        break
  return match


def longest_success(outcome: Sequence[float], turns: Sequence[int], group: Sequence[int]) -> Int[np.ndarray, "N"]:
  """The row of the longest rollout of the group with outcome 1 (the first of several), -1 for none. On the host."""
  won, length, member = np.asarray(outcome) == 1, np.asarray(turns), np.asarray(group)
  check_shapes(outcome=(won, "N"), turns=(length, "N"), group=(member, "N"))
  best = np.full(len(won), -1)
  for g in np.unique(member):
    winners = np.flatnonzero((member == g) & won)
    if len(winners):
      best[member == g] = winners[np.argmax(length[winners])]
  return best


def matched_credit(similarity: Float[np.ndarray, "F R"], match: Int[np.ndarray, "F"]) -> Float[np.ndarray, "F"]:
  """The similarity of each matched step, 0 for the others: the column `step_credit` of a failed rollout."""
  similarity, match = np.asarray(similarity, np.float32), np.asarray(match)
  check_shapes(similarity=(similarity, "F R"), match=(match, "F"))
  check_ids("match", match, similarity.shape[1], where=match >= 0)
  picked = similarity[np.arange(len(match)), np.maximum(match, 0)] if similarity.size else np.zeros(len(match))
  return np.where(match >= 0, picked, 0.0).astype(np.float32)


def add_step_credit(
  turn_reward: Float[Array, "N S"],
  step_credit: Float[Array, "N S"],
  outcome: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
  weight: float = 0.2,
  limit: float = 0.9,
) -> Float[Array, "N S"]:
  """turn_reward + weight step_credit where outcome < 1, scaled so that a rollout's bonus is at most `limit`.

  `step_credit` in [0, 1], see `matched_credit`, is read at the row's own turns; successes are never touched. Not
  potential-based: it may change what is optimal. To be followed by GiGPO's step returns.
  Source: Xu et al. 2026, arXiv 2606.25852 (SCPO). Reconstruction: weight, limit and that credit grows with the
  similarity are ours, the paper's were not visible.
  """
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), turn_reward=(turn_reward, "N S"), step_credit=(step_credit, "N S"),
    outcome=(outcome, "N"), rollout=(rollout, "N"),
  )  # fmt: skip
  check_ids("turn", turn, sizes["S"], where=mask)
  check_ids("rollout", rollout, sizes["N"])
  here = turn_places(jnp.asarray(mask, bool), jnp.asarray(turn), sizes["S"])
  check_range("step_credit", step_credit, 0, 1, where=here)
  paid = here & (jnp.asarray(outcome)[:, None] < 1)
  bonus = jnp.where(paid, weight * jnp.asarray(step_credit, jnp.float32), 0.0)
  total = over_rollouts(jnp.sum(bonus, axis=1), rollout)[:, None]
  return jnp.asarray(turn_reward, jnp.float32) + bonus * jnp.minimum(1.0, limit / jnp.maximum(total, limit))


def _turn_sum(x, mask, turn, turns):
  """Sums over the tokens of each turn, `[N, S]`."""
  row = jnp.arange(mask.shape[0])[:, None]
  place = jnp.where(mask, turn, turns)
  return jnp.zeros((mask.shape[0], turns), jnp.float32).at[row, place].add(jnp.where(mask, x, 0.0), mode="drop")


def _turn_tokens(mask, turn, turns):
  return _turn_sum(1.0, mask, turn, turns)


def _check_binary(outcome, valid):
  if concrete(outcome, valid):
    outcome = np.asarray(outcome)
    bad = np.flatnonzero(np.asarray(valid) & (outcome != 0) & (outcome != 1))
    if len(bad):
      raise ValueError(f"outcome must be 0 or 1, got {outcome[bad[0]]} in row {bad[0]}; threshold it first")
