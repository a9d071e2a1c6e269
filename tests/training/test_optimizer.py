import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxagent.config import Optimizer
from jaxagent.training.optimizer import make_optimizer, make_schedule


@pytest.mark.parametrize(
  "schedule, want",  # updates 0, 1, 2 (warm-up of 2 ends), 6 (half-way), 10
  [("constant", [1 / 3, 2 / 3, 1, 1, 1]), ("linear", [1 / 3, 2 / 3, 1, 0.5, 0]), ("cosine", [1 / 3, 2 / 3, 1, 0.5, 0])],
)
def test_schedules(schedule, want):
  f = make_schedule(Optimizer(learning_rate=1.0, schedule=schedule, warmup=2), updates=10)
  assert_allclose([f(i) for i in (0, 1, 2, 6, 10)], want, atol=1e-6)


def test_the_first_adamw_update_by_hand():
  tx = make_optimizer(Optimizer(learning_rate=0.1, weight_decay=0.5, clip=None), updates=1)
  w, g = jnp.array([1.0, -2.0]), jnp.array([3.0, -0.1])
  change, _ = tx.update(g, tx.init(w), w)
  assert_allclose(change, -0.1 * (np.sign(g) + 0.5 * w), rtol=1e-5)


def test_clipping_is_by_global_norm_and_before_adam():
  tx = make_optimizer(Optimizer(learning_rate=0.1, clip=1.0, eps=1.0), updates=1)
  w, g = jnp.zeros(2), jnp.array([3.0, 4.0])
  change, _ = tx.update(g, tx.init(w), w)
  assert_allclose(change, -0.1 * np.array([0.6, 0.8]) / (np.array([0.6, 0.8]) + 1), rtol=1e-5)


def test_muon_moves_matrices_as_far_as_adamw_moves_the_rest():
  tx = make_optimizer(Optimizer(name="muon", learning_rate=0.1, weight_decay=0.5, clip=None), updates=1)
  w = {"q": jnp.eye(8), "norm": jnp.ones(8)}
  g = {"q": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32), "norm": jnp.full(8, 3.0)}
  change, _ = tx.update(g, tx.init(w), w)
  step = np.linalg.svd(np.asarray(change["q"]) + 0.1 * 0.5 * np.eye(8), compute_uv=False)
  assert_allclose(step, 0.1 * 0.2 * 8**0.5, rtol=0.35)
  assert_allclose(change["norm"], -0.1 * (1 + 0.5), rtol=1e-5)


@pytest.mark.parametrize("wrong", [dict(clip=0.0), dict(warmup=-1), dict(learning_rate=-1.0)])
def test_wrong_values(wrong):
  with pytest.raises(ValueError, match="must be"):
    make_optimizer(Optimizer(**wrong), updates=1)
