"""Corrections of the sampler beyond one token: turns, sequences, geometric means, vetoes, normalised weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses import (
  binary_kl,
  binary_kl_within,
  geometric_importance_within,
  geometric_truncated_importance,
  importance_within,
  mean_one,
  normalised_sequence_importance,
  normalised_truncated_importance,
  not_vetoed,
  off_policy_within,
  sequence_importance_within,
  sequence_mean_one,
  sequence_truncated_importance,
  truncated_importance,
  turn_importance_within,
  turn_truncated_importance,
)

RHO = np.log([[0.3, 0.8, 1.0, 1.7, 6.0]]).astype(np.float32)
ZERO, ALL, ONE = np.zeros_like(RHO), np.ones((1, 5), bool), np.zeros(1, int)
SEQUENCE = [
  sequence_truncated_importance,
  sequence_importance_within,
  geometric_truncated_importance,
  geometric_importance_within,
  not_vetoed,
]
TURN = [turn_truncated_importance, turn_importance_within]
JITTED = {f: jax.jit(f) for f in (*SEQUENCE, *TURN)}


def test_golden():
  whole = RHO, ZERO, ALL, ONE
  assert_allclose(np.clip(np.exp(RHO), 0, 2), truncated_importance(RHO, ZERO), rtol=1e-6)  # TIS [0, 2]
  want = [[0.258621, 0.689655, 0.862069, 1.465517, 1.724138]]
  assert_allclose(normalised_truncated_importance(RHO, ZERO, ALL), want, rtol=2e-6)
  assert_allclose(JITTED[sequence_truncated_importance](*whole, cap=9.0), [2.448], rtol=1e-6)
  assert_allclose(JITTED[sequence_truncated_importance](*whole), [2.0])
  assert_allclose(JITTED[geometric_truncated_importance](*whole), [1.196086], rtol=1e-6)
  assert_array_equal(importance_within(RHO, ZERO), [[0, 1, 1, 1, 0]])
  assert_allclose(truncated_importance(np.log([[0.02]]), np.log([[0.01]])), [[2.0]], rtol=1e-6)


@pytest.mark.parametrize(
  "p, q, forth, back, icepop", [(0.02, 0.002, 0.0282, 0.0136, False), (0.5, 0.1, 0.5108, 0.3681, True)]
)
def test_binary_kl_golden(p, q, forth, back, icepop):  # the band of ratios decides the other way round
  p, q = np.log([[p]]), np.log([[q]])
  assert_allclose(binary_kl(p, q), [[forth]], atol=5e-5)
  assert_allclose(binary_kl(q, p), [[back]], atol=5e-5)
  assert importance_within(p, q, low=0.5, high=5.001)[0, 0] == icepop
  assert binary_kl_within(p, q)[0, 0] != icepop
  assert binary_kl_within(p, q, threshold=1.0)[0, 0]


def test_binary_kl_of_certain_and_impossible_tokens_is_finite():
  x = np.array([[0.0, -1e4, 0.0, -1e4]])
  y = np.array([[-1e4, 0.0, 0.0, -1e4]])
  assert np.isfinite(binary_kl(x, y)).all() and (np.asarray(binary_kl(x, y))[0, 2:] == 0).all()


REFERENCE = {  # of the log ratios of the unit, and whether the place itself is masked in
  sequence_truncated_importance: lambda d, here: min(np.exp(sum(d)), 2),
  turn_truncated_importance: lambda d, here: min(np.exp(sum(d)), 2) if here else 1,
  geometric_truncated_importance: lambda d, here: min(np.exp(sum(d) / max(len(d), 1)), 2),
  sequence_importance_within: lambda d, here: abs(sum(d)) <= np.log(2),
  turn_importance_within: lambda d, here: abs(sum(d)) <= np.log(2) and here,
  geometric_importance_within: lambda d, here: abs(sum(d) / max(len(d), 1)) <= np.log(1.001),
  not_vetoed: lambda d, here: min(d, default=0) >= np.log(1e-4),
}


def by_loops(function, d, mask, rollout, turn):
  out = np.ones(len(d) if function in SEQUENCE else d.shape)
  for place in np.ndindex(out.shape):
    row = place[0]
    if function in SEQUENCE:
      unit = [d[n, t] for n in range(len(d)) if rollout[n] == rollout[row] for t in range(d.shape[1]) if mask[n, t]]
    else:
      unit = [d[row, t] for t in range(d.shape[1]) if mask[row, t] and turn[row, t] == turn[place]]
    out[place] = REFERENCE[function](unit, function in SEQUENCE or mask[place])
  return out


@pytest.mark.parametrize("function", [*SEQUENCE, *TURN])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 0.2, 5.0]))
def test_equals_loops_with_branches_and_ignores_rubbish(function, seed, scale):
  rng = np.random.default_rng(seed)
  d, mask = rng.normal(0, scale, (4, 6)).astype(np.float32), rng.random((4, 6)) < 0.7
  rollout, turn = rng.integers(0, 4, 4), np.where(mask, rng.integers(0, 9, (4, 6)), -1)
  where = dict(turn=turn) if function in TURN else dict(rollout=rollout)
  old = np.where(mask, d, np.nan)
  out = JITTED[function](old, np.zeros_like(d), mask, **where)
  assert_allclose(out, by_loops(function, d.astype(float), mask, rollout, turn), rtol=1e-3, atol=1e-8)
  again = JITTED[function](np.where(mask, d - 3.0, 1e9), np.where(mask, -3.0, np.nan), mask, **where)
  assert again.shape == out.shape and np.isfinite(again).all()


@pytest.mark.parametrize("function", [sequence_truncated_importance, geometric_truncated_importance])
def test_no_gradient_and_finite(function):
  slope = jax.grad(lambda x: function(x, ZERO, ALL, ONE, cap=1e9).sum())(jnp.asarray(RHO))
  assert_array_equal(slope, ZERO)
  assert np.isfinite(function(np.full((1, 5), 1e4), ZERO, ALL, ONE, cap=np.inf)).all()


def test_a_length_counts_in_the_product_not_in_the_geometric_mean():
  d = np.full((2, 100), 0.01, np.float32)
  mask, rollout = np.arange(100)[None] < np.array([[100], [2]]), np.arange(2)
  args = d, 0 * d, mask, rollout
  assert_array_equal(JITTED[sequence_importance_within](*args), [False, True])
  assert_array_equal(JITTED[geometric_importance_within](*args, high=1.02), [True, True])


def test_bounds_are_inclusive_and_the_lower_is_the_inverse():
  two = np.log(np.array([[2.0], [0.5], [2.1], [0.49]], np.float32))
  args = two, 0 * two, np.ones((4, 1), bool), np.arange(4)
  assert_array_equal(JITTED[sequence_importance_within](*args, high=2.0), [True, True, False, False])
  assert_array_equal(JITTED[sequence_importance_within](*args, low=0.1, high=2.0), [True, True, False, True])


def test_veto_is_independent_of_the_clamp():
  d = np.array([[-30.0, 30.0], [-9.3, 0.0], [-9.1, 0.0]], np.float32)  # log 1e-4 is -9.21
  assert_array_equal(JITTED[not_vetoed](d, 0 * d, np.ones((3, 2), bool), np.arange(3)), [False, False, True])


def test_off_policy_mask_spares_only_what_is_punished():
  gap = np.array([[0.6, 0.6], [0.6, 0.6], [0.4, 0.4], [0.4, 0.7]], np.float32)  # log pi_rollout - log pi_old
  mask = np.array([[1, 1], [1, 1], [1, 1], [1, 0]], bool)
  a = np.array([-1.0, 1.0, -1.0, -1.0], np.float32)
  keep = off_policy_within(-gap, 0 * gap, a, mask, np.arange(4))
  assert_array_equal(keep, [False, True, True, True])
  per_token = off_policy_within(-gap, 0 * gap, np.stack([a, -a], 1), mask, np.arange(4))
  assert_array_equal(per_token, [[0, 1], [1, 0], [1, 1], [1, 1]])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_normalised_weights_have_mean_one_over_what_is_kept(seed):
  rng = np.random.default_rng(seed)
  keep, rollout = rng.random((4, 6)) < 0.5, rng.integers(0, 4, 4)
  w = np.where(keep, rng.exponential(1, (4, 6)), np.nan)
  out = np.asarray(mean_one(w, keep))
  assert_allclose(out[keep].mean() if keep.any() else 1.0, 1.0, rtol=1e-5)
  assert (out[~keep] == 0).all()
  per_rollout = rng.exponential(1, 4)[rollout]
  present = {rollout[n]: per_rollout[n] for n in range(4) if keep[n].any()}
  want = per_rollout / np.mean(list(present.values())) if present else per_rollout
  assert_allclose(sequence_mean_one(per_rollout, keep, rollout), want, rtol=1e-5)


def test_normalised_sequences_golden():
  d = np.log(np.array([[0.5], [1.5], [9.0]], np.float32))
  keep = np.array([[1], [1], [0]], bool)
  out = normalised_sequence_importance(d, 0 * d, np.ones((3, 1), bool), keep, np.arange(3))
  assert_allclose(out, [0.5, 1.5, 2.0], rtol=1e-6)  # 2 is the cap, not in the mean
  assert_array_equal(mean_one(np.zeros((1, 2)), np.ones((1, 2), bool)), np.zeros((1, 2)))


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: sequence_truncated_importance(RHO, ZERO, ALL, np.zeros(2, int)), "rollout must have shape"),
    (lambda: sequence_truncated_importance(RHO, ZERO, ALL, np.ones(1, int)), "rollout must hold ids in .0, 1."),
    (lambda: turn_importance_within(RHO, ZERO, ALL, np.zeros((1, 4), int)), "turn must have shape"),
    (lambda: binary_kl_within(RHO, ZERO[:, :2]), "logp_rollout must have shape"),
    (lambda: off_policy_within(RHO, ZERO, np.zeros(2), ALL, ONE), "advantage must have shape"),
    (lambda: mean_one(RHO, np.ones(5, bool)), "keep must have shape"),
  ],
)
def test_errors(call, said):
  with pytest.raises(ValueError, match=said):
    call()
