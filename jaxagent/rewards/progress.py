"""Rewards for progress: contracts over a graph of stages, and potentials that leave the optimal policy alone.

`potential [N, S+1]` holds Phi of the state at the start and after each turn, so turn s leads from column s to s + 1;
places past the rollout's last turn may hold anything. Two uses, not to be confused: `progress_rewards` pays for the end
state (Tev; it changes what is optimal), `add_potential_shaping` cannot.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.segments import over_rollouts, turn_places
from jaxagent.checks import check_ids, check_range, check_shapes, concrete


def all_prerequisites(prerequisite: Bool[np.ndarray, "V V"]) -> Bool[np.ndarray, "V V"]:
  """[v, u]: u is a direct or indirect prerequisite of v. On the host.

  ValueError: a stage that depends on itself.
  """
  direct = np.asarray(prerequisite, bool)
  check_shapes(prerequisite=(direct, "V V"))
  closure = direct
  for _ in range(max(1, len(direct)).bit_length()):
    closure = closure | (closure.astype(int) @ closure.astype(int) > 0)
  if closure.diagonal().any():
    stage = int(np.flatnonzero(closure.diagonal())[0])
    raise ValueError(f"prerequisite must be acyclic, but stage {stage} depends on itself")
  return closure


def contract_progress(
  scores: Float[Array, "... V"], weight: Float[Array, "V"], prerequisites: Bool[Array, "V V"]
) -> Float[Array, "..."]:
  """Phi = sum_v w_v min(c_v, min over the prerequisites u of v of c_u), in [0, 1].

  `scores` c_v in [0, 1], weights >= 0 with sum 1, `prerequisites[v, u]` from `all_prerequisites`: a stage counts no
  more than the least finished stage before it.
  Source: Hu et al. 2026 (Tev), the progress contract. Ours differs: nothing.
  """
  scores, weight = jnp.asarray(scores, jnp.float32), jnp.asarray(weight, jnp.float32)
  check_shapes(weight=(weight, "V"), prerequisites=(prerequisites, "V V"))
  if scores.shape[-1:] != weight.shape:
    raise ValueError(f"scores must have one entry per stage last, {weight.shape[0]}, got shape {list(scores.shape)}")
  check_range("scores", scores, 0, 1)
  check_range("weight", weight, 0, 1)
  total = float(np.sum(np.asarray(weight))) if concrete(weight) else 1.0
  if abs(total - 1) > 1e-4:
    raise ValueError(f"weight must sum to 1, got {total:g}")
  before = jnp.min(jnp.where(jnp.asarray(prerequisites), scores[..., None, :], jnp.inf), axis=-1)
  return jnp.sum(weight * jnp.minimum(scores, before), axis=-1)


def progress_return(
  outcome: Float[Array, "N"], progress: Float[Array, "N"], *, weight: float = 0.25
) -> Float[Array, "N"]:
  """R = 1[pass] + weight Phi(end): 1 + weight for a pass, less than weight for a failure.

  Source: Hu et al. 2026 (Tev). Not policy-invariant, on purpose: it tells apart the failures of a group.
  """
  check_shapes(outcome=(outcome, "N"), progress=(progress, "N"))
  check_range("progress", progress, 0, 1)
  return jnp.asarray(outcome, jnp.float32) + weight * jnp.asarray(progress, jnp.float32)


def progress_rewards(
  potential: Float[Array, "N S1"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  weight: float = 0.25,
) -> Float[Array, "N S"]:
  """r_s = weight (Phi after turn s - Phi before): negative for a regression.

  Their sum is weight (Phi(end) - Phi(start)). A turn reward, beside the outcome as the reward; `turn_relative` makes
  advantages of the two. A truncated rollout is paid for the state it leaves. Phi in [0, 1], and Phi(start) = 0 by
  Tev's anchor gate.
  Source: Hu et al. 2026 (Tev). Ours differs: nothing.
  """
  here = _turns(potential, mask, turn)
  _check_potential(potential, here)
  before, after = _clean(potential, here)
  return jnp.where(here, weight * (after - before), 0.0)


def shaping_term(
  before: Float[Array, "..."], after: Float[Array, "..."], terminal: Bool[Array, "..."], *, gamma: float = 1.0
) -> Float[Array, "..."]:
  """F = gamma Phi(s') - Phi(s), with Phi := 0 at a terminal s'. Then Q' = Q - Phi(s), whatever Phi is.

  gamma must be the learner's own. Clipping F, or keeping only improvements, loses the invariance.
  Source: Ng, Harada & Russell 1999; the terminal correction is Grzes 2017.
  """
  return gamma * jnp.where(jnp.asarray(terminal), 0.0, after) - jnp.asarray(before)


def add_potential_shaping(
  turn_reward: Float[Array, "N S"],
  potential: Float[Array, "N S1"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 1.0,
) -> Float[Array, "N S"]:
  """turn_reward + gamma Phi(s') - Phi(s), with Phi := 0 after the rollout's last turn: for Monte-Carlo returns.

  Every end counts as terminal, a truncated one too: without a critic an agent would gain by stalling at high Phi.
  The return-to-go from a state becomes G - Phi(s), a baseline; over a whole rollout only -Phi(start) remains, which a
  group baseline removes. A potential may change with time or with the sub-goal: evaluate each state once, under the
  sub-goal that holds when the policy acts from it, and use that number on both sides (as these columns do).
  `rollout`: the rows of a rollout go on from one another, for returns over all of them (`turn_returns`). Without it
  each row ends for itself, as for `reward_to_go` and for the agents of a team, whose potentials do not join up.
  Source: Hounwanou et al. 2026, arXiv 2608.18008; Ng et al. 1999; Grzes 2017; Devlin & Kudenko 2012. Ours differs:
  nothing.
  """
  return _shaped(turn_reward, potential, mask, turn, rollout, None, gamma)


def add_potential_shaping_bootstrapped(
  turn_reward: Float[Array, "N S"],
  potential: Float[Array, "N S1"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  truncated: Bool[Array, "N"],
  *,
  rollout: Int[Array, "N"] | None = None,
  gamma: float = 1.0,
) -> Float[Array, "N S"]:
  """`add_potential_shaping` for a critic: a truncated rollout keeps Phi of its last state, since its value follows.

  The critic then learns V - Phi, which is what `bootstrap` must hold.
  """
  return _shaped(turn_reward, potential, mask, turn, rollout, truncated, gamma)


def last_known(potential: Float[Array, "N S1"]) -> Float[Array, "N S1"]:
  """NaN (a score that did not parse) replaced by the one before it, 0 at the start: then F = (gamma - 1) Phi there."""
  potential = jnp.asarray(potential, jnp.float32)
  check_shapes(potential=(potential, "N S1"))
  known = jnp.where(jnp.isnan(potential), -1, jnp.arange(potential.shape[1]))
  place = jax.lax.cummax(known, axis=1)
  return jnp.where(place < 0, 0.0, jnp.take_along_axis(potential, jnp.maximum(place, 0), 1))


def _shaped(turn_reward, potential, mask, turn, rollout, truncated, gamma):
  check_shapes(
    mask=(mask, "N T"), turn_reward=(turn_reward, "N S"), rollout=(rollout, "N"), truncated=(truncated, "N")
  )
  here = _turns(potential, mask, turn)
  check_shapes(turn_reward=(turn_reward, "N S"), potential=(here, "N S"))
  exists = over_rollouts(here.astype(jnp.int32), rollout) > 0
  later = jnp.flip(jnp.cumsum(jnp.flip(exists, 1), axis=1), 1) > exists
  terminal = here & ~later
  if truncated is not None:
    terminal &= ~jnp.asarray(truncated)[:, None]
  before, after = _clean(potential, here)
  term = shaping_term(before, after, terminal, gamma=gamma)
  return jnp.asarray(turn_reward, jnp.float32) + jnp.where(here, term, 0.0)


def _turns(potential, mask, turn):
  sizes = check_shapes(mask=(mask, "N T"), turn=(turn, "N T"), potential=(potential, "N S1"))
  turns = sizes["S1"] - 1
  check_ids("turn", turn, turns, where=mask)
  return turn_places(jnp.asarray(mask, bool), jnp.asarray(turn), turns)


def _clean(potential, here):
  potential = jnp.asarray(potential, jnp.float32)
  return jnp.where(here, potential[:, :-1], 0.0), jnp.where(here, potential[:, 1:], 0.0)


def _check_potential(potential, here):
  if concrete(potential, here):
    check_range("potential", np.asarray(potential)[:, :-1], 0, 1, where=here)
    check_range("potential", np.asarray(potential)[:, 1:], 0, 1, where=here)
