"""How often a method's own mechanism acts."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxagent.metrics import credited_shares, distilled_shares, fallback_share, split_shares, uncited_shares

NAN = np.nan
MASK = np.array([[0, 1, 1, 0, 1], [0, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 1, 1, 1]], bool)
TURN = np.array([[-1, 0, 0, -1, 1], [-1, 0, 0, 0, 1], [-1, 0, -1, 1, -1], [-1, 0, 0, 1, 1]])
VALID = np.array([True, True, True, False])
OUTCOME = np.array([0.0, 0.0, 1.0, NAN])
GROUP = np.array([0, 1, 1, 1])


def close(found, **want):
  assert set(found) == set(want)
  for name, share in want.items():
    assert_allclose(found[name], share, rtol=1e-6, err_msg=name)


def test_fallback():
  assert_allclose(fallback_share(np.array([-1, 3, 0, -1]), VALID), 1 / 3, rtol=1e-6)


def test_uncited():
  quality = np.array([[NAN, 0.5, NAN], [NAN, NAN, 0.1], [0.2, 0.3, NAN], [NAN, NAN, NAN]])
  close(uncited_shares(quality, MASK, TURN, VALID), steps=3 / 6, rows=1 / 3)


def test_split():
  error = np.array([2, -1, 0, -1])
  no = np.zeros(4, bool)
  close(split_shares(OUTCOME, GROUP, error, MASK, VALID, no), prefix=1 / 3, fallback=1 / 2)
  truncated = VALID  # wrong from the start
  close(split_shares(OUTCOME, GROUP, error, MASK, VALID, truncated), prefix=0, fallback=0)


def test_credited():
  credit = np.array([[0.4, 0.0], [0.0, 0.0], [0.9, 0.9], [1.0, 1.0]])
  close(credited_shares(credit, OUTCOME, MASK, TURN, VALID), steps=1 / 4, rows=1 / 2)


def test_distilled():
  close(distilled_shares(np.array([-1.0, 0.5, 0.0, NAN]), VALID), rows=2 / 3, selected=1 / 2)


@pytest.mark.parametrize("valid", [VALID, np.zeros(4, bool)])
def test_under_jit_and_with_nothing_to_count(valid):
  def every(quality, credit, error, selection, passed):
    return [
      uncited_shares(quality, MASK, TURN, valid), credited_shares(credit, OUTCOME, MASK, TURN, valid),
      split_shares(OUTCOME, GROUP, error, MASK, valid, ~valid), distilled_shares(selection, valid),
      fallback_share(passed, valid),
    ]  # fmt: skip

  inputs = np.full((4, 2), NAN), np.full((4, 2), NAN), np.full(4, 3), np.full(4, NAN), np.full(4, 2)
  eager, jitted = jax.tree.leaves(every(*inputs)), jax.tree.leaves(jax.jit(every)(*inputs))
  assert_allclose(eager, jitted)
  assert np.isfinite(eager).all() and (valid.any() or not np.any(eager))


def test_a_shape_that_disagrees_is_named():
  with pytest.raises(ValueError, match="step_credit must have shape"):
    credited_shares(np.zeros((3, 2)), OUTCOME, MASK, TURN, VALID)
