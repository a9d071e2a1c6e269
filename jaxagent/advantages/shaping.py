"""What rescales or adds to advantages: group entropy, anchor states, teams, lengths.

`reward`, `group`, `rollout` and `valid` are `[N]`, per-token columns `[N, T]`, per-turn ones `[N, S]`; results are
float32. Masked places and rows with `valid=False` may hold anything. A ValueError names a column whose shape disagrees
and, on concrete arrays, ids out of range.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.group import first_rows, group_relative
from jaxagent.advantages.returns import turn_returns
from jaxagent.advantages.segments import at_tokens, lift, moments, over_rollouts, turn_places
from jaxagent.checks import check_ids, check_shapes, concrete


def group_entropy(
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
) -> Float[Array, "N"]:
  """H_g = -(sum of log pi) / (action tokens) over the group, at each of its rows; nats per token.

  A Monte-Carlo estimate of the policy's entropy on the task, at the sampling temperature. A group without tokens has 0.
  Source: Cheng et al. 2026, arXiv 2607.16850 (GEPO), equation 4.
  """
  total, tokens, _ = _log_probs(logp_rollout, mask, group, valid)
  return -total / jnp.maximum(tokens, 1.0)


def group_entropy_per_sequence(
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
) -> Float[Array, "N"]:
  """H_g = -(sum of log pi) / (rollouts of the group): the second published form, in which length enters.

  Source: Intern-S2-Preview, arXiv 2608.13505, section 4.3.4.
  """
  n = check_shapes(mask=(mask, "N T"), rollout=(rollout, "N"))["N"]
  check_ids("rollout", rollout, n)
  total, _, valid = _log_probs(logp_rollout, mask, group, valid)
  rollout = jnp.arange(n) if rollout is None else jnp.asarray(rollout)
  count = jax.ops.segment_sum(first_rows(rollout, valid).astype(jnp.float32), group, n)[group]
  return -total / jnp.maximum(count, 1.0)


class EntropyThresholds(NamedTuple):
  """Running bounds of the group entropy (nats per token); `batches` seen, the first of which seeds them."""

  low: Float[Array, ""]
  high: Float[Array, ""]
  batches: Int[Array, ""]


def entropy_thresholds() -> EntropyThresholds:
  return EntropyThresholds(jnp.float32(0), jnp.float32(0), jnp.int32(0))


def update_thresholds(
  state: EntropyThresholds,
  entropy: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  beta_low: float = 0.2,
  beta_high: float = 0.3,
  gamma: float = 0.01,
) -> EntropyThresholds:
  """low <- (1 - gamma) low + gamma (mean - beta_low std), high with + beta_high std; over the batch's groups.

  `entropy` is the group's, at each of its rows; each group counts once, population std. Update first, then attenuate.
  A batch without a valid row changes nothing.
  Source: Cheng et al. 2026, arXiv 2607.16850 (GEPO), equations 8 and 9, constants of a re-implementation. That the
  first batch seeds the state is our choice: the paper does not say.
  """
  n = check_shapes(entropy=(entropy, "N"), group=(group, "N"), valid=(valid, "N"))["N"]
  check_ids("group", group, n)
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
  once = first_rows(jnp.asarray(group), valid)
  count = jnp.maximum(jnp.sum(once), 1)
  entropy = jnp.where(once, jnp.asarray(entropy, jnp.float32), 0.0)
  mean = jnp.sum(entropy) / count
  std = jnp.sqrt(jnp.sum(jnp.where(once, (entropy - mean) ** 2, 0.0)) / count)
  rate = jnp.where(state.batches == 0, 1.0, gamma) * jnp.any(valid)
  low = (1 - rate) * state.low + rate * (mean - beta_low * std)
  high = (1 - rate) * state.high + rate * (mean + beta_high * std)
  return EntropyThresholds(low, high, state.batches + jnp.any(valid))


def attenuate_by_entropy(
  advantage: Float[Array, "N"] | Float[Array, "N T"],
  group_entropy: Float[Array, "N"],
  entropy_low: Float[Array, ""] | Float[Array, "N"],
  entropy_high: Float[Array, ""] | Float[Array, "N"],
  *,
  alpha_low: float = 0.5,
  alpha_high: float = 0.2,
) -> Float[Array, "N"] | Float[Array, "N T"]:
  """alpha_low A where A > 0 and H < low, alpha_high A where A < 0 and H > high, else A.

  Certain groups get less reinforcement, uncertain ones less punishment; the group's mean is no longer 0. `advantage`
  may be `[N]` or `[N, T]`, any base. Thresholds are numbers or one per row.
  Source: Cheng et al. 2026, arXiv 2607.16850 (GEPO), equation 7; alpha_high < alpha_low, both of a re-implementation.
  """
  for name, alpha in (("alpha_low", alpha_low), ("alpha_high", alpha_high)):
    if not 0 <= alpha <= 1:
      raise ValueError(f"{name} must lie in [0, 1], got {alpha}")
  positive, negative, advantage = _regimes(advantage, group_entropy, entropy_low, entropy_high)
  return advantage * jnp.where(positive, alpha_low, jnp.where(negative, alpha_high, 1.0))


def attenuated_shares(
  advantage: Float[Array, "N"] | Float[Array, "N T"],
  group_entropy: Float[Array, "N"],
  entropy_low: Float[Array, ""] | Float[Array, "N"],
  entropy_high: Float[Array, ""] | Float[Array, "N"],
) -> dict[str, Float[Array, ""]]:
  """Shares of the positive and of the negative advantages that `attenuate_by_entropy` changes; 0 if there are none.

  They do not change signs, so the advantages before and after give the same. To be logged: a run where nothing fires
  looks like any other in the loss curve.
  """
  positive, negative, advantage = _regimes(advantage, group_entropy, entropy_low, entropy_high)
  return {
    "positive": jnp.sum(positive) / jnp.maximum(jnp.sum(advantage > 0), 1),
    "negative": jnp.sum(negative) / jnp.maximum(jnp.sum(advantage < 0), 1),
  }


def favour_short_successes(
  advantage: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  floor: float = 0.5,
  power: float = 1.0,
  share: float = 0.5,
  eps: float = 1e-6,
) -> Float[Array, "N"]:
  """Positive A times w_i = floor + (1 - floor)(1 - (L - Lmin) / (Lmax - Lmin + eps))^power, their sum kept.

  L in action tokens of the logical rollout, its ends over the group's positive ones; each counts once. Groups of which
  less than `share` is positive stay as they are.
  Source: Intern-S2-Preview, arXiv 2608.13505 (adaptive length regularisation). Its constants are not published: the
  defaults are ours.
  """
  n = check_shapes(
    mask=(mask, "N T"), advantage=(advantage, "N"), group=(group, "N"), valid=(valid, "N"), rollout=(rollout, "N")
  )["N"]
  check_ids("group", group, n)
  check_ids("rollout", rollout, n)
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
  once = first_rows(jnp.arange(n) if rollout is None else jnp.asarray(rollout), valid)
  advantage, group = jnp.where(valid, jnp.asarray(advantage, jnp.float32), 0.0), jnp.asarray(group)
  tokens = jnp.sum(jnp.asarray(mask) & valid[:, None], axis=1).astype(jnp.float32)
  positive, length = advantage > 0, over_rollouts(tokens, rollout)

  def total(x):
    return jax.ops.segment_sum(jnp.where(once, x, 0.0).astype(jnp.float32), group, n)[group]

  low = jax.ops.segment_min(jnp.where(positive, length, jnp.inf), group, n)[group]
  high = jax.ops.segment_max(jnp.where(positive, length, -jnp.inf), group, n)[group]
  low, high = jnp.where(positive, low, 0.0), jnp.where(positive, high, 0.0)
  weight = floor + (1 - floor) * (1 - (length - low) / (high - low + eps)) ** power
  mass = jnp.where(positive, advantage, 0.0)
  active = positive & (total(positive) >= share * total(jnp.ones(n)))
  weighed = jnp.where(positive, weight * advantage, 0.0)
  return jnp.where(active, weighed * total(mass) / (total(weighed) + eps * 1e-3), advantage)


def anchor_groups(
  observations: Sequence[Sequence[str]],
  group: Sequence[int],
  *,
  turns: int,
  same: Callable[[str, str], bool] = str.__eq__,
) -> Int[np.ndarray, "N S"]:
  """Numbers the states in which rollouts acted: equal number, same task and same observation. On the host.

  For a batch, or for one group at a time: across groups the numbers mean nothing. `observations[n][s]` is what the
  policy saw before turn s; -1 where a rollout has no such turn. `same(a, b)` compares with the first observation of a
  bucket, for example by `difflib.SequenceMatcher(None, a, b).ratio() >= 0.95`.
  ValueError: a rollout with more than `turns` observations; lists of different lengths.
  """
  if len(observations) != len(group):
    raise ValueError(f"group must have one entry per rollout, {len(observations)}, got {len(group)}")
  anchor = np.full((len(observations), turns), -1, np.int32)
  buckets: list[tuple[int, str]] = []
  for n, (texts, g) in enumerate(zip(observations, group)):
    if len(texts) > turns:
      raise ValueError(f"rollout {n} has {len(texts)} observations, the batch holds {turns} turns")
    for s, text in enumerate(texts):
      found = (i for i, (owner, seen) in enumerate(buckets) if owner == g and same(text, seen))
      anchor[n, s] = next(found, len(buckets))
      if anchor[n, s] == len(buckets):
        buckets.append((g, text))
  return anchor


def step_relative(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  anchor: Int[Array, "N S"],
  group: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 0.95,
  ddof: int = 0,
  eps: float = 1e-6,
) -> Float[Array, "N T"]:
  """(G_s - mean) / (std + eps) among the steps taken in the same anchor state, G_s the discounted return of the step.

  The same state is an equal `anchor` in the same `group`: any numbers from 0 that tell apart the states of a group
  (`anchor_groups`, or a hash), -1 for none. A state met once, or with equal returns, gives 0.
  Source: Feng et al. 2025, arXiv 2505.10978 (GiGPO). Ours differs: population std (ddof=1 is the authors' code).
  """
  m, places = _steps(reward, turn_reward, anchor, group, mask, turn, valid, rollout, gamma, ddof)
  return at_tokens(jnp.where(places & m.differs, m.centered / (m.std + eps), 0.0), *_acting(mask, turn, valid))


def step_centered(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  anchor: Int[Array, "N S"],
  group: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 0.95,
) -> Float[Array, "N T"]:
  """G_s - mean among the steps taken in the same anchor state: `step_relative` without the std ("mean_norm")."""
  m, places = _steps(reward, turn_reward, anchor, group, mask, turn, valid, rollout, gamma, 0)
  return at_tokens(jnp.where(places & m.differs, m.centered, 0.0), *_acting(mask, turn, valid))


def add_step_advantage(
  advantage: Float[Array, "N"] | Float[Array, "N T"],
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  anchor: Int[Array, "N S"],
  group: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  step: Callable[..., Float[Array, "N T"]] = step_relative,
  weight: float = 1.0,
  gamma: float = 0.95,
) -> Float[Array, "N T"]:
  """A = A_episode + weight A_step on action tokens; `step` is `step_relative` or `step_centered`.

  Source: Feng et al. 2025, arXiv 2505.10978 (GiGPO); weight and gamma from memory of its code.
  """
  check_shapes(mask=(mask, "N T"), advantage=(advantage, "N T" if jnp.ndim(advantage) == 2 else "N"))
  steps = step(reward, turn_reward, anchor, group, mask, turn, valid=valid, rollout=rollout, gamma=gamma)
  return jnp.where(jnp.asarray(mask), lift(jnp.asarray(advantage, jnp.float32), mask) + weight * steps, 0.0)


def team_relative(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  rollout: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  scale_eps: float = 1e-6,
) -> Float[Array, "N"]:
  """`group_relative` with a team (the rows of one `rollout`) as one member: one advantage for every agent's tokens.

  With a token-mean loss a verbose agent weighs more; `team_relative_per_agent` gives each agent the same weight.
  ValueError, on concrete arrays: agents of one team with different rewards.
  Source: TeamGym (2026). Reconstruction: the paper's text was not available.
  """
  n = check_shapes(reward=(reward, "N"), rollout=(rollout, "N"), valid=(valid, "N"))["N"]
  if concrete(reward, rollout, valid):
    check_ids("rollout", rollout, n)
    _check_one_reward(np.asarray(reward), np.asarray(rollout), np.ones(n, bool) if valid is None else np.asarray(valid))
  return group_relative(reward, group, valid=valid, rollout=rollout, scale_eps=scale_eps)


def team_relative_per_agent(
  reward: Float[Array, "N"],
  group: Int[Array, "N"],
  rollout: Int[Array, "N"],
  agent: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  scale_eps: float = 1e-6,
) -> Float[Array, "N T"]:
  """`team_relative` times (team's tokens) / (agents x agent's tokens): each agent of a team weighs the same.

  The factor's mean over the team's tokens is 1. Agents without a token are not counted. For a token-mean loss.
  Source: TeamGym (2026). Reconstruction: the paper's text was not available; per-agent weighting is our reading.
  """
  n = check_shapes(mask=(mask, "N T"), reward=(reward, "N"), agent=(agent, "N"), valid=(valid, "N"))["N"]
  advantage = team_relative(reward, group, rollout, valid=valid, scale_eps=scale_eps)
  mask = jnp.asarray(mask, bool) if valid is None else jnp.asarray(mask, bool) & jnp.asarray(valid)[:, None]
  rollout, agent = jnp.asarray(rollout), jnp.asarray(agent)
  same_team = rollout[:, None] == rollout
  same_agent = same_team & (agent[:, None] == agent)
  tokens = jnp.sum(mask, axis=1)
  own = jnp.sum(jnp.where(same_agent, tokens, 0), axis=1)
  counted = (own > 0) & (jnp.argmax(same_agent, axis=1) == jnp.arange(n))
  agents = jnp.sum(same_team & counted, axis=1)
  factor = jnp.sum(jnp.where(same_team, tokens, 0), axis=1) / jnp.maximum(agents * own, 1)
  return jnp.where(mask, (advantage * factor)[:, None], 0.0)


def _log_probs(logp, mask, group, valid):
  """Sum of log pi and number of action tokens of each row's group."""
  n = check_shapes(mask=(mask, "N T"), logp_rollout=(logp, "N T"), group=(group, "N"), valid=(valid, "N"))["N"]
  check_ids("group", group, n)
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
  kept = jnp.asarray(mask, bool) & valid[:, None]
  sums = jnp.sum(jnp.where(kept, jnp.asarray(logp, jnp.float32), 0.0), axis=1)
  total = jax.ops.segment_sum(sums, group, n)[group]
  return total, jax.ops.segment_sum(jnp.sum(kept, axis=1).astype(jnp.float32), group, n)[group], valid


def _regimes(advantage, entropy, low, high):
  advantage = jnp.asarray(advantage, jnp.float32)
  check_shapes(advantage=(advantage, "N T" if advantage.ndim == 2 else "N"), group_entropy=(entropy, "N"))

  def row(x):
    x = jnp.broadcast_to(jnp.asarray(x, jnp.float32), advantage.shape[:1])
    return x[:, None] if advantage.ndim == 2 else x

  entropy = row(entropy)
  return (advantage > 0) & (entropy < row(low)), (advantage < 0) & (entropy > row(high)), advantage


def _acting(mask, turn, valid):
  mask = jnp.asarray(mask, bool)
  return (mask if valid is None else mask & jnp.asarray(valid)[:, None]), jnp.asarray(turn)


def _steps(reward, turn_reward, anchor, group, mask, turn, valid, rollout, gamma, ddof):
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), turn_reward=(turn_reward, "N S"), anchor=(anchor, "N S"),
    reward=(reward, "N"), group=(group, "N"), valid=(valid, "N"),
  )  # fmt: skip
  n, turns = sizes["N"], sizes["S"]
  check_ids("group", group, n)
  mask, turn = _acting(mask, turn, valid)
  places = turn_places(mask, turn, turns) & (jnp.asarray(anchor) >= 0)
  reward = jnp.where(jnp.any(mask, axis=1), jnp.asarray(reward, jnp.float32), 0.0)
  returns = turn_returns(reward, turn_reward, mask, turn, rollout=rollout, gamma=gamma)
  return moments(returns, _pair_ids(group, anchor), places, n * turns, ddof=ddof), places


def _pair_ids(group: Int[Array, "N"], anchor: Int[Array, "N S"]) -> Int[Array, "N S"]:
  """Equal numbers in [0, N S) for equal (group, anchor): the rank among the pairs, whatever range anchors come in."""
  anchor = jnp.asarray(anchor)
  group, flat = jnp.broadcast_to(jnp.asarray(group)[:, None], anchor.shape).reshape(-1), anchor.reshape(-1)
  order = jnp.lexsort((flat, group))
  new = jnp.any(jnp.diff(jnp.stack([group, flat])[:, order]) != 0, axis=0)
  rank = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(new)])
  return jnp.zeros(flat.shape, int).at[order].set(rank).reshape(anchor.shape)


def _check_one_reward(reward, rollout, valid):
  for team in np.unique(rollout[valid]):
    rewards = reward[valid & (rollout == team)]
    if np.ptp(rewards) > 0:
      raise ValueError(
        f"the agents of team {team} have rewards {rewards.min():g}..{rewards.max():g}; give every agent the team's"
      )
