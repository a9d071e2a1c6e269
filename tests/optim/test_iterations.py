from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.optim import JORDAN, POLAR_EXPRESS, gram_newton_schulz, newton_schulz
from jaxagent.optim.iterations import blocks, symmetric_product

RESTARTED = partial(gram_newton_schulz, restart=(3,))
FORMS = {"plain": newton_schulz, "gram": gram_newton_schulz, "a restart": RESTARTED}


def with_singular_values(values, m, n, seed=0):
  rng = np.random.default_rng(seed)
  u, v = (np.linalg.qr(rng.normal(size=(k, k)))[0] for k in (m, n))
  return (u[:, : len(values)] * values) @ v[: len(values)]


def reference(x, coefficients):
  """Float64, by the singular value decomposition: every s becomes p(s)."""
  u, s, v = np.linalg.svd(np.float64(x), full_matrices=False)
  s = s / np.linalg.norm(s)
  for a, b, c in coefficients:
    s = a * s + b * s**3 + c * s**5
  return (u * s) @ v


def relative(x, y):
  return np.linalg.norm(np.float64(x) - y) / np.linalg.norm(y)


def test_golden_jordan_of_two_singular_values():
  got = newton_schulz(jnp.array([[3.0, 0, 0], [0, 1, 0]]))
  assert_allclose(np.linalg.svd(got, compute_uv=False), [1.1337, 0.7530], atol=1e-4)


@pytest.mark.parametrize("coefficients", [JORDAN, POLAR_EXPRESS], ids=["jordan", "polar express"])
@pytest.mark.parametrize("shape", [(24, 24), (24, 96), (256, 512), (1, 7), (1, 1)], ids=str)
def test_both_forms_are_the_polynomial_of_the_singular_values(coefficients, shape):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  want = reference(x, coefficients)
  # the Gram form squares singular values: 1e-5 where they are near each other, more where they are not (next test)
  for name, form in FORMS.items():
    assert relative(form(x, coefficients), want) < 1e-5 if name == "plain" else 1e-4, name


@pytest.mark.parametrize("form, bound", [("plain", 1e-5), ("gram", 1e-3), ("a restart", 1e-4)])
def test_accuracy_where_singular_values_span_three_orders(form, bound):
  """The tolerance that conditioning allows, stated in the docstrings."""
  x = with_singular_values(np.geomspace(2e-3, 1, 32), 32, 128)
  want = reference(x, JORDAN)
  assert relative(FORMS[form](jnp.asarray(x, jnp.float32)), want) < bound


def test_a_restart_makes_the_gram_form_more_accurate():
  x = jnp.asarray(with_singular_values(np.geomspace(1e-3, 1, 32), 32, 128), jnp.float32)
  errors = [relative(form(x), reference(x, JORDAN)) for form in (RESTARTED, gram_newton_schulz)]
  assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("form", FORMS)
def test_singular_values_of_the_update(form):
  """Inside [0.67, 1.21] wherever the input's is at least 2e-3 of the Frobenius norm; nearer to 1 by Polar Express."""
  far = {}
  for name, coefficients in (("jordan", JORDAN), ("polar", POLAR_EXPRESS)):
    far[name] = 0.0
    for start in (2.01e-3, 1e-2, 0.1):
      values = np.geomspace(start, max(0.2, start), 32)
      values[-1] = np.sqrt(1 - np.sum(values[:-1] ** 2))  # so that the norm is 1
      x = jnp.asarray(with_singular_values(values, 32, 128), jnp.float32)
      s = np.linalg.svd(FORMS[form](x, coefficients), compute_uv=False)
      far[name] = max(far[name], np.abs(s - 1).max())
      if name == "jordan":
        assert 0.67 <= s.min() and s.max() <= 1.21, (start, s.min(), s.max())
  assert far["polar"] < far["jordan"] / 3 and far["polar"] < 0.05, far


def test_polar_express_is_as_near_to_one_as_its_paper_says():
  s = np.geomspace(1e-3, 1, 20001)
  for a, b, c in POLAR_EXPRESS:
    s = a * s + b * s**3 + c * s**5
  assert np.abs(s - 1).max() < 0.05


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(8, 8), (8, 64), (1, 5), (1, 1)], ids=str)
def test_edges_stay_finite(form, shape):
  rng = np.random.default_rng(1)
  x = rng.normal(size=shape).astype(np.float32)
  iterate = jax.jit(FORMS[form])
  assert_array_equal(iterate(np.zeros(shape, np.float32)), np.zeros(shape))
  rank_one = np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1])).astype(np.float32)
  assert np.isfinite(iterate(rank_one)).all()
  for size in (1e-30, 1e-12, 1e12, 1e37):
    assert_allclose(iterate(x * np.float32(size)), iterate(x), atol=2e-5, err_msg=str(size))


def test_a_rank_deficient_square_is_within_a_thousandth_of_float64():
  x = with_singular_values(np.geomspace(0.05, 1, 20), 32, 32)
  got = np.asarray(newton_schulz(jnp.asarray(x, jnp.float32)), np.float64)
  u, _, v = np.linalg.svd(x)
  assert relative(u[:, :20].T @ got @ v[:20].T, u[:, :20].T @ reference(x, JORDAN) @ v[:20].T) < 1e-3
  assert np.isfinite(got).all()


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_products(form):
  x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
  got = FORMS[form](x, dtype=jnp.bfloat16)
  assert got.dtype == jnp.float32 and 0.01 < relative(got, reference(x, JORDAN)) < 0.1


@pytest.mark.parametrize("m, count", [(64, 1), (256, 2), (258, 2), (512, 4), (2048, 4), (255, 1)])
def test_symmetric_product(m, count):
  assert blocks(m) == count
  x = np.random.default_rng(0).normal(size=(m, 40)).astype(np.float32)
  got = np.asarray(symmetric_product(x, x))
  assert_allclose(got, x @ x.T, rtol=1e-4, atol=1e-4)
  assert_array_equal(got, got.T) if count > 1 else None


def dots(function, shape):
  """Multiplications of the products that a function of one matrix does."""
  total, todo = 0, [jax.make_jaxpr(function)(jnp.zeros(shape)).jaxpr]
  while todo:
    for eqn in todo.pop().eqns:
      todo += [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
      if eqn.primitive.name == "dot_general":
        total += eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[eqn.params["dimension_numbers"][0][0][0]]
  return total


@pytest.mark.parametrize("m, n", [(64, 64), (64, 128), (256, 768), (512, 512), (512, 2048)])
def test_the_gram_form_never_does_more(m, n):
  plain, gram = dots(newton_schulz, (m, n)), dots(gram_newton_schulz, (m, n))
  assert gram <= plain and (n < 2.5 * m or gram < 0.8 * plain)


@pytest.mark.parametrize("restart", [(5,), (-1,), (2, 7)])
def test_a_restart_at_no_step(restart):
  with pytest.raises(ValueError, match="restart names steps of 5"):
    gram_newton_schulz(jnp.ones((4, 16)), restart=restart)
