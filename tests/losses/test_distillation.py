import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses.distillation import (
  accept_policy,
  accept_state,
  benefit,
  distillation_loss,
  distillation_weights,
  jensen_shannon,
  mean_one_attribution,
  residual_items,
  selection_weight,
  student_kl,
  sum_one_attribution,
)

P, Q = np.log([0.7, 0.2, 0.1]).astype(np.float32), np.log([0.2, 0.7, 0.1]).astype(np.float32)
NEAR = np.log([0.34, 0.33, 0.33]).astype(np.float32), np.log([0.33, 0.34, 0.33]).astype(np.float32)
J = np.array([[0.14709688, 7.463e-5, 0.0]], np.float32)
ALL = np.ones((1, 3), bool)
JITTED = jax.jit(jensen_shannon)
MEAN_ONE, SUM_ONE, WEIGHTS = map(jax.jit, (mean_one_attribution, sum_one_attribution, distillation_weights))


@pytest.mark.parametrize(
  "free, previous, updated, want",  # newly useful; persistent; regressive; inactive; the policy can already do it
  [(0, 0, 1, 1.0), (0, 1, 1, 0.5), (0, 1, 0, 0.0), (0, 0, 0, 0.0), (1, 1, 1, 0.0), (1, 0, 1, 0.0)],
)
def test_selection_golden(free, previous, updated, want):
  out = selection_weight(*(np.array([float(x)]) for x in (free, previous, updated)), persistent=0.5)
  assert_allclose(out, [want])


def test_for_binary_rewards_selection_is_updated_success_and_free_failure():
  free, previous, updated = np.array(list(itertools.product([0.0, 1.0], repeat=3))).T
  assert_array_equal(selection_weight(free, previous, updated) > 0, (updated == 1) & (free == 0))


def test_equal_means_are_a_tie_however_they_were_summed():
  a = np.float32(0.1) + np.float32(0.2) + np.float32(0.3)
  b = np.float32(0.3) + np.float32(0.2) + np.float32(0.1)
  assert not benefit(np.array([a, b, 0.5]), np.array([b, a, 0.5])).any()


def test_a_failed_rollout_selects_nothing():
  out = selection_weight(np.zeros(2), np.array([np.nan, 0]), np.ones(2), valid=np.array([False, True]))
  assert_allclose(out, [0, 1])


def test_jensen_shannon_golden():
  assert_allclose(jensen_shannon(P, Q), 0.14709688, rtol=1e-6)
  assert_allclose(jensen_shannon(*NEAR), 7.463e-5, rtol=1e-3)
  assert jensen_shannon(P, P) == 0.0


def test_student_kl_golden():
  assert_allclose(student_kl(Q, P), 0.626381, rtol=1e-6)


def test_attribution_golden():
  assert_allclose(mean_one_attribution(J, ALL), [[2.998479, 0.001521, 0]], atol=2e-6)
  assert_allclose(sum_one_attribution(J, ALL), [[0.999493, 0.000507, 0]], atol=1e-6)


def js_by_loops(a, b):
  p, q = np.exp(a - a.max()), np.exp(b - b.max())
  p, q = p / p.sum(), q / q.sum()
  kl = lambda x, y: sum(u * np.log(u / v) for u, v in zip(x, y) if u > 0)  # noqa: E731
  return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_jensen_shannon_equals_loops_is_symmetric_and_bounded(seed, scale):
  rng = np.random.default_rng(seed)
  a, b = (rng.normal(0, scale, (2, 7)).astype(np.float32) for _ in range(2))
  out = np.asarray(JITTED(a, b))
  want = [js_by_loops(x.astype(float), y.astype(float)) for x, y in zip(a, b)]
  assert_allclose(out, want, rtol=1e-4, atol=1e-6)
  assert_allclose(out, JITTED(b, a), atol=1e-7)
  assert (out >= 0).all() and (out <= np.log(2) + 1e-6).all()


def test_excluded_tokens_and_disjoint_distributions():
  inf = np.inf
  a, b = np.array([0.0, 0.0, -inf, -inf]), np.array([-inf, -inf, 0.0, 0.0])
  assert_allclose(jensen_shannon(a, b), np.log(2), rtol=1e-6)
  half = np.array([0.0, 0.0, -inf, -inf])
  assert jensen_shannon(half, half) == 0 and student_kl(half, half) == 0
  assert np.isfinite(student_kl(a, b))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), density=st.floats(0, 1))
