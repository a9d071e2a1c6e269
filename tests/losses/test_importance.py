import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses import importance_within, masked_importance, truncated_importance

RHO = np.log(np.array([[0.3, 0.8, 1.0, 1.7, 6.0]], np.float32))


@pytest.mark.parametrize(
  "function, want",
  [
    (truncated_importance, [0.3, 0.8, 1, 1.7, 2]),
    (masked_importance, [0, 0.8, 1, 1.7, 0]),
    (importance_within, [False, True, True, True, False]),
  ],
)
def test_golden(function, want):
  assert_allclose(function(RHO, np.zeros_like(RHO)), [want], rtol=1e-6)


@pytest.mark.parametrize("function", [truncated_importance, masked_importance])
def test_no_gradient_and_rubbish_stays_where_it_is(function):
  old = jnp.array([[0.1, jnp.nan, 0.2, 1e9]])
  clean = function(jnp.where(jnp.isfinite(old), old, 0.0), jnp.zeros((1, 4)))
  assert_array_equal(np.asarray(function(old, jnp.zeros((1, 4))))[0, [0, 2, 3]], np.asarray(clean)[0, [0, 2, 3]])
  slope = jax.grad(lambda x: function(x, jnp.zeros_like(x)).sum())(jnp.asarray(RHO))
  assert_array_equal(slope, np.zeros_like(RHO))


def test_equal_engines_need_no_correction():
  x = np.random.default_rng(0).normal(size=(2, 3))
  assert_array_equal(truncated_importance(x, x), np.ones((2, 3)))
  assert importance_within(x, x).all()
