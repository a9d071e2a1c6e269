"""Token weights by turn and by agent."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses import agent_mean, sequence_mean, turn_mean

TURN_MEAN, AGENT_MEAN, SEQUENCE_MEAN = map(jax.jit, (turn_mean, agent_mean, sequence_mean))


def test_turn_mean_golden():  # turns of 2, 1 and 3 tokens, a context token and one dropped
  keep = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]], bool)
  turn = np.array([[0, 0, -1, 1, 1], [5, 5, 5, -1, -1]])
  want = [[1 / 6, 1 / 6, 0, 1 / 3, 0], [1 / 9, 1 / 9, 1 / 9, 0, 0]]
  assert_allclose(TURN_MEAN(keep, turn), want, rtol=1e-6)


def turns_by_loops(keep, turn):
  places = {}
  for place in zip(*np.nonzero(keep)):
    places.setdefault((place[0], turn[place]), []).append(place)
  out = np.zeros(keep.shape)
  for tokens in places.values():
    for place in tokens:
      out[place] = 1 / len(places) / len(tokens)
  return out


def agents_by_loops(keep, rollout, agent):
  tokens, out = {}, np.zeros(keep.shape)
  for n in range(len(keep)):
    tokens[rollout[n], agent[n]] = tokens.get((rollout[n], agent[n]), 0) + keep[n].sum()
  speaking = {pair for pair, count in tokens.items() if count}
  rollouts = {r for r, _ in speaking}
  for n in range(len(keep)):
    pair = rollout[n], agent[n]
    if pair in speaking:
      out[n] = keep[n] / len(rollouts) / sum(r == rollout[n] for r, _ in speaking) / tokens[pair]
  return out


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), density=st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_equal_loops_and_sum_to_one(seed, density):
  rng = np.random.default_rng(seed)
  keep = rng.random((6, 5)) < density
  turn, rollout, agent = np.where(keep, rng.integers(0, 3, (6, 5)), -1), rng.integers(0, 6, 6), rng.integers(0, 3, 6)
  by_turn, by_agent = TURN_MEAN(keep, turn), AGENT_MEAN(keep, rollout, agent)
  assert_allclose(by_turn, turns_by_loops(keep, turn), rtol=1e-5)
  assert_allclose(by_agent, agents_by_loops(keep, rollout, agent), rtol=1e-5)
  for weights in (by_turn, by_agent):
    assert_allclose(np.sum(weights), float(keep.any()), rtol=1e-5)
  assert_allclose(AGENT_MEAN(keep, rollout, 0 * agent), SEQUENCE_MEAN(keep, rollout), rtol=1e-5)


def test_a_talkative_agent_weighs_no_more():
  keep = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
  assert_array_equal(np.sum(AGENT_MEAN(keep, np.zeros(2, int), np.arange(2)), 1), [0.5, 0.5])


def test_errors():
  keep = np.ones((2, 3), bool)
  with pytest.raises(ValueError, match="turn must have shape"):
    turn_mean(keep, np.zeros((2, 2), int))
  with pytest.raises(ValueError, match="agent must have shape"):
    agent_mean(keep, np.zeros(2, int), np.zeros(3, int))
  with pytest.raises(ValueError, match="rollout must hold ids"):
    agent_mean(keep, np.array([0, 2]), np.zeros(2, int))
