import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.scheduling import (
  diverse_batch,
  environment_quota,
  exploring_batch,
  lift_quota,
  mixed_groups,
  mixed_share,
  uniform_batch,
  weighted_batch,
)

SCORE = np.array([0.9, 0.88, 0.86, 0.6, 0.55, 0.3], np.float32)  # a1 a2 a3 b1 b2 c1
ENV = np.array([0, 0, 0, 1, 1, 2])
SIMILARITY = np.where(ENV[:, None] == ENV, 0.9, 0.1).astype(np.float32)
QUOTA = np.full(3, 2)
GREEDY = jax.jit(diverse_batch, static_argnames="size")
EVERY = np.ones(6, bool)
LIFT = jax.jit(lift_quota)
MIXED = jax.jit(mixed_groups)


@jax.jit
def explore_four(key, score, available, explore, temperature):
  settings = dict(size=4, available=available, explore=explore, temperature=temperature)
  return exploring_batch(key, score, SIMILARITY, ENV, QUOTA, **settings).task


def test_greedy_golden():
  out = GREEDY(SCORE, SIMILARITY, ENV, QUOTA, size=4)
  assert_array_equal(out.task, [0, 3, 1, 5])
  assert_allclose(out.gain, [0.9, 0.55, 0.43, 0.25], rtol=1e-5)
  assert_array_equal(GREEDY(SCORE, SIMILARITY, ENV, QUOTA, size=4, penalty=0.0).task, [0, 1, 3, 4])


def greedy_by_loops(score, similarity, env, quota, available, size):
  chosen, left = [], list(quota)
  for _ in range(size):
    gain = {i: score[i] - 0.5 * max((similarity[i, j] for j in chosen), default=0.0)
            for i in range(len(score)) if available[i] and i not in chosen and left[env[i]] > 0}  # fmt: skip
    best = max(gain, key=lambda i: (gain[i], -i)) if gain else -1
    if best >= 0:
      chosen.append(best)
      left[env[best]] -= 1
  return chosen + [-1] * (size - len(chosen))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_greedy_equals_loops_and_never_chooses_twice(seed):
  rng = np.random.default_rng(seed)
  score, env = rng.choice([0.125, 0.25, 0.375, 0.5], 8).astype(np.float32), rng.integers(0, 3, 8)
  similarity = rng.choice([0.0, 0.25, 0.5], (8, 8)).astype(np.float32)
  similarity = np.maximum(similarity, similarity.T)
  quota, available = rng.integers(0, 4, 3), rng.random(8) < 0.8
  task = GREEDY(score, similarity, env, quota, size=4, available=available).task
  assert_array_equal(task, greedy_by_loops(score, similarity, env, quota, available, 4))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), explore=st.sampled_from([0.0, 0.5, 1.0]))
def test_exploring_keeps_quota_and_availability(seed, explore):
  available = np.array([1, 1, 0, 1, 1, 1], bool)
  task = np.asarray(explore_four(jax.random.key(seed), SCORE, available, explore, 0.0))
  assert len(set(task)) == 4 and available[task].all() and (np.bincount(ENV[task], minlength=3) <= QUOTA).all()
  if explore == 0:
    assert_array_equal(task, GREEDY(SCORE, SIMILARITY, ENV, QUOTA, size=4, available=available).task)


def test_exploring_starves_no_task():
  drawn = [explore_four(jax.random.key(s), SCORE, EVERY, 0.05, 0.0) for s in range(300)]
  assert set(np.stack(drawn).flat) == set(range(6))  # a3 and b2 have no other way in
  assert_array_equal(drawn[7], explore_four(jax.random.key(7), SCORE, EVERY, 0.05, 0.0))


def test_temperature_breaks_ties():
  tied = np.zeros(6, np.float32)
  assert {int(explore_four(jax.random.key(s), tied, EVERY, 0.0, 1.0)[0]) for s in range(100)} == set(range(6))


