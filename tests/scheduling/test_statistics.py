import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.scheduling import (
  beta_posterior,
  expected_variance,
  mean_reward,
  no_statistics,
  posterior_deviation,
  reward_variance,
  statistics_at,
  update_statistics,
)

JITTED, AT = jax.jit(update_statistics), jax.jit(statistics_at)


def by_loops(events, tasks, d=0.98):
  """Sums over the whole history, seen from the newest version of each task."""
  out = np.zeros((4, tasks))
  newest = np.zeros(tasks, int)
  for task, _, version, _ in events:
    newest[task] = max(newest[task], version)
  for task, reward, version, ok in events:
    out[:, task] += d ** (newest[task] - version) * np.array([ok, ok * reward, ok * reward**2, not ok])
  return out, newest


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_updates_equal_the_whole_history_in_any_order(seed):
  rng = np.random.default_rng(seed)
  task, version = rng.integers(0, 4, 12), rng.integers(0, 30, 12)
  reward, valid = rng.random(12).astype(np.float32), rng.random(12) < 0.8
  want, newest = by_loops(list(zip(task, reward.astype(float), version, valid)), 4)
  for order in (np.arange(12), rng.permutation(12)):
    state = no_statistics(4)
    for part in order.reshape(2, 6):
      spoilt = np.where(valid, reward, np.nan)[part]
      state = JITTED(state, task[part], spoilt, version[part], valid=valid[part])
    assert_allclose([state.count, state.total, state.square, state.failed], want, rtol=1e-4, atol=1e-5)
    assert_array_equal(state.version, newest)


def test_mean_and_variance():
  reward = np.array([0, 0.5, 1, 1], np.float32)
  state = JITTED(no_statistics(2), np.zeros(4, int), reward, np.ones(4, int))
  assert_allclose(mean_reward(state), [0.625, np.nan])
  assert_allclose(reward_variance(state), [np.var(reward), np.nan], rtol=1e-6)


def test_a_rollout_in_several_rows_counts_once():
  rows = dict(rollout=np.array([0, 0, 1]), valid=np.array([False, True, True]))
  state = JITTED(no_statistics(1), np.zeros(3, int), np.ones(3), np.zeros(3, int), **rows)
  assert state.count[0] == 2 and state.total[0] == 2 and state.failed[0] == 0


def test_forgetting_brings_back_a_task_that_always_failed():
  state = JITTED(no_statistics(1), np.zeros(64, int), np.zeros(64), np.zeros(64, int))
  old, new = (beta_posterior(AT(state, v)) for v in (0, 300))
  for measure in (expected_variance, posterior_deviation):
    assert measure(*new) > 5 * measure(*old)
  never = beta_posterior(AT(state, 300, discount=1.0))
  assert_allclose(expected_variance(*never), expected_variance(*old), rtol=1e-6)


def test_seen_from_the_past_nothing_changes():
  state = JITTED(no_statistics(1), np.zeros(1, int), np.ones(1), np.full(1, 9))
  assert AT(state, 5).count[0] == 1 and AT(state, 5).version[0] == 9


@pytest.mark.parametrize(
  "changed, said",
  [
    (dict(task=np.array([0, 2])), "task must hold ids in .0, 2., got 2 at index 1"),
    (dict(reward=np.array([0.0, 1.5])), "reward must lie in .0, 1., got 1.5 at index 1"),
    (dict(reward=np.array([0.0, np.nan])), "reward must lie in"),
    (dict(version=np.zeros(3, int)), "version must have shape"),
  ],
)
def test_errors(changed, said):
  with pytest.raises(ValueError, match=said):
    update_statistics(
      no_statistics(2), **{"task": np.zeros(2, int), "reward": np.zeros(2), "version": np.zeros(2, int), **changed}
    )
