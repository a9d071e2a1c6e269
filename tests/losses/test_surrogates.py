from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxagent.losses import gspo, ppo_clip, reinforce

CLIP = partial(ppo_clip, low=0.2, high=0.28)


@pytest.mark.parametrize("ratio, advantage, want", [(1.5, 1, -1.28), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8)])
def test_ppo_clip_golden(ratio, advantage, want):
  out = CLIP(jnp.log(jnp.full((1, 1), ratio)), jnp.zeros((1, 1)), jnp.full((1, 1), float(advantage)))
  assert_allclose(out, [[want]], rtol=1e-6)


@pytest.mark.parametrize(
  "ratio, advantage, moves", [(1.5, 1, False), (1.5, -1, True), (0.5, 1, True), (0.5, -1, False), (1.0, 1, True)]
)
def test_ppo_clip_stops_the_gradient_exactly_where_it_binds(ratio, advantage, moves):
  slope = jax.grad(lambda x: CLIP(x, 0.0, float(advantage)))(jnp.log(ratio))
  assert_allclose(slope, -advantage * ratio if moves else 0.0, rtol=1e-6)


def test_reinforce_golden():
  assert_allclose(reinforce(jnp.array([-2.0, -1.0]), jnp.array([3.0, -1.0])), [6.0, -1.0])


def test_gspo_golden():
  logp = jnp.array([[0.01, -0.02, 0.03]])
  row = dict(logp_old=jnp.zeros((1, 3)), mask=jnp.ones((1, 3), bool), segment=jnp.zeros((1, 3), int))
  assert_allclose(gspo(logp, advantage=jnp.ones((1, 3)), **row), np.full((1, 3), -1.0004), rtol=1e-6)
  assert_allclose(gspo(logp, advantage=-jnp.ones((1, 3)), **row), np.full((1, 3), 1.00668894), rtol=1e-6)


def test_gspo_ratio_is_of_its_own_segment_and_its_kept_tokens():
  d = np.array([[0.3, 0.1, 9.0, -0.2, 0.4, 9.0]], np.float32)
  mask, segment = np.array([[1, 1, 0, 1, 1, 0]], bool), np.array([[0, 0, 0, 1, 1, -1]])
  out = gspo(jnp.asarray(d), jnp.zeros_like(d), jnp.ones_like(d), mask, segment, low=1.0, high=10.0)
  assert_allclose(np.asarray(out)[mask], -np.exp([0.2, 0.2, 0.1, 0.1]), rtol=1e-6)


def test_gspo_gradient_is_that_of_the_sequence_objective():
  rng = np.random.default_rng(1)
  logp, mask = rng.normal(0, 1e-4, (1, 5)), np.array([[1, 1, 0, 1, 1]], bool)
  segment, a = np.zeros((1, 5), int), 0.7

  def ours(x):  # with GSPO's weights: 1 / length
    return jnp.sum(gspo(x, jnp.zeros_like(x), jnp.full_like(x, a), mask, segment) * mask) / mask.sum()

  def paper(x):
    return -a * jnp.exp(jnp.sum(x * mask) / mask.sum())

  x = jnp.asarray(logp, jnp.float32)
  assert_allclose(jax.grad(ours)(x), jax.grad(paper)(x), rtol=1e-5)


@pytest.mark.parametrize("surrogate", [reinforce, CLIP])
def test_gradient_equals_finite_differences(surrogate):
  rng = np.random.default_rng(0)
  old, a = rng.normal(-1, 0.3, 16).astype(np.float32), rng.normal(size=16).astype(np.float32)
  x = old + rng.choice([-0.6, -0.1, 0.0, 0.1, 0.6], 16).astype(np.float32)  # off the kinks
  f = {reinforce: lambda x: reinforce(x, a)}.get(surrogate, lambda x: CLIP(x, old, a))
  numeric = (f(x + 5e-3) - f(x - 5e-3)) / 1e-2
  assert_allclose(jax.grad(lambda x: f(x).sum())(x), numeric, atol=1e-3)


@pytest.mark.parametrize("surrogate", [CLIP, partial(gspo, mask=np.ones((1, 4), bool), segment=np.zeros((1, 4), int))])
def test_finite_for_any_log_ratio(surrogate):
  x = jnp.array([[-1e4, 1e4, -200.0, 80.0]])
  f = lambda x: jnp.sum(surrogate(x, jnp.zeros_like(x), advantage=-jnp.ones_like(x)))  # noqa: E731
  value, slope = jax.value_and_grad(f)(x)
  assert np.isfinite(value) and np.isfinite(slope).all()
