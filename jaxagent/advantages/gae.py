"""Advantages from a critic: generalised advantage estimation over tokens and over turns.

Everything per token is `[N, T]`. `value[:, t]` is the critic's value of the state before token t and `bootstrap [N]`
that of the state after the last token (None or 0: the episode ended there). `turn_reward[n, s]` is received after the
last action token of turn s, `reward[n]` after the last action token of the row; the two add up. Context tokens are
skipped: they carry value and advantage across and get 0. Places where `mask` is False may hold anything. Each row is a
stream of its own. A ValueError names a column whose shape disagrees and, on concrete arrays, a turn without a column in
`turn_reward` and a reward that is not finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.checks import check_finite
from jaxagent.advantages.segments import (
  Turns,
  at_tokens,
  decayed_sum,
  find_turns,
  from_first,
  lift,
  take,
  token_moments,
  turn_max,
  turn_mean,
  turn_places,
)
from jaxagent.checks import check_ids, check_shapes, concrete


def token_rewards(
  reward: Float[Array, "N"], turn_reward: Float[Array, "N S"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"]
) -> Float[Array, "N T"]:
  """What is received after each action token: `turn_reward` after a turn's last one, `reward` after the row's last one.

  A turn without an action token in the row hands its reward to the turn before it, so that none is lost.
  """
  _checked(reward, turn_reward, mask, turn)
  return _rewards(reward, turn_reward, turn, find_turns(mask, turn))


def gae(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  lam: float | Float[Array, "N"] = 0.95,
) -> Float[Array, "N T"]:
  """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, over action tokens.

  `lam` is a number or one per row. With gamma = lam = 1 it is the return minus the value (T1).
  Source: Schulman et al. 2016, arXiv 1506.02438. Ours differs: nothing; context tokens are skipped as in verl.
  """
  turns, value, after, bootstrap = _states(reward, turn_reward, value, mask, turn, bootstrap)
  check_shapes(reward=(reward, "N"), lam=(lam if jnp.ndim(lam) else None, "N"))
  received = _rewards(reward, turn_reward, turn, turns)
  delta = jnp.where(turns.mask, received + gamma * after - value, 0.0)
  decay = lift(jnp.broadcast_to(jnp.asarray(gamma * lam, jnp.float32), bootstrap.shape), mask)
  return jnp.where(turns.mask, decayed_sum(delta, jnp.where(turns.mask, decay, 1.0)), 0.0)


def adaptive_lam(mask: Bool[Array, "N T"], *, alpha: float = 0.05) -> Float[Array, "N"]:
  """lam = max(0, 1 - 1 / (alpha l)), l the row's action tokens: the sum of lam^t grows like alpha l.

  Source: Yue et al. 2025, arXiv 2504.05118 (VAPO). Ours differs: rows of at most 1 / alpha tokens have lam 0.
  """
  return jnp.maximum(0.0, 1 - 1 / (alpha * jnp.maximum(jnp.sum(jnp.asarray(mask), axis=1), 1)))


def length_adaptive_gae(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  alpha: float = 0.05,
) -> Float[Array, "N T"]:
  """GAE with `adaptive_lam` of each row: the policy's half of VAPO's decoupled GAE; `value_targets` is the critic's.

  Source: Yue et al. 2025, arXiv 2504.05118 (VAPO). Ours differs: nothing.
  """
  check_shapes(reward=(reward, "N"), mask=(mask, "N T"))
  lam = adaptive_lam(mask, alpha=alpha)
  return gae(reward, turn_reward, value, mask, turn, bootstrap=bootstrap, gamma=gamma, lam=lam)


def value_targets(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  lam: float = 1.0,
) -> Float[Array, "N T"]:
  """A_t + V_t with the critic's own lam: what the value of each action token is to become; 0 off actions.

  With lam = 1 it is the Monte-Carlo return, whatever the values.
  Source: Yuan et al. 2025, arXiv 2503.01491 (VC-PPO: decoupled GAE). Ours differs: nothing.
  """
  advantage = gae(reward, turn_reward, value, mask, turn, bootstrap=bootstrap, gamma=gamma, lam=lam)
  return advantage + jnp.where(jnp.asarray(mask), jnp.asarray(value), 0.0)


def turn_gae(
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  lam: float = 0.8,
) -> Float[Array, "N T"]:
  """A_k = delta_k + gamma lam A_{k+1}, delta_k = r_k + gamma V_{k+1} - V_k, at every action token of turn k.

  V_k is the value before the turn's first action token. Discount and lam count turns, not tokens.
  Source: MPO (Multiscale Policy Optimization), lam = 0.8. Reconstruction: the paper's text was not available; gamma is
  our choice.
  """
  turns, value, after, _ = _states(reward, turn_reward, value, mask, turn, bootstrap)
  received = _rewards(reward, turn_reward, turn, turns)
  gain = jnp.where(turns.last, received + gamma * after, 0.0) - jnp.where(turns.first, value, 0.0)
  return from_first(decayed_sum(gain, jnp.where(turns.last, gamma * lam, 1.0)), turns)


def standardize_turns(
  advantage: Float[Array, "N T"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"], *, eps: float = 1e-6
) -> Float[Array, "N T"]:
  """(A_k - mean) / (std + eps) over the turns of the batch, each counted once whatever its length; equal ones give 0.

  `advantage` must be one number per turn. Before token credit is added, so that its mean over a turn survives.
  Source: MPO (Multiscale Policy Optimization). Reconstruction: the paper's text was not available; this step is ours.
  """
  check_shapes(advantage=(advantage, "N T"), mask=(mask, "N T"), turn=(turn, "N T"))
  turns = find_turns(mask, turn)
  x = jnp.where(turns.mask, jnp.asarray(advantage, jnp.float32), 0.0)
  m = token_moments(x, turns.first)
  return jnp.where(turns.mask & m.differs, m.centered / (m.std + eps), 0.0)


def add_token_credit(
  advantage: Float[Array, "N T"],
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  gamma_token: float = 1.0,
  lam: float = 0.95,
  strength: float = 1.0,
) -> Float[Array, "N T"]:
  """A_k + strength (a_t - mean of a over the turn), a the GAE inside the turn: the mean over a turn stays A_k.

  The sign of a token may differ from its turn's.
  Source: MPO (Multiscale Policy Optimization), with lam 0.95 and strength 1. Reconstruction: the paper's text was not
  available; the additive form, gamma and gamma_token are our choices, `multiply_token_credit` is another reading.
  """
  turns, credit = _credit(reward, turn_reward, value, mask, turn, bootstrap, gamma, gamma_token, lam)
  advantage = _per_turn(advantage, turns)
  return jnp.where(turns.mask, advantage + strength * (credit - turn_mean(credit, turns)), 0.0)


def multiply_token_credit(
  advantage: Float[Array, "N T"],
  reward: Float[Array, "N"],
  turn_reward: Float[Array, "N S"],
  value: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  bootstrap: Float[Array, "N"] | None = None,
  gamma: float = 1.0,
  gamma_token: float = 1.0,
  lam: float = 0.95,
  strength: float = 1.0,
  eps: float = 1e-6,
) -> Float[Array, "N T"]:
  """A_k n_k softmax_t(strength sign(A_k) a_t / (std of a over the turn + eps)): mean and sign of the turn stay.

  Source: MPO (Multiscale Policy Optimization). Reconstruction: the paper's text was not available; this is the second
  reading of "mean-preserving", see `add_token_credit`.
  """
  turns, credit = _credit(reward, turn_reward, value, mask, turn, bootstrap, gamma, gamma_token, lam)
  advantage = _per_turn(advantage, turns)
  centered = jnp.where(turns.mask, credit - turn_mean(credit, turns), 0.0)
  variance = turn_mean(centered**2, turns)
  std = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
  logit = strength * jnp.sign(advantage) * centered / (std + eps)
  odds = jnp.exp(jnp.where(turns.mask, logit - turn_max(logit, turns), 0.0))
  share = odds / jnp.maximum(turn_mean(odds, turns), 1e-30)
  return jnp.where(turns.mask, advantage * share, 0.0)


def value_share_between_turns(
  value: Float[Array, "N T"], mask: Bool[Array, "N T"], turn: Int[Array, "N T"]
) -> Float[Array, ""]:
  """eta^2 = sum_k n_k (mean of turn k - mean)^2 / sum_t (V_t - mean)^2 over the batch's action tokens, in [0, 1].

  NaN where the values do not vary. How much of the critic's variance a turn-level baseline can use.
  Source: MPO's diagnostic (the paper reports 0.895 in its setting). Reconstruction: the paper's text was not available.
  """
  check_shapes(mask=(mask, "N T"), value=(value, "N T"), turn=(turn, "N T"))
  turns = find_turns(mask, turn)
  m = token_moments(jnp.where(turns.mask, jnp.asarray(value, jnp.float32), 0.0), turns.mask)
  between = jnp.sum(jnp.where(turns.mask, turn_mean(m.centered, turns) ** 2, 0.0))
  total = jnp.sum(jnp.where(turns.mask, m.centered**2, 0.0))
  return jnp.where(m.differs, between / jnp.where(m.differs, total, 1.0), jnp.nan)


def _checked(reward, turn_reward, mask, turn, **more):
  sizes = check_shapes(
    mask=(mask, "N T"), turn=(turn, "N T"), reward=(reward, "N"), turn_reward=(turn_reward, "N S"), **more
  )
  check_ids("turn", turn, sizes["S"], where=mask)
  if concrete(mask):
    acting = np.asarray(mask).any(axis=1)
    check_finite("reward", reward, where=acting)
    check_finite("turn_reward", turn_reward, where=acting)


def _rewards(reward, turn_reward, turn, turns: Turns):
  """See `token_rewards`; a turn's reward goes to the last turn up to it that has an action token."""
  count = turn_reward.shape[1]
  present = turn_places(turns.mask, turn, count)
  owner = jax.lax.cummax(jnp.where(present, jnp.arange(count), -1), axis=1)
  row = jnp.arange(turn_reward.shape[0])[:, None]
  owned = jnp.zeros((*turn_reward.shape[:1], count + 1)).at[row, owner].add(jnp.asarray(turn_reward, jnp.float32))
  end = turns.mask & (turns.following == turn.shape[1])
  at_end = jnp.where(end, jnp.asarray(reward, jnp.float32)[:, None], 0.0)
  return jnp.where(turns.last, at_tokens(owned[:, :count], turns.mask, turn), 0.0) + at_end


