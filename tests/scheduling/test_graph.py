import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.scheduling import (
  TaskStatistics,
  beta_posterior,
  expected_variance,
  mixed_probability,
  neighbour_weights,
  posterior_deviation,
  propagate,
  recency_bonus,
  solve_rate_spread,
  task_score,
  task_similarity,
  tool_jaccard,
)

SIMILAR = jax.jit(task_similarity, static_argnames="neighbours")
PROPAGATE = jax.jit(propagate, static_argnames="hops")
MEASURES = jax.jit(
  lambda a, b: (
    expected_variance(a, b), posterior_deviation(a, b), mixed_probability(a, b, group_size=4),
    mixed_probability(a, b, group_size=16),
  )
)  # fmt: skip


def statistics(*successes_failures):
  s, f = (jnp.asarray(x, jnp.float32) for x in zip(*successes_failures))
  return TaskStatistics(s + f, s, s, jnp.zeros_like(s), jnp.zeros(len(s), int))


@pytest.mark.parametrize(
  "s, f, rate, variance, mixed, deviation",  # G = 8, prior Beta(1, 1)
  [
    (0, 0, 0.5, 0.166667, 0.777778, 0.288675),
    (8, 0, 0.9, 0.081818, 0.470547, 0.090453),
    (4, 4, 0.5, 0.227273, 0.959276, 0.150756),
    (1, 7, 0.2, 0.145455, 0.734924, 0.120605),
    (16, 16, 0.5, 0.242857, 0.984605, 0.084515),
  ],
)
def test_informativeness_golden(s, f, rate, variance, mixed, deviation):
  a, b = beta_posterior(statistics((s, f)))
  assert_allclose(a / (a + b), [rate], rtol=1e-6)
  assert_allclose(expected_variance(a, b), [variance], rtol=1e-5)
  assert_allclose(mixed_probability(a, b, group_size=8), [mixed], rtol=1e-5)
  assert_allclose(posterior_deviation(a, b), [deviation], rtol=1e-5)
  assert_allclose(task_score(expected_variance(a, b), posterior_deviation(a, b)), [variance + deviation / 2], rtol=1e-5)


def test_cold_task_golden():
  state, weights = statistics((0, 0), (4, 4), (8, 0)), np.array([[0, 0.8, 0.2], [0, 0, 0], [0, 0, 0]])
  a, b = beta_posterior(propagate(state, weights, group_size=8))
  assert_allclose([a[0] - 1, b[0] - 1], [2.4, 1.6], rtol=1e-5)
  assert_allclose(a[0] / (a[0] + b[0]), 0.566667, rtol=1e-5)
  assert_allclose(expected_variance(a, b)[0], 0.210476, rtol=1e-5)
  assert_allclose(mixed_probability(a, b, group_size=8)[0], 0.920213, rtol=1e-5)
  assert_allclose([a[1:], b[1:]], [[5, 9], [5, 1]])  # without neighbours nothing changes


def test_solve_rate_spread_golden():
  assert_allclose(solve_rate_spread(0.540698), 0.548341, rtol=1e-5)
  assert_allclose(solve_rate_spread(np.array([0.0, 1.0])), 0.05, rtol=1e-6)
  with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\]"):
    solve_rate_spread(np.array([1.1]))


def test_mixed_probability_is_that_of_the_beta_binomial():
  p = np.random.default_rng(0).beta(2.5, 1.5, 200_000)
  assert_allclose(mixed_probability(2.5, 1.5, group_size=4), np.mean(1 - p**4 - (1 - p) ** 4), atol=3e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_laws_of_informativeness(seed):
  a, b = np.random.default_rng(seed).uniform(0.5, 50, (2, 6)).astype(np.float32)
  ours, mirrored = MEASURES(a, b), MEASURES(b, a)
  assert_allclose(ours, mirrored, rtol=1e-4, atol=1e-6)
  variance, _, few, many = np.asarray(ours)
  assert (np.asarray(ours) >= 0).all() and (variance <= 0.25).all() and (few <= many).all() and (many <= 1).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_propagation_equals_loops_and_is_bounded(seed):
  rng = np.random.default_rng(seed)
  s, f = rng.integers(0, 9, (2, 5)) * (rng.random(5) < 0.7)
  weights = np.asarray(neighbour_weights(rng.random((5, 5)) * (rng.random((5, 5)) < 0.5)))
  out = PROPAGATE(statistics(*zip(s, f)), weights, group_size=8, share=0.5)
  for i in range(5):
    n = sum(weights[i, j] * (s + f)[j] for j in range(5))
    m = 0.5 * min(n, 8)
    lent = m * sum(weights[i, j] * s[j] for j in range(5)) / n if n else 0
    assert_allclose(out.total[i], s[i] + lent, rtol=1e-4, atol=1e-5)
    assert_allclose(out.count[i], (s + f)[i] + m, rtol=1e-4, atol=1e-5)
  assert (np.asarray(out.total) <= np.asarray(out.count) + 1e-4).all()


def test_two_hops_reach_further():
  state, chain = statistics((0, 0), (0, 0), (8, 0)), np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0.0]])
  assert propagate(state, chain, group_size=8).count[0] == 0
  assert_allclose(propagate(state, chain, group_size=8, hops=2).count[:2], [2, 4])


def similarity_by_loops(feature, env, near, share, k, floor):
  m = len(feature)
  unit = feature / np.maximum(np.linalg.norm(feature, axis=1, keepdims=True), 1e-30)
  full = np.array([[share * near(env[i], env[j]) + (1 - share) * max(unit[i] @ unit[j], 0) for j in range(m)]
                   for i in range(m)])  # fmt: skip
  out = np.zeros((m, m))
  for i in range(m):
    for j in sorted((j for j in range(m) if j != i), key=lambda j: -full[i, j])[:k]:
      if full[i, j] >= floor:
        out[i, j] = out[j, i] = full[i, j]
  return out


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_similarity_equals_loops(seed):
  k, rng = 2, np.random.default_rng(seed)
  feature, env = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)
  feature[0] = 0.0
  tools = rng.random((3, 5)) < 0.5
  jaccard = np.asarray(tool_jaccard(tools))
  for s, near in ((None, lambda a, b: a == b), (jaccard, lambda a, b: jaccard[a, b])):
    out = np.asarray(SIMILAR(feature, env, env_similarity=s, neighbours=k))
    assert_allclose(out, similarity_by_loops(feature, env, near, 0.5, k, 0.2), rtol=1e-4, atol=1e-5)
    assert_array_equal(out, out.T)
    rows = np.asarray(neighbour_weights(out)).sum(1)
    assert_allclose(rows, out.any(1), atol=1e-6)


def test_jaccard():
  tools = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 0]], bool)
  want = [[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
  assert_allclose(tool_jaccard(tools), want, rtol=1e-6)


def test_recency():
  state = statistics((1, 1), (1, 1))
  assert_allclose(recency_bonus(state, np.array(7), coefficient=0.5), 0.5 * np.log(8) * np.ones(2), rtol=1e-6)


def test_errors():
  with pytest.raises(ValueError, match="env must hold ids"):
    task_similarity(np.zeros((2, 3)), np.array([0, 2]), env_similarity=np.eye(2))
  with pytest.raises(ValueError, match="env must have shape"):
    task_similarity(np.zeros((2, 3)), np.zeros(3, int))
  with pytest.raises(ValueError, match="weights must have shape"):
    propagate(statistics((0, 0)), np.zeros((2, 2)), group_size=8)
