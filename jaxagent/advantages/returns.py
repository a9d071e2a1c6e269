"""Advantages from returns and running baselines, without a critic.

Per-token columns are `[N, T]`, per-turn ones `[N, S]`, results float32. `reward[n]` is received at the end of the
rollout, `turn_reward[n, s]` after turn s; the two add up. Places where `mask` is False may hold anything; rows with
`valid=False` may hold any reward, enter no statistic and get 0. A ValueError names a column whose shape disagrees and,
on concrete arrays, ids out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.checks import check_finite
from jaxagent.advantages.gae import token_rewards
from jaxagent.advantages.group import first_rows, group_relative
from jaxagent.advantages.segments import (
  at_tokens,
  decayed_sum,
  lift,
  moments,
  over_rollouts,
  token_moments,
  turn_places,
)
from jaxagent.checks import check_ids, check_range, check_shapes


def reward_to_go(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  gamma: float = 1.0,
) -> Float[Array, "N T"]:
  """G_t = r_t + gamma G_{t+1} over the row's action tokens; context tokens carry it across and get 0.

  With `standardize_tokens` after it, the advantage of REINFORCE++.
  Source: Hu et al. 2025, arXiv 2501.03262. Ours differs: nothing.
  """
  return _to_go(token_rewards(reward, turn_reward, mask, turn), mask, gamma)


def reward_to_go_kl(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  logp_old: Float[Array, "N T"],
  logp_ref: Float[Array, "N T"],
  *,
  gamma: float = 1.0,
  coefficient: float = 0.01,
) -> Float[Array, "N T"]:
  """`reward_to_go` of r_t - coefficient (log pi_old - log pi_ref): the KL in the reward. Log-probs in nats.

  Source: Hu et al. 2025, arXiv 2501.03262 (REINFORCE++). The coefficient is ours.
  """
  check_shapes(mask=(mask, "N T"), logp_old=(logp_old, "N T"), logp_ref=(logp_ref, "N T"))
  cost = jnp.where(mask, jnp.asarray(logp_old, jnp.float32) - logp_ref, 0.0)
  return _to_go(token_rewards(reward, turn_reward, mask, turn) - coefficient * cost, mask, gamma)


def standardize_tokens(
  advantage: Float[Array, "N"] | Float[Array, "N T"], mask: Bool[Array, "N T"], *, ddof: int = 0, eps: float = 1e-8
) -> Float[Array, "N T"]:
  """(A - mean) / (std + eps) over all action tokens of the batch: their mean is 0 afterwards. Equal ones give 0.

  A rollout counts by its tokens, so a token-mean loss has no residual from lengths that go with advantages.
  After `reward_to_go` it is REINFORCE++, after `group_centered` its baseline variant (arXiv 2501.03262), after
  `minus_baseline` with ddof=1 SPO++ (Ruan et al. 2026, arXiv 2608.24870). Divisor: action tokens - ddof.
  """
  check_shapes(mask=(mask, "N T"), advantage=(advantage, "N T" if jnp.ndim(advantage) == 2 else "N"))
  check_finite("advantage", advantage, where=mask if jnp.ndim(advantage) == 2 else jnp.any(jnp.asarray(mask), axis=1))
  mask = jnp.asarray(mask, bool)
  x = jnp.where(mask, lift(jnp.asarray(advantage, jnp.float32), mask), 0.0)
  m = token_moments(x, mask, ddof=ddof)
  return jnp.where(mask & m.differs, m.centered / (m.std + eps), 0.0)


def batch_standardized(
  reward: Float[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  scale_eps: float = 1e-6,
) -> Float[Array, "N"]:
  """(r - mean) / (std + scale_eps) over the logical rollouts of the whole batch. Equal rewards give 0.

  A task that is always solved keeps a positive advantage: difficulty stays in the baseline.
  Source: When2Think (BWS), arXiv 2609.19671, whose formula we reconstruct: population std, eps ours.
  """
  zeros = jnp.zeros(jnp.shape(reward)[:1], int)
  return group_relative(reward, zeros, valid=valid, rollout=rollout, scale_eps=scale_eps)


def turn_returns(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 1.0,
) -> Float[Array, "N S"]:
  """G_s = r_s + gamma G_{s+1} over the steps of the logical rollout, `reward` after its last one; 0 past that.

  r_s adds up what all rows of the rollout received in step s, and each row gets the same returns: what comes after a
  turn of one agent is the other agents' too. Discounts count steps.
  """
  n, turns = _checked(reward, turn_reward, mask, turn, rollout)
  here = turn_places(mask, turn, turns)
  exists = over_rollouts(here.astype(jnp.float32), rollout) > 0
  alive = jnp.flip(jax.lax.cummax(jnp.flip(exists, 1).astype(jnp.int32), axis=1), 1) > 0
  last = alive & ~jnp.pad(alive[:, 1:], ((0, 0), (0, 1)))
  acted = jnp.any(here, axis=1, keepdims=True)
  received = over_rollouts(jnp.where(acted, jnp.asarray(turn_reward, jnp.float32), 0.0), rollout)
  received += jnp.where(last, jnp.asarray(reward, jnp.float32)[:, None], 0.0)
  return decayed_sum(received, jnp.full((n, turns), gamma, jnp.float32))


def turn_relative(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  group: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 1.0,
  eps: float = 1e-6,
) -> Float[Array, "N T"]:
  """(G_s - mean) / (std + eps) among the group's rollouts that have a turn s, at every action token of the turn.

  A turn index with one rollout alive, or with equal returns, gets 0. A rollout of which several agents act in a step
  counts once there, and each of them gets its number. Later turns have less progress left to make:
  pooled statistics (`turn_relative_pooled`) push them down whatever they did.
  Source: Tev (Hu et al. 2026). The return-to-go is written out by us, as are the population std and eps.
  """
  return _turns_against(reward, turn_reward, group, mask, turn, valid, rollout, gamma, eps, by_index=_own_index)


def turn_relative_pooled(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  group: Int[Array, "N"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 1.0,
  eps: float = 1e-6,
) -> Float[Array, "N T"]:
  """(G_s - mean) / (std + eps) over all turns of the group together: Tev's ablation, see `turn_relative`."""
  return _turns_against(reward, turn_reward, group, mask, turn, valid, rollout, gamma, eps, by_index=_pooled)


