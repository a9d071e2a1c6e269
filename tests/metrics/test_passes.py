from itertools import combinations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.metrics import pass_at_k, pass_hat_k, success_counts

AT, HAT = jax.jit(pass_at_k, static_argnames="k"), jax.jit(pass_hat_k, static_argnames="k")
GOLDEN = [  # n, c, k, pass@k, pass^k
  (10, 3, 1, 0.3, 0.3),
  (10, 3, 5, 0.916667, 0),
  (10, 3, 8, 1, 0),
  (5, 1, 3, 0.6, 0),
  (8, 6, 4, 1, 0.214286),
  (4, 0, 2, 0, 0),
  (4, 4, 4, 1, 1),
  (4, 1, 4, 1, 0),  # with replacement it would be 0.684
]


@pytest.mark.parametrize("n, c, k, at, hat", GOLDEN)
def test_golden(n, c, k, at, hat):
  assert_allclose(pass_at_k(n, c, k=k), at, rtol=1e-5)
  assert_allclose(pass_hat_k(n, c, k=k), hat, rtol=1e-5)


def test_equal_counting_all_draws():
  n, k = 6, 3
  draws = list(combinations(range(n), k))
  for c in range(n + 1):
    assert_allclose(AT(n, c, k=k), np.mean([any(i < c for i in d) for d in draws]), rtol=1e-6)
    assert_allclose(HAT(n, c, k=k), np.mean([all(i < c for i in d) for d in draws]), atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.sampled_from([1, 7]))
def test_laws(seed, k):
  rng = np.random.default_rng(seed)
  n = rng.integers(k, 2000, 5)
  c = (rng.random(5) * (n + 1)).astype(int)
  at, hat = np.asarray(AT(n, c, k=k)), np.asarray(HAT(n, c, k=k))
  assert_allclose(at, 1 - np.asarray(HAT(n, n - c, k=k)), atol=1e-6)  # not all of them fail
  assert (hat <= c / n + 1e-5).all() and (at >= c / n - 1e-5).all()


def test_mean_over_random_outcomes_is_unbiased():
  rng, p, n, k = np.random.default_rng(0), 0.2, 8, 4
  c = rng.binomial(n, p, 40_000)
  assert_allclose(np.mean(pass_at_k(np.full(c.shape, n), c, k=k)), 1 - (1 - p) ** k, atol=5e-3)
  assert_allclose(np.mean(pass_hat_k(np.full(c.shape, n), c, k=k)), p**k, atol=1e-3)


def test_counts_by_group_once_per_rollout_without_failures():
  success = np.array([1, 1, 0, 1, 0, 1], bool)
  group, rollout = np.array([0, 0, 0, 4, 4, 4]), np.array([0, 0, 1, 2, 3, 4])
  samples, correct = success_counts(success, group, rollout=rollout, valid=np.array([1, 1, 1, 1, 1, 0], bool))
  assert_array_equal(samples, [2, 0, 0, 0, 2, 0])
  assert_array_equal(correct, [1, 0, 0, 0, 1, 0])


@pytest.mark.parametrize(
  "n, c, k, said",
  [([4, 2], [1, 1], 3, "k is 3 but a task has only 2"), ([4], [5], 1, "got 5 of 4"), ([4], [1], 0, "at least 1"),
   ([4, 4], [1], 1, "correct must have shape")],
)  # fmt: skip
def test_errors(n, c, k, said):
  for f in (pass_at_k, pass_hat_k):
    with pytest.raises(ValueError, match=said):
      f(np.array(n), np.array(c), k=k)


def test_undefined_is_nan_under_jit():
  out = jax.jit(lambda n, c: pass_at_k(n, c, k=3))(np.array([2, 4]), np.array([1, 4]))
  assert np.isnan(out[0]) and out[1] == 1
