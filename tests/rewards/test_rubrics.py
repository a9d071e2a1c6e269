import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.advantages import group_relative
from jaxagent.rewards.rubrics import discriminative, rubric_reward, step_quality, unanimous

N, C, S = 6, 5, 4
seeds = st.integers(0, 10_000)
jit_reward, jit_quality = jax.jit(rubric_reward), jax.jit(step_quality)


def verdicts_of(passes_and_fails):
  """Each rollout's first criteria fail, the next pass; a last rollout fails everything, so that all are kept."""
  return np.array([[-1] * f + [1] * p + [0] * (5 - p - f) for p, f in passes_and_fails])


def test_golden_group():  # criteria failed by someone: the third rollout fails all five
  verdict, group = verdicts_of([(2, 3), (1, 4), (0, 5), (0, 0)]), np.zeros(4, int)
  reward = rubric_reward(verdict, group)
  assert_allclose(reward, [-0.2, -0.6, -1, 0], atol=1e-6)
  assert_allclose(group_relative(reward, group), [0.650945, -0.390567, -1.432078, 1.1717], atol=1e-5)
  sample = (np.asarray(reward) - np.mean(reward)) / np.std(reward, ddof=1)
  assert_allclose(sample, [0.563735, -0.338241, -1.240216, 1.014722], atol=1e-5)


def test_golden_e6():  # the paper's E.6: five criteria with the turns that they cite; each failed by a sibling
  verdict = np.array([[-1, -1, -1, 1, 1], [-1] * 5])
  cites = [{4, 6}, {5, 6}, {3, 4, 5}, {5}, {1, 2, 3, 4, 5, 6}]
  citation = np.zeros((2, 5, 7), bool)
  for c, turns in enumerate(cites):
    citation[0, c, [t - 1 for t in turns]] = True
  assert_allclose(rubric_reward(verdict, np.zeros(2, int))[0], -0.2, atol=1e-6)
  quality = np.asarray(step_quality(verdict, citation, np.zeros(2, int)))
  assert_allclose(quality[0], [1, 1, 0.5, 1 / 3, 0.5, 1 / 3, np.nan], atol=1e-6)
  assert np.isnan(quality[1]).all()


def test_criteria_that_nobody_failed_are_dropped():
  verdict, group = np.array([[1, 1, 0], [1, -1, 0], [-1, 1, 0]]), np.array([0, 0, 1])
  assert_array_equal(discriminative(verdict, group), [[0, 1, 0], [0, 1, 0], [1, 0, 0]])
  assert_allclose(rubric_reward(verdict, group), [1, -1, -1])


def test_a_failed_rollout_drops_no_criterion():
  verdict, group = np.array([[1, 1], [1, -1]]), np.zeros(2, int)
  keep = discriminative(verdict, group, valid=np.array([True, False]))
  assert not np.asarray(keep).any()


def test_unanimous():
  verdicts = np.array([[[1, 1, 0, 0, -1]], [[1, 1, 0, -1, 1]], [[1, 0, 0, 0, 1]]])
  assert_array_equal(unanimous(verdicts), [[1, 0, 0, -1, -1]])


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_equals_loops(seed):
  rng = np.random.default_rng(seed)
  verdict, group = rng.integers(-1, 2, (N, C)), rng.integers(0, 3, N)
  citation, valid = rng.random((N, C, S)) < 0.3, rng.random(N) < 0.8
  reward = np.asarray(jit_reward(verdict, group, valid=valid))
  quality = np.asarray(jit_quality(verdict, citation, group, valid=valid))
  assert ((reward >= -1) & (reward <= 1)).all()
  for n in range(N):
    kept = [c for c in range(C) if any(verdict[m, c] < 0 for m in range(N) if group[m] == group[n] and valid[m])]
    p, f = (sum(verdict[n, c] == v for c in kept) for v in (1, -1))
    assert_allclose(reward[n], (p - f) / max(p + f, 1), atol=1e-6)
    for s in range(S):
      cited = [verdict[n, c] for c in kept if citation[n, c, s] and verdict[n, c]]
      assert_allclose(quality[n, s], np.mean([v > 0 for v in cited]) if cited else np.nan, atol=1e-6)
  p = rng.permutation(N)
  assert_allclose(jit_reward(verdict[p], group[p], valid=valid[p]), reward[p])


def test_the_reward_is_an_affine_map_of_the_pass_rate():  # R = 2x - 1: the same advantages
  verdict, group = verdicts_of([(2, 3), (1, 4), (4, 1), (0, 5)]), np.zeros(4, int)
  rate = np.array([0.4, 0.2, 0.8, 0.0])
  assert_allclose(group_relative(rubric_reward(verdict, group), group), group_relative(rate, group), atol=1e-4)


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: rubric_reward(np.array([[2]]), [0]), r"verdict must lie in \[-1, 1\]"),
    (lambda: rubric_reward(np.array([[1]]), [1]), "group must hold ids"),
    (lambda: rubric_reward(np.array([1]), [0]), "verdict must have shape"),
    (lambda: step_quality(np.ones((1, 2), int), np.ones((1, 3, 4), bool), [0]), "citation must have shape"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