def relative_per_reward(
  rewards: Float[Array, "N R"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  weights: tuple[float, ...] | None = None,
  ddof: int = 0,
  scale_eps: float = 1e-4,
) -> Float[Array, "N"]:
  """A = (S - mean) / (std + scale_eps) over the batch, S = sum_r w_r (r - group mean) / (group std + scale_eps).

  Each reward is normalised in its group before the sum, so rewards whose sums coincide stay apart. `weights` are 1 by
  default. ddof=1 is the source's; the default is the population's std, as everywhere here.
  Source: Liu et al. 2026, arXiv 2601.05242 (GDPO). Ours differs: the last step is over rollouts, as in TRL; the
  authors' port whitens over tokens.
  """
  sizes = check_shapes(rewards=(rewards, "N R"), group=(group, "N"), valid=(valid, "N"), rollout=(rollout, "N"))
  n, count = sizes["N"], sizes["R"]
  if weights is not None and len(weights) != count:
    raise ValueError(f"weights must hold one number per reward, {count}, got {len(weights)}")
  valid, rollout = _rows(n, group, valid, rollout)
  check_finite("rewards", rewards, where=valid)
  counted = first_rows(rollout, valid)
  x = jnp.where(valid[:, None], jnp.asarray(rewards, jnp.float32), 0.0)

  def standardized(x, ids):
    m = moments(x, ids, counted, n, ddof=ddof)
    return jnp.where(valid & m.differs, m.centered / (m.std + scale_eps), 0.0)

  each = jax.vmap(standardized, (1, None), 1)(x, jnp.asarray(group))
  summed = jnp.sum(each * jnp.asarray((1.0,) * count if weights is None else weights), axis=1)
  return standardized(summed, jnp.zeros(n, int))


class PromptRates(NamedTuple):
  """Discounted successes and failures of each of P prompts, as of policy version `event`."""

  alpha: Float[Array, "P"]
  beta: Float[Array, "P"]
  event: Int[Array, "P"]


def prompt_rates(
  successes: Float[Array, "P"], trials: Float[Array, "P"], *, mass: float | None = None
) -> PromptRates:
  """alpha = successes + 1/2, beta = failures + 1/2 (Jeffreys) at event 0; scaled to alpha + beta = `mass` if given.

  Source: Ruan et al. 2026, arXiv 2608.24870 (SPO++): 8 offline rollouts per prompt and a total mass of 8 there; whether
  the mass is scaled so, and the half counts, are our reading.
  """
  check_shapes(successes=(successes, "P"), trials=(trials, "P"))
  alpha = jnp.asarray(successes, jnp.float32) + 0.5
  beta = jnp.asarray(trials, jnp.float32) - successes + 0.5
  scale = 1.0 if mass is None else mass / (alpha + beta)
  return PromptRates(alpha * scale, beta * scale, jnp.zeros(alpha.shape, jnp.int32))


def rates_at(rates: PromptRates, event: Int[Array, ""] | Int[Array, "P"], *, rho: float = 0.875) -> PromptRates:
  """The rates as of a later policy version: everything weighs rho per version; alpha / (alpha + beta) stays."""
  event = jnp.broadcast_to(jnp.asarray(event, jnp.int32), rates.event.shape)
  decay = jnp.power(jnp.float32(rho), (event - rates.event).astype(jnp.float32))
  return PromptRates(rates.alpha * decay, rates.beta * decay, event)


def update_rates(
  rates: PromptRates,
  task: Int[Array, "N"],
  outcome: Float[Array, "N"],
  event: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  rho: float = 0.875,
) -> PromptRates:
  """Adds outcomes in [0, 1] of the policy versions `event`: one that is k versions old weighs rho^k.

  The result does not depend on the order in which outcomes arrive, nor on how they are split into updates.
  Source: Ruan et al. 2026, arXiv 2608.24870 (SPO++). Ours differs: nothing.
  """
  n = check_shapes(
    task=(task, "N"), outcome=(outcome, "N"), event=(event, "N"), valid=(valid, "N"), rollout=(rollout, "N")
  )["N"]
  valid, rollout = _rows(n, None, valid, rollout)
  prompts = rates.alpha.shape[0]
  check_ids("task", task, prompts, where=valid)
  check_range("outcome", outcome, 0, 1, where=valid)
  place = jnp.where(first_rows(rollout, valid), task, prompts)
  event = jnp.asarray(event, jnp.int32)
  now = rates.event.at[place].max(event, mode="drop")
  rates = rates_at(rates, now, rho=rho)
  age = jnp.where(valid, now[jnp.clip(task, 0, prompts - 1)] - event, 0).astype(jnp.float32)
  weight = jnp.power(jnp.float32(rho), age)
  won = jnp.where(valid, jnp.asarray(outcome, jnp.float32), 0.0)
  alpha = rates.alpha.at[place].add(weight * won, mode="drop")
  beta = rates.beta.at[place].add(weight * (1 - won), mode="drop")
  return PromptRates(alpha, beta, now)


def success_rate(rates: PromptRates) -> Float[Array, "P"]:
  """v = alpha / (alpha + beta): the baseline, to be read when a rollout is dispatched."""
  return rates.alpha / (rates.alpha + rates.beta)


def minus_baseline(
  reward: Float[Array, "N"], baseline: Float[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Float[Array, "N"]:
  """A = R - v with v frozen at dispatch: one rollout per prompt and no group.

  Source: Ruan et al. 2026, arXiv 2608.24870 (SPO++).
  """
  n = check_shapes(reward=(reward, "N"), baseline=(baseline, "N"), valid=(valid, "N"))["N"]
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid)
  check_finite("reward", reward, where=valid)
  check_finite("baseline", baseline, where=valid)
  return jnp.where(valid, jnp.asarray(reward, jnp.float32) - baseline, 0.0)


def add_clipped_penalty(
  advantage: Float[Array, "N"], penalties: Float[Array, "N R"], *, low: float = -0.25, high: float = 0.25
) -> Float[Array, "N"]:
  """A + clip(sum of the penalties, low, high); penalties are negative numbers. Standardise afterwards.

  Source: Long-Horizon RL Needs Muon (2026). Reconstruction: the paper's text was not available; that the sum is clipped
  (`add_penalties_clipped` clips each) and that a bonus may pass are our reading.
  """
  return _penalized(advantage, penalties, lambda p: jnp.clip(jnp.sum(p, axis=1), low, high))


def add_penalties_clipped(
  advantage: Float[Array, "N"], penalties: Float[Array, "N R"], *, low: float = -0.25, high: float = 0.25
) -> Float[Array, "N"]:
  """A + sum of clip(penalty, low, high): the other reading of `add_clipped_penalty`."""
  return _penalized(advantage, penalties, lambda p: jnp.sum(jnp.clip(p, low, high), axis=1))


def _to_go(received, mask, gamma):
  mask = jnp.asarray(mask, bool)
  return jnp.where(mask, decayed_sum(received, jnp.where(mask, jnp.float32(gamma), 1.0)), 0.0)


def _checked(reward, turn_reward, mask, turn, rollout):
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), reward=(reward, "N"), turn_reward=(turn_reward, "N S"),
    rollout=(rollout, "N"),
  )  # fmt: skip
  check_ids("turn", turn, sizes["S"], where=mask)
  if rollout is not None:
    check_ids("rollout", rollout, sizes["N"])
  return sizes["N"], sizes["S"]


