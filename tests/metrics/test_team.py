from itertools import combinations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.metrics import (
  distributed,
  fact_subsets,
  information_gaps,
  message_waste,
  minimal_sets,
  normalised_communication_gap,
  piu_recall,
  undelivered_share,
  unsurfaced_share,
)

MINIMAL = jax.jit(minimal_sets)


def test_gaps_golden():
  gaps = information_gaps(0.95, 0.80, 0.50)
  assert_allclose(gaps, [0.15, 0.30, 0.45], atol=1e-6)
  assert_allclose(gaps.retrieval + gaps.communication, gaps.total, atol=1e-6)
  assert_allclose(normalised_communication_gap(0.8, 0.5, 0.4), 0.75, rtol=1e-5)


def by_loops(decides, facts):
  """Every set that decides rightly and no longer does without any one of its facts."""
  sets = [frozenset(s) for k in range(facts + 1) for s in combinations(range(facts), k)]
  return {s for s in sets if decides(s) and not any(decides(s - {f}) for f in s)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_minimal_sets_equal_loops_for_any_solver(seed):
  table = np.random.default_rng(seed).random(32) < 0.4
  decides = lambda s: table[sum(1 << f for f in s)]  # noqa: E731
  rows = np.asarray(fact_subsets(5))[np.asarray(MINIMAL(table))]
  assert {frozenset(np.flatnonzero(r)) for r in rows} == by_loops(decides, 5)


def test_all_key_facts_and_none_less():  # two alternative keys {0, 1} and {2}, fact 3 is a distractor
  subsets = np.asarray(fact_subsets(4))
  correct = (subsets[:, 0] & subsets[:, 1]) | subsets[:, 2]
  piu = subsets[np.asarray(MINIMAL(correct))]
  assert_array_equal(piu, [[1, 1, 0, 0], [0, 0, 1, 0]])
  assert not distributed(piu, np.array([[1, 0, 0, 0], [0, 1, 1, 0]], bool))  # the second agent knows fact 2
  assert distributed(piu, np.array([[1, 0, 0, 1], [0, 1, 0, 0]], bool))
  assert not distributed(piu, np.array([[1, 0, 0, 1], [0, 0, 0, 1]], bool))  # nobody knows fact 1


def test_nothing_decides_and_everything_decides():
  assert not np.asarray(MINIMAL(np.zeros(16, bool))).any()
  assert_array_equal(MINIMAL(np.ones(16, bool)), np.arange(16) == 0)


def test_shares_of_a_piu_add_up():
  piu = np.array([1, 1, 1, 1, 0], bool)
  surfaced, delivered = np.array([1, 1, 1, 0, 1], bool), np.array([1, 0, 0, 0, 1], bool)
  assert unsurfaced_share(piu, surfaced) == 0.25
  assert undelivered_share(piu, surfaced, delivered) == 0.5
  assert piu_recall(piu, delivered, np.zeros(5, bool)) == 0.25
  assert piu_recall(piu, delivered, np.array([0, 1, 0, 0, 0], bool)) == 0.5
  assert piu_recall(~piu & False, delivered, delivered) == 1.0


def test_message_waste():
  piu = np.array([[1, 0, 0], [1, 1, 1]], bool)
  assert_allclose(message_waste(np.array([[8, 4, 2], [1, 1, 1]]), piu, np.array([20, 5])), [0.3, 0.0], rtol=1e-6)
  assert message_waste(np.zeros(3), piu[0], 0.0) == 0.0


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: fact_subsets(21), "0 to 20 facts, got 21"),
    (lambda: minimal_sets(np.zeros(6, bool)), "one entry for each of the 2.F subsets"),
    (lambda: minimal_sets(np.zeros((2, 2), bool)), "one entry for each"),
    (lambda: distributed(np.zeros((2, 3), bool), np.zeros((2, 4), bool)), "packs must have shape"),
    (lambda: piu_recall(np.zeros(3, bool), np.zeros(2, bool), np.zeros(3, bool)), "delivered must have shape"),
  ],
)
def test_errors(call, said):
  with pytest.raises(ValueError, match=said):
    call()