def _states(reward, turn_reward, value, mask, turn, bootstrap):
  """Turns, the value before each action token and before the next one (`bootstrap` after the last)."""
  _checked(reward, turn_reward, mask, turn, value=(value, "N T"), bootstrap=(bootstrap, "N"))
  turns = find_turns(mask, turn)
  value = jnp.where(turns.mask, jnp.asarray(value, jnp.float32), 0.0)
  bootstrap = jnp.zeros(mask.shape[0]) if bootstrap is None else jnp.asarray(bootstrap, jnp.float32)
  bootstrap = jnp.where(jnp.any(turns.mask, axis=1), bootstrap, 0.0)
  return turns, value, take(value, turns.following, bootstrap[:, None]), bootstrap


def _credit(reward, turn_reward, value, mask, turn, bootstrap, gamma, gamma_token, lam):
  """GAE over the tokens of one turn; it ends at the turn's last action token."""
  turns, value, after, _ = _states(reward, turn_reward, value, mask, turn, bootstrap)
  received = _rewards(reward, turn_reward, turn, turns)
  delta = received + jnp.where(turns.last, gamma, gamma_token) * after - value
  inside = jnp.where(turns.mask, gamma_token * lam, 1.0)
  credit = decayed_sum(jnp.where(turns.mask, delta, 0.0), jnp.where(turns.last, 0.0, inside))
  return turns, jnp.where(turns.mask, credit, 0.0)


def _per_turn(advantage, turns: Turns):
  check_shapes(mask=(turns.mask, "N T"), advantage=(advantage, "N T"))
  return jnp.where(turns.mask, jnp.asarray(advantage, jnp.float32), 0.0)
