"""Against the exact divergence on a softmax over five tokens: every expectation is a sum."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from jaxagent.losses import entropy_bonus, kl_k1, kl_k3, kl_reverse

RNG = np.random.default_rng(0)
LOGITS, REF, OLD = (jnp.asarray(RNG.normal(size=5), jnp.float32) for _ in range(3))
log_pi = jax.nn.log_softmax


def exact_kl(p, q):
  return jnp.sum(jnp.exp(log_pi(p)) * (log_pi(p) - log_pi(q)))


def expected(term, sampler):
  """The mean of a per-token term over tokens of `sampler`, which carries no gradient, as a function of logits."""
  weight = jnp.exp(log_pi(sampler))
  return lambda logits: jnp.sum(weight * term(log_pi(logits)))


k1 = lambda logp: kl_k1(logp, log_pi(REF))  # noqa: E731
k3 = lambda logp: kl_k3(logp, log_pi(REF))  # noqa: E731


def test_golden():
  assert_allclose(kl_k3(jnp.array(-1.0), jnp.array(-0.9)), 0.005171, atol=1e-6)
  assert_allclose(kl_k1(jnp.array(-1.0), jnp.array(-0.9)), -0.1, rtol=1e-5)
  assert_allclose(entropy_bonus(jnp.array(0.4)), -0.4)


def test_values_are_unbiased():
  for term in (k1, k3):
    assert_allclose(expected(term, LOGITS)(LOGITS), exact_kl(LOGITS, REF), rtol=1e-5)


def test_k1_is_no_loss():
  assert_allclose(jax.grad(expected(k1, LOGITS))(LOGITS), np.zeros(5), atol=1e-6)


def test_k3_as_a_loss_descends_the_other_divergence():
  slope = jax.grad(expected(k3, LOGITS))(LOGITS)
  assert_allclose(slope, jax.grad(lambda x: exact_kl(REF, x))(LOGITS), atol=1e-6)
  assert np.abs(slope - jax.grad(lambda x: exact_kl(x, REF))(LOGITS)).max() > 0.05


def test_reverse_kl_is_unbiased_in_value_and_gradient_on_stale_samples():
  for old in (LOGITS, OLD):
    f = expected(lambda logp, old=old: kl_reverse(logp, log_pi(old), log_pi(REF)), old)
    assert_allclose(f(LOGITS), exact_kl(LOGITS, REF), rtol=1e-5)
    assert_allclose(jax.grad(f)(LOGITS), jax.grad(lambda x: exact_kl(x, REF))(LOGITS), atol=1e-6)


def test_finite_at_extremes():
  for logp, ref in ((-1e4, 0.0), (0.0, -1e4)):
    for f in (kl_k3, lambda a, b: kl_reverse(a, b, b)):
      value, slope = jax.value_and_grad(f)(logp, ref)
      assert np.isfinite(value) and np.isfinite(slope)


def test_k3_is_exact_for_small_differences():  # exp(d) - d - 1 would be 0 or negative in float32
  assert_allclose(kl_k3(jnp.array(0.0), jnp.array(1e-3)), 0.5e-6, rtol=1e-3)