def test_weights_have_mean_one_on_the_mask_and_survive_rubbish(seed, density):
  rng = np.random.default_rng(seed)
  mask = rng.random((3, 6)) < density
  j = np.where(mask, rng.exponential(0.1, (3, 6)), np.nan).astype(np.float32)
  mean, total = np.asarray(MEAN_ONE(j, mask)), np.asarray(SUM_ONE(j, mask))
  for row in range(3):
    n = mask[row].sum()
    assert_allclose(mean[row].sum(), n, rtol=1e-3)
    assert_allclose(total[row].sum(), 1.0 if n else 0.0, rtol=1e-3)
  assert (mean[~mask] == 0).all() and (total[~mask] == 0).all()
  omega = rng.choice([0.0, 0.5, 1.0], 3)
  weight = np.asarray(WEIGHTS(omega, mean, mask))
  n = mask.sum(1)
  if (omega * n).sum():
    assert_allclose(weight, omega[:, None] * mean / (omega * n).sum(), rtol=1e-5, atol=1e-8)
    assert_allclose(weight.sum(), 1.0, rtol=1e-3)
  else:
    assert_array_equal(weight, 0)


def test_nothing_selected_and_a_state_without_effect_give_a_loss_of_zero():
  divergence = np.full((2, 3), np.nan)
  mask = np.ones((2, 3), bool)
  for omega, j in ((np.zeros(2), np.ones((2, 3))), (np.ones(2), np.zeros((2, 3)))):
    weight = distillation_weights(omega, mean_one_attribution(j, mask), mask)
    assert distillation_loss(divergence, weight) == 0.0


def test_a_rollout_without_attribution_leaves_the_denominator():
  mask = np.ones((2, 3), bool)
  both = distillation_weights(np.ones(2), np.array([[1.0, 1, 1], [0, 0, 0]]), mask)
  assert_allclose(both[0], distillation_weights(np.ones(1), np.ones((1, 3)), mask[:1])[0])


def test_loss_equals_loops_and_any_split():
  rng = np.random.default_rng(0)
  student, teacher = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4, 5))
  mask, omega = rng.random((3, 4)) < 0.7, np.array([1.0, 0.5, 0.0])
  w = np.asarray(mean_one_attribution(jensen_shannon(student, teacher), mask))
  weight, kl = np.asarray(distillation_weights(omega, w, mask)), np.asarray(student_kl(student, teacher))
  top = sum(omega[i] * float(w[i, t]) * kl[i, t] for i in range(3) for t in range(4) if mask[i, t])
  assert_allclose(distillation_loss(kl, weight), top / (omega * mask.sum(1)).sum(), rtol=1e-5)
  parts = sum(distillation_loss(kl[i : i + 1], weight[i : i + 1]) for i in range(3))
  assert_allclose(parts, distillation_loss(kl, weight), rtol=1e-6)


def test_gradient_moves_the_student_only_and_equals_finite_differences():
  rng = np.random.default_rng(1)
  s, t = jnp.asarray(rng.normal(size=5), jnp.float32), jnp.asarray(rng.normal(size=5), jnp.float32)
  slope = jax.jit(jax.grad(student_kl))(s, t)
  step = 1e-2 * np.eye(5, dtype=np.float32)
  numeric = (student_kl(s + step, t + 0 * step) - student_kl(s - step, t + 0 * step)) / 2e-2
  assert_allclose(slope, numeric, atol=2e-4)
  assert_array_equal(jax.jit(jax.grad(student_kl, 1))(s, t), np.zeros(5))
  shut = jnp.asarray([0.0, 1.0, -jnp.inf, -jnp.inf, 0.5])
  assert np.isfinite(jax.jit(jax.grad(student_kl))(shut, t)).all()


def test_gates():
  new, old = np.array([0.6, 0.5, 0.4, np.nan]), np.full(4, 0.5)
  assert_array_equal(accept_state(new, old), [True, False, False, False])
  assert_array_equal(accept_policy(new, old), [True, True, False, False])
  without = np.array([0.62, 0.60, 0.55, np.nan])  # with all items: 0.61
  assert_array_equal(residual_items(without, 0.61), [False, True, True, True])
  assert_array_equal(residual_items(without, 0.61, tolerance=0.02), [False, False, True, True])


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: selection_weight(np.zeros(2), np.zeros(3), np.zeros(2)), "reward_previous"),
    (lambda: jensen_shannon(np.zeros((2, 3)), np.zeros((2, 4))), "other"),
    (lambda: mean_one_attribution(J, np.ones(3, bool)), "mask"),
    (lambda: distillation_weights(np.zeros(2), J, ALL), "attribution"),
    (lambda: distillation_loss(J, np.zeros(3)), "weight"),
  ],
)
def test_shapes_are_checked(call, said):
  with pytest.raises(ValueError, match=f"{said} must have shape"):
    call()
