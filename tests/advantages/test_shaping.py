import difflib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from ragged import N, S, pick, ragged, turn_lists

from jaxagent.advantages.group import group_relative
from jaxagent.advantages.returns import turn_returns
from jaxagent.advantages.shaping import (
  EntropyThresholds,
  add_step_advantage,
  anchor_groups,
  attenuate_by_entropy,
  attenuated_shares,
  entropy_thresholds,
  favour_short_successes,
  group_entropy,
  group_entropy_per_sequence,
  step_centered,
  step_relative,
  team_relative,
  team_relative_per_agent,
  update_thresholds,
)

seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)
jit_entropy, jit_attenuate = jax.jit(group_entropy), jax.jit(attenuate_by_entropy)
jit_step, jit_centered, jit_teams = jax.jit(step_relative), jax.jit(step_centered), jax.jit(team_relative_per_agent)


# --- group entropy


def test_golden_reimplementation_vector():  # groups of 2, log-probs -1, -2, -3; the first batch seeds
  group, logp = np.repeat(np.arange(3), 2), np.repeat([-1.0, -2, -3], 2)[:, None] * np.ones((6, 4))
  for mask in (np.ones((6, 4), bool), np.arange(4)[None] < np.full((6, 1), 2)):  # half the length: the same
    entropy = group_entropy(logp, mask, group)
    assert_allclose(entropy, np.repeat([1.0, 2, 3], 2))
  state = update_thresholds(entropy_thresholds(), entropy, group)
  assert_allclose([state.low, state.high], [2 - 0.2 * 0.816497, 2 + 0.3 * 0.816497], atol=1e-5)
  assert_allclose([state.low, state.high], [1.837, 2.245], atol=5e-4)
  out = attenuate_by_entropy(np.tile([1.0, -1.0], 3), entropy, state.low, state.high)
  assert_allclose(out, [0.5, -1, 1, -1, 1, -0.2])


def test_golden_four_groups():
  advantage = group_relative(np.array([1.0, 1, 0, 0, 0, 0, 0, 0]), np.zeros(8, int))
  assert_allclose(advantage, [1.73205] * 2 + [-0.57735] * 6, atol=1e-5)
  state = EntropyThresholds(jnp.float32(0.5), jnp.float32(0.7), jnp.int32(3))
  state = update_thresholds(state, np.array([0.2, 0.4, 0.6, 1.0]), np.arange(4))
  assert_allclose([state.low, state.high], [0.4999084, 0.6993874], atol=1e-6)
  seeded = update_thresholds(entropy_thresholds(), np.array([0.2, 0.4, 0.6, 1.0]), np.arange(4))
  assert_allclose([seeded.low, seeded.high], [0.490839, 0.638741], atol=1e-6)
  for entropy, good, bad in ((0.2, 0.866025, -0.57735), (0.4, 0.866025, -0.57735), (0.6, 1.73205, -0.57735),
                             (1.0, 1.73205, -0.115470)):  # fmt: skip
    out = attenuate_by_entropy(advantage, np.full(8, entropy), state.low, state.high)
    assert_allclose(out, [good] * 2 + [bad] * 6, atol=1e-5)
    if entropy == 0.2:
      assert_allclose(np.mean(out), -0.2165, atol=1e-4)


def test_golden_entropy_forms():
  logp = np.array([[-0.1, -0.2, 9], [-0.1, -0.1, -0.1], [-0.3, 9, 9], [-0.2, -0.2, 9]])
  mask, group = logp < 0, np.zeros(4, int)
  assert_allclose(group_entropy(logp, mask, group), np.full(4, 0.1625), rtol=1e-6)
  assert_allclose(group_entropy_per_sequence(logp, mask, group), np.full(4, 0.325), rtol=1e-6)


def test_thresholds_with_one_group_shape_nothing_and_an_empty_batch_changes_nothing():
  entropy = np.full(2, 0.7)
  state = update_thresholds(entropy_thresholds(), entropy, np.zeros(2, int))
  out = attenuate_by_entropy(np.array([1.0, -1]), entropy, state.low, state.high)
  assert_array_equal(out, [1, -1])
  assert_array_equal(update_thresholds(state, entropy * 9, np.zeros(2, int), valid=np.zeros(2, bool)), state)


def test_shares():
  out = attenuated_shares(np.array([1.0, 1, -1, 0]), np.array([0.0, 9, 9, 9]), 1.0, 2.0)
  assert_allclose(list(out.values()), [0.5, 1.0])


@few
@given(seeds)
def test_entropy_equals_a_loop_and_attenuation_keeps_signs(seed):
  batch = ragged(seed)
  logp, mask, group = -np.abs(batch["value"]), batch["mask"], batch["group"]
  out = np.asarray(jit_entropy(logp, mask, group, valid=batch["valid"]))
  for n in range(N):
    tokens = logp[group == group[n]][mask[group == group[n]]]
    assert_allclose(out[n], -tokens.sum() / max(1, len(tokens)), rtol=1e-5)
  advantage = np.random.default_rng(seed).normal(size=N).astype(np.float32)
  shaped = np.asarray(jit_attenuate(advantage, out, 0.5, 0.8))
  assert (np.sign(shaped) == np.sign(advantage)).all() and (np.abs(shaped) <= np.abs(advantage)).all()
  assert_array_equal(shaped[(out >= 0.5) & (out <= 0.8)], advantage[(out >= 0.5) & (out <= 0.8)])


