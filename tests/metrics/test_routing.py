import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxagent.metrics import rerouted_routers, rerouted_tokens

JITTED = jax.jit(rerouted_tokens), jax.jit(rerouted_routers)


def test_golden():  # the sampler chose {0, 2}, the trainer {0, 1}
  a, b = np.array([[[[0, 2]], [[1, 0]]]]), np.array([[[[0, 1]], [[0, 1]]]])
  assert rerouted_tokens(a, b, np.ones((1, 2), bool)) == 0.5
  assert rerouted_routers(a, b, np.ones((1, 2), bool)) == 0.5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_equals_loops(seed):
  rng = np.random.default_rng(seed)
  a = np.array([[[rng.permutation(4)[:2] for _ in range(3)] for _ in range(5)] for _ in range(2)])
  b = np.where(rng.random((2, 5, 3, 1)) < 0.3, np.roll(a, 1, axis=1), a[..., ::-1])
  a[rng.random((2, 5, 3)) < 0.1] = -1
  mask = rng.random((2, 5)) < 0.7
  pairs = [(n, t, l) for n in range(2) for t in range(5) for l in range(3) if mask[n, t] and (a[n, t, l] >= 0).all()
           and (b[n, t, l] >= 0).all()]  # fmt: skip
  differ = [(n, t, l) for n, t, l in pairs if set(a[n, t, l]) != set(b[n, t, l])]
  tokens, routers = (f(a, b, mask) for f in JITTED)
  assert_allclose(routers, len(differ) / max(len(pairs), 1), rtol=1e-6)
  assert_allclose(tokens, len({d[:2] for d in differ}) / max(len({p[:2] for p in pairs}), 1), rtol=1e-6)


def test_nothing_to_compare_is_zero():
  none = np.full((1, 2, 3, 2), -1)
  for f in JITTED:
    assert f(none, np.zeros_like(none), np.ones((1, 2), bool)) == 0


def test_shapes_are_checked():
  with pytest.raises(ValueError, match="other must have shape"):
    rerouted_tokens(np.zeros((1, 2, 3, 2)), np.zeros((1, 2, 3, 1)), np.ones((1, 2), bool))
