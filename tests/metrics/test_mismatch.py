import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxagent.metrics import (
  chi_square_sequence,
  chi_square_token,
  extreme_share,
  perplexity_ratio,
  rollout_kl_k1,
  rollout_kl_k3,
)

RHO = np.array([[0.3, 0.8, 1.0, 1.7, 6.0]])
GOLDEN = {
  rollout_kl_k1: -0.179054,
  rollout_kl_k3: 0.780946,
  chi_square_token: 7.124,
  extreme_share: 0.4,
  perplexity_ratio: 1 / 1.196086,
  chi_square_sequence: 2.448**2 - 1,
}
LOOPS = {
  rollout_kl_k1: lambda d: np.mean(-d),
  rollout_kl_k3: lambda d: np.mean(np.exp(d) - d - 1),
  chi_square_token: lambda d: np.mean(np.exp(d) ** 2) - 1,
  extreme_share: lambda d: np.mean(np.maximum(np.exp(d), np.exp(-d)) > 2),
  perplexity_ratio: lambda d: np.exp(-np.mean(d)),
}
JITTED = {f: jax.jit(f) for f in GOLDEN}


@pytest.mark.parametrize("function", GOLDEN)
def test_golden(function):
  assert_allclose(function(np.log(RHO), np.zeros((1, 5)), np.ones((1, 5), bool)), GOLDEN[function], rtol=1e-5)


@pytest.mark.parametrize("function", LOOPS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_equals_loops_and_ignores_rubbish(function, seed):
  rng = np.random.default_rng(seed)
  mask, old, new = rng.random((3, 5)) < 0.6, rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
  mask[0, 0] = True
  out = JITTED[function](np.where(mask, old, np.nan), np.where(mask, new, 1e9), mask)
  assert_allclose(out, LOOPS[function]((old - new)[mask]), rtol=1e-4, atol=1e-5)


def test_k3_is_never_negative_k1_may_be():
  one = np.ones((1, 1), bool)
  assert rollout_kl_k1(np.full((1, 1), 1e-3), np.zeros((1, 1)), one) < 0
  assert_allclose(rollout_kl_k3(np.full((1, 1), 1e-3), np.zeros((1, 1)), one), 0.5e-6, rtol=1e-3)


@pytest.mark.parametrize("function", GOLDEN)
def test_no_tokens_and_equal_engines_read_no_gap(function):
  want = 1.0 if function is perplexity_ratio else 0.0
  assert function(np.full((2, 3), np.nan), np.zeros((2, 3)), np.zeros((2, 3), bool)) == want
  x = np.random.default_rng(0).normal(size=(2, 3))
  assert function(x, x, np.ones((2, 3), bool)) == want


def test_sequences_are_logical_rollouts():
  d, mask = np.array([[0.2, 0.1], [0.3, 9.0], [-0.5, 0.0]]), np.array([[1, 1], [1, 0], [1, 1]], bool)
  out = chi_square_sequence(d, np.zeros((3, 2)), mask, rollout=np.array([2, 2, 0]))
  assert_allclose(out, (np.exp(2 * 0.6) + np.exp(-2 * 0.5)) / 2 - 1, rtol=1e-5)
  rows = chi_square_sequence(d, np.zeros((3, 2)), mask)
  assert_allclose(rows, np.mean(np.exp(2 * np.array([0.3, 0.3, -0.5]))) - 1, rtol=1e-5)


@pytest.mark.parametrize("function", GOLDEN)
def test_finite_for_any_gap(function):
  x = np.array([[1e4, -1e4, 300.0, 0.0]])
  assert np.isfinite(function(x, np.zeros((1, 4)), np.ones((1, 4), bool)))


def test_errors():
  with pytest.raises(ValueError, match="logp_rollout must have shape"):
    rollout_kl_k1(np.zeros((2, 3)), np.zeros((2, 2)), np.ones((2, 3), bool))
  with pytest.raises(ValueError, match="rollout must hold ids"):
    chi_square_sequence(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3), bool), rollout=np.array([0, 2]))
