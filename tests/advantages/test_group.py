import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.advantages import group_centered, group_relative, leave_one_out

FUNCTIONS = [group_relative, group_centered, leave_one_out]
JITTED = {f: jax.jit(f) for f in FUNCTIONS}

GOLDEN = [  # worked by hand; group_relative with the population's standard deviation
  (group_relative, [1, 0, 0, 1], [0.999998, -0.999998, -0.999998, 0.999998]),
  (group_relative, [1, 0, 0, 0, 0, 0], [2.236062, *[-0.4472124] * 5]),
  (group_centered, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
  (group_centered, [2.0, 1.0, 0.0], [1, 0, -1]),
  (leave_one_out, [2.0, 1.0, 0.0], [1.5, 0, -1.5]),
  (leave_one_out, [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
]


@pytest.mark.parametrize("function, reward, want", GOLDEN)
def test_golden(function, reward, want):
  assert_allclose(function(np.array(reward), np.zeros(len(reward), int)), want, atol=1e-6)


def test_half_rewards_in_an_integer_array_are_not_rounded():  # integer rewards become floats, never the reverse
  out = group_centered(np.array([1, 0]), np.array([0, 0]))
  assert out.dtype == jnp.float32 and list(out) == [0.5, -0.5]


@pytest.mark.parametrize("offset", [20.0, 1e3, 2.0**14, -(2.0**16)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_constant_added_to_all_rewards_changes_nothing(function, offset):
  reward = np.random.default_rng(0).integers(-200, 200, 48) / 64  # so that reward + offset is exact in float32
  group = np.arange(48) % 3
  shifted = np.asarray(function((reward + offset).astype(np.float32), group))
  assert_allclose(shifted, function(reward.astype(np.float32), group), atol=5e-6)
  assert_allclose(np.bincount(group, shifted), 0, atol=2e-5)


def by_loops(function, reward, group, valid, rollout):
  out = np.zeros(len(reward))
  for g in set(group):
    rows = [i for i in range(len(reward)) if group[i] == g and valid[i]]
    once = {rollout[i]: float(reward[i]) for i in reversed(rows)}
    r = np.array(list(once.values()))
    if len(r) < 2 or r.max() - r.min() <= 1e-6 * max(1, np.abs(r).max()):
      continue
    scale = {group_relative: 1 / (r.std() + 1e-6), group_centered: 1, leave_one_out: len(r) / (len(r) - 1)}[function]
    out[rows] = (reward[rows] - r.mean()) * scale
  return out


@st.composite
def batches(draw):
  """Ragged groups in any order, branches that share their reward, invalid rows with NaN."""
  n = draw(st.sampled_from([1, 5, 12]))
  ids = st.integers(0, n - 1)
  rollout = np.array(draw(st.lists(ids, min_size=n, max_size=n)))
  group = np.array(draw(st.lists(ids, min_size=n, max_size=n)))[rollout]
  rewards = st.sampled_from([0.0, 1.0, 0.35, -2.5, 100.0])
  reward = np.array(draw(st.lists(rewards, min_size=n, max_size=n)), np.float32)[rollout]
  valid = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
  return np.where(valid, reward, np.nan).astype(np.float32), group, valid, rollout


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=30, deadline=None)
@given(batch=batches(), seed=st.integers(0, 9))
def test_equals_loops_and_permutes_with_the_batch(function, batch, seed):
  reward, group, valid, rollout = batch
  f = JITTED[function]
  out = np.asarray(f(reward, group, valid=valid, rollout=rollout))
  assert_allclose(out, by_loops(function, reward, group, valid, rollout), atol=2e-5, rtol=1e-5)
  assert (out[~valid] == 0).all()
  p = np.random.default_rng(seed).permutation(len(reward))
  shuffled = f(reward[p], group[p], valid=valid[p], rollout=rollout[p])
  assert_allclose(shuffled, out[p], atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(function, size):
  for value in (0.35, 0.1, 1 / 3, 1e-4, 1e6 + 0.1, 0.0):
    out = JITTED[function](np.full(size, value, np.float32), np.zeros(size, int))
    assert_array_equal(out, np.zeros(size))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rewards_that_differ_by_rounding_are_equal(function):
  reward = np.array([0.1 + 0.25, 0.35, np.float32(0.35) * np.float32(1.0000001)], np.float32)
  assert_array_equal(function(reward, np.zeros(3, int)), np.zeros(3))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_branches_count_once(function):
  alone = function(np.array([1.0, 0.0, 0.0]), np.zeros(3, int))
  branched = function(np.array([1.0, 1.0, 1.0, 0.0, 0.0]), np.zeros(5, int), rollout=np.array([0, 0, 0, 1, 2]))
  assert_allclose(branched, alone[np.array([0, 0, 0, 1, 2])], rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_failed_rollout_is_not_a_reward_of_zero(function):
  reward, group = np.array([1.0, 0.5, np.nan]), np.zeros(3, int)
  out = function(reward, group, valid=np.array([True, True, False]))
  assert_allclose(out, [*function(reward[:2], group[:2]), 0.0], rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_same_under_jit(function):
  rng = np.random.default_rng(0)
  args = rng.normal(size=16).astype(np.float32), rng.integers(0, 4, 16)
  assert_allclose(jax.jit(function)(*args), function(*args), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  "arguments, said",
  [
    (dict(group=np.zeros(2, int)), "group must have one entry per row"),
    (dict(group=np.array([0, 3, 0])), "group must hold ids in .0, 3., got 0..3"),
    (dict(group=np.array([0, -1, 0])), "renumber"),
    (dict(valid=np.ones((3, 1), bool)), "valid must have one entry per row"),
    (dict(reward=np.array([1.0, np.nan, 0.0])), "reward is nan in row 1"),
  ],
)
def test_bad_input_is_named(arguments, said):
  with pytest.raises(ValueError, match=said):
    group_relative(**{"reward": np.array([1.0, 0.0, 0.0]), "group": np.zeros(3, int), **arguments})