def test_quota():
  available = np.ones(6, bool)
  assert_array_equal(environment_quota(ENV, available, envs=4, size=4), [2, 2, 2, 0])
  assert_array_equal(environment_quota(ENV, available, envs=4, size=6), [3, 3, 3, 0])
  assert_array_equal(environment_quota(ENV, ENV == 0, envs=4, size=3), [5, 0, 0, 0])
  assert_array_equal(lift_quota(np.array([1, 0, 1]), ENV, available, size=4), [2, 1, 1])
  assert_array_equal(lift_quota(np.array([1, 1, 1]), ENV, available, size=6), [3, 2, 1])
  assert_array_equal(lift_quota(np.array([9, 9, 9]), ENV, available, size=6), [9, 9, 9])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_lifted_quota_is_always_enough(seed):
  rng = np.random.default_rng(seed)
  env, available = rng.integers(0, 3, 8), rng.random(8) < 0.7
  quota = np.asarray(LIFT(rng.integers(0, 3, 3), env, available, size=min(4, available.sum())))
  assert np.minimum(quota, np.bincount(env[available], minlength=3)).sum() >= min(4, available.sum())


def test_uniform_draws_every_subset_equally_often():
  available = np.array([1, 0, 1, 1, 1], bool)
  draw = jax.jit(jax.vmap(lambda key: uniform_batch(key, available, size=2)))
  task = np.sort(np.asarray(draw(jax.random.split(jax.random.key(0), 6000))), axis=1)
  pairs, counts = np.unique(task, axis=0, return_counts=True)
  assert len(pairs) == 6 and not (pairs == 1).any() and np.abs(counts - 1000).max() < 150


def test_weighted_draws_in_proportion_and_never_at_zero():
  weight = np.array([1.0, 3.0, 0.0, 4.0])
  draw = jax.jit(jax.vmap(lambda key: weighted_batch(key, weight, size=1)[0]))
  share = np.bincount(np.asarray(draw(jax.random.split(jax.random.key(1), 8000))), minlength=4) / 8000
  assert_allclose(share, weight / 8, atol=0.02)


def test_dynamic_sampling_golden():
  outcome = np.array([1, 1, 0, 0, 1, 0, np.nan, 0.35, 0.35], np.float32)
  group = np.array([5, 5, 2, 2, 7, 7, 7, 1, 1])
  valid = np.isfinite(outcome)
  keep = mixed_groups(outcome, group, valid=valid)
  assert_array_equal(keep, [0, 0, 0, 0, 1, 1, 0, 0, 0])
  assert mixed_share(keep, group, valid) == 0.25


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_dynamic_sampling_equals_counting_successes(seed):
  rng = np.random.default_rng(seed)
  outcome, group = rng.integers(0, 2, 10).astype(np.float32), rng.integers(0, 10, 10)
  valid = rng.random(10) < 0.8
  right = [sum(outcome[j] for j in range(10) if valid[j] and group[j] == g) for g in group]
  size = [sum(valid[j] and group[j] == g for j in range(10)) for g in group]
  want = [v and 0 < r < n for v, r, n in zip(valid, right, size)]
  assert_array_equal(MIXED(outcome, group, valid=valid), want)


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: uniform_batch(jax.random.key(0), np.array([1, 0], bool), size=2), "a batch of 2 needs .* got 1"),
    (lambda: diverse_batch(SCORE, SIMILARITY, ENV, np.ones(3, int), size=4), "quotas allow 3 tasks .* has 4"),
    (lambda: diverse_batch(SCORE, SIMILARITY, ENV, QUOTA[:2], size=2), "env must hold ids"),
    (lambda: diverse_batch(SCORE, SIMILARITY[:3], ENV, QUOTA, size=2), "similarity must have shape"),
    (lambda: lift_quota(QUOTA, ENV, np.zeros(6, bool), size=1), "needs as many available"),
    (lambda: mixed_groups(np.zeros(2), np.array([0, 2])), "group must hold ids"),
  ],
)
def test_errors(call, said):
  with pytest.raises(ValueError, match=said):
    call()