# --- length of successes


def test_golden_length_of_successes():
  mask = np.arange(500)[None] < np.array([100, 300, 500, 200])[:, None]
  out = favour_short_successes(np.array([0.5, 0.5, 0.5, -0.5]), mask, np.zeros(4, int))
  assert_allclose(out, [0.6667, 0.5, 0.3333, -0.5], atol=1e-4)
  few_solved = favour_short_successes(np.array([0.5, 0.5, -0.5, -0.5]), mask, np.zeros(4, int), share=0.75)
  assert_array_equal(few_solved, np.array([0.5, 0.5, -0.5, -0.5], np.float32))


@few
@given(seeds)
def test_lengths_of_rollouts_count_once_and_failures_not_at_all(seed):
  batch = ragged(seed)
  valid, rollout, group = batch["valid"], batch["rollout"], batch["group"]
  advantage = np.random.default_rng(seed).normal(size=N).astype(np.float32)[rollout]
  out = favour_short_successes(
    np.where(valid, advantage, np.nan), batch["mask"], group, valid=valid, rollout=rollout, power=2.0
  )
  want = np.where(valid, advantage, 0).astype(np.float64)
  length = {r: batch["mask"][rollout == r].sum() for r in rollout[valid]}
  for g in set(group[valid]):
    members = sorted(set(rollout[valid & (group == g)]))
    good = [r for r in members if advantage[rollout == r][0] > 0]
    if not good or len(good) < 0.5 * len(members):
      continue
    low, high = min(length[r] for r in good), max(length[r] for r in good)
    weight = {r: 0.5 + 0.5 * (1 - (length[r] - low) / (high - low + 1e-6)) ** 2 for r in good}
    mass = {r: float(advantage[rollout == r][0]) for r in good}
    scale = sum(mass.values()) / sum(weight[r] * mass[r] for r in good)
    for r in good:
      want[valid & (rollout == r)] = weight[r] * mass[r] * scale
  assert_allclose(out, want, rtol=1e-4, atol=1e-6)


@few
@given(seeds)
def test_length_keeps_the_positive_mass(seed):
  batch = ragged(seed)
  advantage = np.random.default_rng(seed).normal(size=N).astype(np.float32)
  out = np.asarray(favour_short_successes(advantage, batch["mask"], batch["group"], share=0.0))
  assert_array_equal(out[advantage <= 0], advantage[advantage <= 0])
  for g in set(batch["group"]):
    rows = (batch["group"] == g) & (advantage > 0)
    assert_allclose(out[rows].sum(), advantage[rows].sum(), rtol=1e-4)


# --- anchor states


GIGPO = dict(
  reward=np.array([1.0, 0.0]), turn_reward=np.zeros((2, 2)), mask=np.ones((2, 2), bool), turn=np.tile([0, 1], (2, 1)),
  anchor=np.array([[0, 1], [0, 2]]), group=np.zeros(2, int),
)  # fmt: skip


def test_golden_gigpo():
  assert_allclose(turn_returns(**pick(GIGPO, "reward", "turn_reward", "mask", "turn"), gamma=0.95)[:, 0], [0.95, 0])
  step = step_relative(**GIGPO, ddof=1)
  assert_allclose(step, [[0.707106, 0], [-0.707106, 0]], atol=1.5e-6)
  total = add_step_advantage(np.array([0.707106, -0.707106]), **GIGPO, step=partial(step_relative, ddof=1))
  assert_allclose(total, [[1.414212, 0.707106], [-1.414212, -0.707106]], atol=2e-6)
  assert_allclose(step_centered(**GIGPO), [[0.475, 0], [-0.475, 0]], atol=1e-6)
  plain = add_step_advantage(np.array([0.5, -0.5]), **GIGPO, step=step_centered)
  assert_allclose(plain, [[0.975, 0.5], [-0.975, -0.5]], atol=1e-6)


def test_anchors_by_equality_and_by_similarity():
  observations = [["a room", "a hall"], ["a room", "a hall!"], ["a room"]]
  assert_array_equal(anchor_groups(observations, [0, 0, 1], turns=3), [[0, 1, -1], [0, 2, -1], [3, -1, -1]])
  similar = anchor_groups(observations, [0, 0, 1], turns=2, same=lambda a, b: difflib.SequenceMatcher(None, a, b).ratio() >= 0.9)  # noqa: E501
  assert_array_equal(similar, [[0, 1], [0, 1], [2, -1]])
  with pytest.raises(ValueError, match="rollout 0 has 2 observations, the batch holds 1"):
    anchor_groups(observations, [0, 0, 1], turns=1)


