from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxagent.losses.value import (
  ValueMoments,
  explained_variance,
  explained_variance_of,
  value_clip,
  value_moments,
  value_squared,
)

R = np.array([[0.5, 0.5, 0.1, 0.1, 0.9]], np.float32)
ALL = np.ones((1, 5), bool)
JITTED, MOMENTS = jax.jit(explained_variance), jax.jit(value_moments)


@pytest.mark.parametrize(
  "old, value, returns, want", [(0.5, 0.9, 0.6, 0.09), (0.5, 0.6, 0.6, 0.0), (0.5, 0.0, 0.6, 0.36)]
)
def test_value_clip_golden(old, value, returns, want):  # T1 has no factor 1/2
  assert_allclose(2 * value_clip(np.full(1, value), np.full(1, old), np.full(1, returns)), [want], rtol=1e-5)


@pytest.mark.parametrize("v, want", [([0.4, 0.5, 0.2, 0.1, 0.7], 0.88393), ([5, -4, 6, -5, 3], -231.25)])
def test_explained_variance_golden(v, want):
  assert_allclose(JITTED(np.array([v], np.float32), R, ALL), want, rtol=1e-5)


def test_squared_is_the_clip_without_a_limit():
  v, r = np.array([0.3, -2.0]), np.array([0.5, 4.0])
  assert_allclose(value_squared(v, r), value_clip(v, np.zeros(2), r, clip=1e9), rtol=1e-6)


def test_clip_stops_the_gradient_only_where_moving_on_would_overshoot():
  slope = jax.vmap(jax.grad(value_clip), (0, None, 0))(jnp.array([0.9, 0.9, 0.6]), 0.5, jnp.array([0.6, 2.0, 0.6]))
  assert_allclose(slope, [0.3, 0.0, 0.0], atol=1e-6)  # too far and past R; too far but not there yet; at R


@pytest.mark.parametrize("loss", [value_squared, partial(value_clip, value_old=np.full(40, 0.1, np.float32))])
def test_gradient_equals_finite_differences(loss):
  rng = np.random.default_rng(0)
  v, r = rng.normal(0, 0.5, 40).astype(np.float32), rng.normal(0, 0.5, 40).astype(np.float32)
  v = np.where(np.abs(np.abs(v - 0.1) - 0.2) < 0.02, 0.0, v)  # off the kinks
  f = lambda x: loss(value=x, returns=r)  # noqa: E731
  numeric = (f(v + 1e-2) - f(v - 1e-2)) / 2e-2
  assert_allclose(jax.grad(lambda x: f(x).sum())(jnp.asarray(v)), numeric, atol=2e-2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), offset=st.sampled_from([0.0, 1.0, 100.0]), density=st.floats(0.3, 1))
def test_explained_variance_equals_loops_ignores_rubbish_and_merges(seed, offset, density):
  rng = np.random.default_rng(seed)
  mask = rng.random((4, 6)) < density
  r, v = offset + rng.normal(size=(4, 6)), offset + rng.normal(size=(4, 6))
  kept = [(a, b) for a, b, m in zip(r.flat, v.flat, mask.flat) if m]
  want = 1 - np.var([a - b for a, b in kept]) / np.var([a for a, _ in kept])
  spoilt = [np.where(mask, x, np.nan).astype(np.float32) for x in (v, r)]
  assert_allclose(JITTED(*spoilt, mask), want, rtol=2e-3, atol=2e-3)
  parts = [MOMENTS(spoilt[0][i : i + 1], spoilt[1][i : i + 1], mask[i : i + 1]) for i in range(4)]
  assert_allclose(explained_variance_of(sum(parts[1:], parts[0])), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("returns", [np.full((1, 5), 0.35), np.full((1, 5), 1e4 + 0.1), np.full((1, 5), np.nan)])
def test_undefined_is_nan_not_an_accident(returns):
  mask = ALL & np.isfinite(returns)
  assert np.isnan(explained_variance(np.arange(5.0)[None], returns, mask))


def test_the_mean_of_parts_is_not_the_whole():  # each part has equal returns, together they have not
  v, r, mask = np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 0.0]]), np.ones((2, 2), bool)
  assert explained_variance(v, r, mask) == 1.0 and np.isnan(explained_variance(v[:1], r[:1], mask[:1]))


def test_moments_are_a_pytree():
  a = value_moments(R, R, ALL)
  assert isinstance(jax.tree.map(jnp.asarray, a), ValueMoments)


def test_shapes_are_checked():
  with pytest.raises(ValueError, match="returns must have shape"):
    value_squared(np.zeros((2, 3)), np.zeros((3, 2)))
  with pytest.raises(ValueError, match="value_old must have shape"):
    value_clip(np.zeros(3), np.zeros(2), np.zeros(3))
  with pytest.raises(ValueError, match="mask must have shape"):
    explained_variance(R, R, np.ones(5, bool))
