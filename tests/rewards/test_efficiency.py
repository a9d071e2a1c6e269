import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxagent.rewards import soft_overlong


@pytest.mark.parametrize("length, want", [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1), (99999, -1)])
def test_golden(length, want):
  assert_allclose(soft_overlong(np.array([1.0]), np.array([length])), [1 + want])


def test_branches_share_the_penalty_of_the_longest():
  out = soft_overlong(np.zeros(3), np.array([10, 3, 3]), rollout=np.array([0, 0, 2]), limit=12, margin=4)
  assert_allclose(out, [-0.5, -0.5, 0.0])


@pytest.mark.parametrize("margin", [0, -1, 13])
def test_margins_that_make_no_sense(margin):
  with pytest.raises(ValueError, match="0 < margin <= limit"):
    soft_overlong(np.zeros(1), np.ones(1, int), limit=12, margin=margin)
