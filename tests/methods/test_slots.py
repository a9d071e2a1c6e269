"""Every advantage and reward fits a slot: its parameters are columns, and it runs inside one jitted `prepare`."""

import inspect
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose
from ragged import N, S, T, ragged

from jaxagent import advantages as adv
from jaxagent import rewards as rew
from jaxagent.losses import ppo_clip, token_mean
from jaxagent.methods import Method, Objective, prepare
from jaxagent.methods.objective import ROLLOUT_COLUMNS
from jaxagent.types import Rollouts

ADVANTAGES = {
  "gae": (adv.gae,),
  "vapo": (adv.length_adaptive_gae,),
  "mpo": (adv.turn_gae, adv.standardize_turns, adv.add_token_credit),
  "mpo multiplicative": (adv.turn_gae, adv.multiply_token_credit),
  "reinforce++": (adv.reward_to_go, adv.standardize_tokens),
  "reinforce++ kl": (adv.reward_to_go_kl, adv.standardize_tokens),
  "reinforce++ baseline": (adv.group_centered, adv.standardize_tokens),
  "bws": (adv.batch_standardized,),
  "tev": (adv.turn_relative,),
  "tev pooled": (adv.turn_relative_pooled,),
  "gdpo": (adv.relative_per_reward,),
  "spo muon": (adv.minus_baseline, adv.add_clipped_penalty, partial(adv.standardize_tokens, ddof=1)),
  "gepo": (adv.group_relative, adv.attenuate_by_entropy),
  "short successes": (adv.leave_one_out, adv.favour_short_successes),
  "gigpo": (adv.group_relative, adv.add_step_advantage),
  "team": (adv.team_relative,),
  "team per agent": (adv.team_relative_per_agent,),
  "draco": (adv.group_relative, adv.redistribute_by_quality),
  "taspo": (adv.group_relative, adv.weigh_by_privileged),
  "cliff": (adv.prefix_suffix,),
}
REWARDS = {
  "t1": rew.assertion_reward,
  "rubric": rew.rubric_reward,
  "when2think": rew.difficulty_bonus,
  "slim searcher": rew.gated_efficiency,
  "otc": rew.least_tool_calls,
  "eapo": rew.solved_tasks_pay_for_tools,
  "cosine": rew.cosine_length,
  "tev": rew.progress_rewards,
  "shaping": rew.add_potential_shaping,
  "shaping with a critic": rew.add_potential_shaping_bootstrapped,
  "scpo": adv.add_step_credit,
}


def columns(rng):
  quality = rng.random((N, S)).astype(np.float32)
  return dict(
    rewards=rng.normal(size=(N, 2)).astype(np.float32), baseline=rng.random(N).astype(np.float32),
    penalties=-rng.random((N, 2)).astype(np.float32), group_entropy=rng.random(N).astype(np.float32),
    entropy_low=np.full(N, 0.3, np.float32), entropy_high=np.full(N, 0.7, np.float32),
    anchor=rng.integers(-1, 4, (N, S)), step_quality=np.where(quality < 0.3, np.nan, quality).astype(np.float32),
    logp_privileged=rng.normal(size=(N, T)).astype(np.float32), first_error=rng.integers(0, T, N),
    assertions_passed=rng.integers(-1, 40, N), verdict=rng.integers(-1, 2, (N, 5)), step_credit=quality,
    reference_accuracy=rng.random(N).astype(np.float32), reference_tokens=rng.integers(0, 20, N).astype(np.float32),
    tool_cost=rng.integers(0, 5, N).astype(np.float32), potential=rng.random((N, S + 1)).astype(np.float32),
  )  # fmt: skip


def rollouts(seed=4):
  rng, b = np.random.default_rng(seed), ragged(seed, branches=False, invalid=False)
  zeros, ids = np.zeros((N, T), np.float32), np.zeros(N, np.int32)
  outcome = (b["rollout"] % 2 == 0).astype(np.float32)
  valid = np.arange(N) != 4
  b["mask"] &= valid[:, None]
  turn_reward = np.where(valid[:, None], b["turn_reward"], np.nan).astype(np.float32)
  return Rollouts(
    tokens=zeros.astype(np.int32), position=np.tile(np.arange(T), (N, 1)), mask=b["mask"], turn=b["turn"],
    length=np.full(N, T), prefix_length=ids, rollout=b["rollout"], agent=np.arange(N), group=ids, env=ids,
    task=ids, outcome=outcome, reward=np.where(valid, outcome, np.nan).astype(np.float32), turn_reward=turn_reward,
    valid=valid, truncated=rng.random(N) < 0.3, temperature=np.ones(N, np.float32), logp_rollout=zeros - 1,
    logp_old=zeros - 1, logp_ref=zeros - 2, value=b["value"], bootstrap=b["bootstrap"], columns=columns(rng),
  )  # fmt: skip


@dataclass(frozen=True)
class Given:
  columns: tuple[str, ...] = tuple(columns(np.random.default_rng(0)))

  async def __call__(self, trajectories, tools):
    return {}


def method(advantage, reward=()):
  return Method(Objective(advantage, ppo_clip, token_mean), reward=reward, annotators=(Given(),))


METHODS = {k: method(v) for k, v in ADVANTAGES.items()} | {
  f"reward {k}": method((adv.turn_relative,), (v,)) for k, v in REWARDS.items()
}


def test_no_hyper_parameter_has_the_name_of_a_column():
  slots = [slot for chain in ADVANTAGES.values() for slot in chain] + list(REWARDS.values())
  for slot in slots:
    for name, parameter in inspect.signature(slot).parameters.items():
      hyper = parameter.default is not parameter.empty and parameter.default is not None
      assert not (hyper and name in ROLLOUT_COLUMNS), f"{slot} would be given the column {name}"


@pytest.mark.slow
def test_all_in_one_jitted_prepare():
  batch = rollouts()
  out = jax.jit(lambda r: {k: prepare(m, r).advantage for k, m in METHODS.items()})(batch)
  for name, advantage in out.items():
    assert advantage.shape == (N, T) and np.isfinite(advantage).all(), name
    assert (np.asarray(advantage)[~batch.mask] == 0).all() and (np.asarray(advantage)[~batch.valid] == 0).all(), name
    assert np.abs(advantage).max() > 0, name


def test_the_same_outside_jit():
  batch = rollouts()
  jitted = jax.jit(lambda r: prepare(METHODS["cliff"], r).advantage)(batch)
  assert_allclose(prepare(METHODS["cliff"], batch).advantage, jitted, atol=1e-5)