@few
@given(seeds)
def test_steps_equal_loops(seed):
  batch = ragged(seed, branches=False)
  anchor = np.random.default_rng(seed).integers(-1, 5, (N, S))
  columns = pick(batch, "reward", "turn_reward", "mask", "turn", "valid", "group")
  group = batch["group"]
  returns = np.asarray(turn_returns(**pick(batch, "reward", "turn_reward", "mask", "turn"), gamma=0.9))
  relative = np.asarray(jit_step(**columns, anchor=anchor, gamma=0.9))
  centered = np.asarray(jit_centered(**columns, anchor=anchor, gamma=0.9))
  steps = [(n, k, places) for n in range(N) for k, places in turn_lists(batch, n)]
  for n, k, places in steps:
    same = [(m, j) for m, j, _ in steps if group[m] == group[n] and anchor[m, j] == anchor[n, k] >= 0]
    bucket = np.array([returns[place] for place in same])
    alike = not len(bucket) or np.ptp(bucket) <= 1e-6 * max(1, np.abs(bucket).max())
    want = 0 if alike else returns[n, k] - bucket.mean()
    assert_allclose(centered[n, places], want, atol=1e-5)
    assert_allclose(relative[n, places], 0 if alike else want / (bucket.std() + 1e-6), atol=2e-3)
  assert (relative[~batch["mask"]] == 0).all() and (centered[~batch["mask"]] == 0).all()


@few
@given(seeds)
def test_anchors_may_be_numbered_in_each_group_apart_or_hashed(seed):
  batch, rng = ragged(seed), np.random.default_rng(seed)
  columns = pick(batch, "reward", "turn_reward", "mask", "turn", "valid", "group")
  own = rng.integers(-1, 4, (N, S)).astype(np.int32)
  over_the_batch = np.where(own >= 0, own + 4 * batch["group"][:, None], -1)
  hashed = np.where(own >= 0, rng.integers(0, 2**31 - 1, (N, 4))[batch["group"][:, None], own], -1)
  want = np.asarray(jit_step(**columns, anchor=own))
  for anchor in (over_the_batch, hashed):
    assert_allclose(jit_step(**columns, anchor=anchor.astype(np.int32)), want, atol=1e-6)


def test_equal_anchors_of_two_tasks_are_two_states():
  two = {**GIGPO, "reward": np.array([1.0, 0.0]), "anchor": np.zeros((2, 2), int)}
  assert np.abs(step_relative(**two)).min() > 0
  own = step_relative(**{**two, "group": np.arange(2)})
  assert_allclose(own[1], [0, 0])  # equal returns
  assert own[0, 0] < 0 < own[0, 1]  # the first row's two turns, against each other


# --- teams


def test_a_team_has_one_reward():
  reward, group, team = np.array([1.0, 1, 0, 0]), np.zeros(4, int), np.array([0, 0, 2, 2])
  assert_allclose(team_relative(reward, group, team), [1, 1, -1, -1], atol=1e-5)
  with pytest.raises(ValueError, match="agents of team 0 have rewards"):
    team_relative(np.array([1.0, 0, 0, 0]), group, team)


@few
@given(seeds)
def test_agents_of_a_team_weigh_the_same(seed):
  rng = np.random.default_rng(seed)
  batch = ragged(seed, branches=False)
  team, agent = np.array([0, 0, 0, 3, 3, 3]), np.array([0, 1, 1, 0, 1, 2])
  reward = rng.normal(size=N).astype(np.float32)[team]
  kept, valid = batch["mask"], batch["valid"]
  out = np.asarray(jit_teams(np.where(valid, reward, np.nan), np.zeros(N, int), team, agent, kept, valid=valid))
  base = group_relative(np.where(valid, reward, np.nan), np.zeros(N, int), valid=valid, rollout=team)
  for t in (0, 3):
    a = float(np.max(np.abs(np.asarray(base)[team == t])))
    shares = [np.abs(out[(team == t) & (agent == i)]).sum() for i in range(3)]
    present = [i for i in range(3) if kept[(team == t) & (agent == i)].any()]
    for i in present:  # a third of the team's tokens each, if three speak
      assert_allclose(shares[i], a * kept[team == t].sum() / len(present), rtol=1e-4, atol=1e-5)
  assert (out[~kept] == 0).all()


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: group_entropy(np.zeros((2, 3)), np.ones((2, 3), bool), [0, 2]), r"group must hold ids in \[0, 2\)"),
    (lambda: group_entropy(np.zeros((2, 4)), np.ones((2, 3), bool), [0, 1]), "logp_rollout must have shape"),
    (lambda: update_thresholds(entropy_thresholds(), np.zeros(2), np.array([0, -1])), "group must hold ids"),
    (lambda: attenuate_by_entropy(np.zeros(2), np.zeros(3), 0.0, 1.0), "group_entropy must have shape"),
    (lambda: step_relative(**{**GIGPO, "group": np.full(2, 4)}), r"group must hold ids in \[0, 2\)"),
    (lambda: step_relative(**{**GIGPO, "anchor": np.zeros((2, 3), int)}), "anchor must have shape"),
    (lambda: team_relative(np.zeros(2), np.zeros(2, int), np.array([0, 5])), "rollout must hold ids"),
    (lambda: anchor_groups([["a"]], [0, 1], turns=1), "group must have one entry per rollout"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
