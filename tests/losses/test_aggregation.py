from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxagent.losses import constant, sequence_mean, sequence_sum, token_mean

ROLLOUT = {
  "token_mean": lambda keep, rollout: token_mean(keep),
  "sequence_mean": sequence_mean,
  "sequence_sum": sequence_sum,
  "constant": partial(constant, max_tokens=8),
}
JITTED = {name: jax.jit(f) for name, f in ROLLOUT.items()}
GOLDEN = {"token_mean": 3.0, "sequence_mean": 2.5, "sequence_sum": 9.0, "constant": 1.125}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):  # losses [1, 1] and [4, 4, 4, 4]
  keep = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
  loss = np.array([[1, 1, 99, 99], [4, 4, 4, 4]])
  assert_allclose(np.sum(ROLLOUT[name](keep, np.arange(2)) * loss), GOLDEN[name], rtol=1e-6)


def by_loops(name, keep, rollout):
  out = np.zeros(keep.shape)
  rows_of = {r: [i for i in range(len(keep)) if rollout[i] == r] for r in set(rollout)}
  tokens = {r: sum(keep[i].sum() for i in rows) for r, rows in rows_of.items()}
  count = sum(n > 0 for n in tokens.values())
  for i in range(len(keep)):
    n = tokens[rollout[i]]
    if n:
      per_token = {"token_mean": sum(tokens.values()), "sequence_mean": count * n, "sequence_sum": count}
      out[i] = keep[i] / per_token.get(name, count * 8)
  return out


@pytest.mark.parametrize("name", GOLDEN)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), density=st.floats(0, 1))
def test_equals_loops_with_branches_and_empty_rollouts(name, seed, density):
  rng = np.random.default_rng(seed)
  keep, rollout = rng.random((7, 5)) < density, rng.integers(0, 7, 7)
  assert_allclose(JITTED[name](keep, rollout), by_loops(name, keep, rollout), rtol=1e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_kept_gives_zeros(name):
  assert_allclose(ROLLOUT[name](jnp.zeros((3, 4), bool), jnp.arange(3)), np.zeros((3, 4)))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_means_have_weights_that_sum_to_one(name):
  rng = np.random.default_rng(0)
  assert_allclose(np.sum(ROLLOUT[name](rng.random((9, 6)) < 0.5, rng.integers(0, 9, 9))), 1.0, rtol=1e-6)


def test_splitting_a_rollout_into_branches_changes_no_other_rollout():
  keep, rollout = np.ones((3, 4), bool), np.array([0, 1, 2])
  cut = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
  for name in GOLDEN:
    whole, parts = ROLLOUT[name](keep, rollout), ROLLOUT[name](cut, np.array([0, 0, 1, 2]))
    assert_allclose(parts[2:], whole[1:], rtol=1e-6)
    assert_allclose(parts[:2].sum(), whole[0].sum(), rtol=1e-6)