def _rows(n, group, valid, rollout):
  if group is not None:
    check_ids("group", group, n)
  if rollout is not None:
    check_ids("rollout", rollout, n)
  return (
    jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool),
    jnp.arange(n) if rollout is None else jnp.asarray(rollout),
  )


def _own_index(group, turns):
  return group[:, None] * turns + jnp.arange(turns)


def _pooled(group, turns):
  return jnp.broadcast_to(group[:, None], (group.shape[0], turns))


def _turns_against(reward, turn_reward, group, mask, turn, valid, rollout, gamma, eps, *, by_index):
  check_shapes(mask=(mask, "N T"), group=(group, "N"), valid=(valid, "N"))
  n, turns = _checked(reward, turn_reward, mask, turn, rollout)
  valid, rollout = _rows(n, group, valid, rollout)
  check_finite("reward", reward, where=valid)
  check_finite("turn_reward", turn_reward, where=valid)
  mask = jnp.asarray(mask, bool) & valid[:, None]
  reward = jnp.where(valid, jnp.asarray(reward, jnp.float32), 0.0)
  returns = turn_returns(reward, turn_reward, mask, turn, rollout=rollout, gamma=gamma)
  counted = _first_acting(turn_places(mask, turn, turns), rollout)
  m = moments(returns, by_index(jnp.asarray(group), turns), counted, n * turns)
  relative = jnp.where(m.differs, m.centered / (m.std + eps), 0.0)
  return at_tokens(relative, mask, jnp.asarray(turn))


def _first_acting(here, rollout):
  """`here` of the first row of each logical rollout that acts in the step."""
  n = here.shape[0]
  row = jnp.arange(n)[:, None]
  return here & (row == jax.ops.segment_min(jnp.where(here, row, n), rollout, n)[rollout])


def _penalized(advantage, penalties, clipped):
  check_shapes(advantage=(advantage, "N"), penalties=(penalties, "N R"))
  return jnp.asarray(advantage, jnp.float32) + clipped(jnp.asarray(penalties, jnp.float32))
