import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.rewards.assertions import assertion_reward, assertion_share, count_assertions, fell_back

jit_reward, jit_share = jax.jit(assertion_reward), jax.jit(assertion_share)
COUNTS = st.lists(st.tuples(st.integers(-1, 40), st.sampled_from([0.0, 1.0])), min_size=4, max_size=4)


def test_golden_t1():
  passed, outcome = np.array([10, 2, 35, -1, -1, 0]), np.array([0.0, 0, 1, 1, 0, 0])
  assert_allclose(assertion_reward(passed, outcome), [0.5, 0.1, 1.75, 1, 0, 0])
  assert_array_equal(fell_back(passed), [0, 0, 0, 1, 1, 0])


def test_golden_older_variant():
  out = assertion_share(np.array([10, 3, 3, -1, 0]), np.array([20, 4, 4, -1, 0]), np.array([0.0, 0, 1, 1, 0]))
  assert_allclose(out, [0.2, 0.3, 1, 1, 0])


@settings(max_examples=25, deadline=None)
@given(COUNTS)
def test_laws(rows):
  passed, outcome = np.array([p for p, _ in rows]), np.array([b for _, b in rows])
  out = np.asarray(jit_reward(passed, outcome))
  assert_allclose(out, [b if p < 0 else p / 20 for p, b in rows], rtol=1e-6)
  share = np.asarray(jit_share(passed, np.maximum(passed, 0) + 1, outcome))
  assert (share >= outcome).all() and (share <= 1).all()


def test_counts_and_causes():
  assert count_assertions({"a": True, "b": False, "c": True}) == (2, 3, "")
  assert count_assertions(None) == (-1, -1, "no record of assertions")
  assert count_assertions({}) == (-1, -1, "record without an assertion")


def test_bad_input_is_named():
  with pytest.raises(ValueError, match="outcome must have shape"):
    assertion_reward(np.zeros(2, int), np.zeros(3))
  with pytest.raises(ValueError, match="assertions_passed must lie in"):
    assertion_reward(np.array([-2]), np.zeros(1))
