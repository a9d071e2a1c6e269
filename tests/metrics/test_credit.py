"""How often a method's own mechanism acts."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxagent.metrics import (
  advantage_shape,
  credited_shares,
  distilled_shares,
  fallback_share,
  paid_turn_share,
  penalised_gap,
  piu_means,
  reward_change,
  split_shares,
  uncited_shares,
)

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


def test_advantage():
  a = np.array([[9, 1, 1, 9, 4], [9, 2, 2, 2, 2], [9, 0, 9, 6, 9], [NAN, NAN, NAN, NAN, NAN]])
  taken = np.array([1, 1, 4, 2, 2, 2, 2, 0, 6.0])
  rows, turns = [[1, 1, 4], [2, 2, 2, 2], [0, 6]], [[1, 1], [4], [2, 2, 2], [2], [0], [6]]
  share = lambda cells: sum(np.var(c) * len(c) for c in cells) / (taken.var() * taken.size)  # noqa: E731
  close(
    advantage_shape(a, MASK, TURN, VALID), size=taken.mean(), within_rows=share(rows), within_turns=share(turns)
  )
  close(advantage_shape(np.ones((4, 5)), MASK, TURN, VALID), size=1, within_rows=0, within_turns=0)
  assert advantage_shape(np.arange(5.0) + np.zeros((4, 1)), MASK, TURN, VALID)["within_turns"] > 0.1


def test_rewards():
  close(reward_change(np.array([0.5, 0.0, 1.0, NAN]), OUTCOME, VALID), mean=1 / 6, rows=1 / 3, partial=1 / 3)
  assert_allclose(paid_turn_share(np.array([[0.1, 0, 1], [0, -1, 0], [0, 0, 1], [1, 1, 1]]), MASK, TURN, VALID), 2 / 6)


def test_penalties():
  a = np.array([[9, 1, 1, 9, 4], [9, 2, 2, 2, 2], [9, 0, 9, 6, 9], [NAN] * 5])
  assert_allclose(penalised_gap(a, np.array([[0, -1], [0, 0], [0, 0], [-1, NAN]]), MASK, VALID), 2 - 14 / 6, rtol=1e-6)
  assert penalised_gap(a, np.zeros((4, 1)), MASK, VALID) == 0


def test_what_a_team_was_told():
  close(piu_means(VALID, piu_recall=OUTCOME, message_waste=np.array([1.0, 0, 0.5, NAN])), recall=1 / 3, waste=0.5)
  assert piu_means(VALID) == {}


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
