import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.advantages import group_relative
from jaxagent.advantages.returns import batch_standardized
from jaxagent.rewards.efficiency import (
  behaviour_of_modes,
  difficulty_bonus,
  efficiency_gate,
  few_tool_calls,
  gated_efficiency,
  generated_tokens,
  least_tool_calls,
  most_efficient,
  reference_bonus,
  solved_tasks_pay_for_tools,
  tool_cost,
)

N, T = 6, 12
seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)
jit_gated, jit_filter = jax.jit(gated_efficiency), jax.jit(most_efficient)
jit_calls, jit_solved = jax.jit(least_tool_calls), jax.jit(solved_tasks_pay_for_tools)


def test_golden_when2think():
  ok, length = np.array([1.0, 1, 1, 1, 1, 0]), np.array([300.0, 2000, 4000, 300, 11000, 300])
  accuracy, tokens = np.array([0.9, 0.9, 0.9, 0.1, 0.1, 0.9]), np.array([2000.0] * 3 + [12000] * 2 + [2000])
  out = reference_bonus(ok, length, accuracy, tokens)
  assert_allclose(out, [1.3825, 1.0, 1.0, 1.0488, 1.0042, 0], atol=5e-5)
  advantage = batch_standardized(np.array([out[0], 1, 0, out[4], 0, 0]))
  assert_allclose(advantage, [1.4141, 0.7529, -0.9757, 0.7601, -0.9757, -0.9757], atol=2e-4)


def test_the_bonus_at_its_edges():
  out = reference_bonus(np.ones(3), np.array([5.0, 5, 5]), np.array([0.0, 0.9, 1]), np.array([100.0, 0, 100]))
  assert_allclose(out, [1, 1, 1.475])  # never solved; no reference length; easy and short
  mask = np.arange(12)[None] < np.array([5, 5, 5])[:, None]
  slot = difficulty_bonus(np.ones(3), mask, np.array([0.0, 0.9, 1]), np.array([100.0, 0, 100]))
  assert_allclose(slot, out)
  cut = difficulty_bonus(np.ones(3), mask, np.ones(3), np.full(3, 9.0), truncated=np.array([False, True, False]))
  assert cut[1] == 0 and cut[0] > 1


def test_branches_add_up():
  mask = np.ones((2, 3), bool)
  assert_allclose(generated_tokens(mask, rollout=np.zeros(2, int)), [6, 6])
  out = difficulty_bonus(np.ones(2), mask, np.ones(2), np.full(2, 12.0), rollout=np.zeros(2, int))
  assert_allclose(out, [1.25, 1.25])


def test_first_token_of_two_modes():
  mask = np.array([[False, True, True], [True, False, True], [False, False, False]])
  out = behaviour_of_modes(np.full((3, 3), -3.0), mask)
  assert_allclose(out, [[-3, np.log(0.5), -3], [np.log(0.5), -3, -3], [-3, -3, -3]], rtol=1e-6)
  with pytest.raises(ValueError, match="probability must lie"):
    behaviour_of_modes(np.zeros((3, 3)), mask, probability=0.0)


@pytest.mark.parametrize("delta, want", [(0, 1), (0.25, 0.8756), (0.5, 0.7551), (1, 0.5379), (2, 0.2384), (3, 0.0949)])
def test_golden_gate(delta, want):
  assert_allclose(efficiency_gate(np.array([1.0 + delta]), np.array([1.0]), eps=0.0), [want], atol=6e-5)


def test_the_gate_does_not_overflow():
  assert_array_equal(efficiency_gate(np.array([1e30]), np.array([0.0]), eps=1e-6), [0])


def test_golden_slim_searcher():
  ok, cost, length = np.array([1.0, 1, 1, 0]), np.array([4.0, 6, 8, 2]), np.array([2000, 2000, 5000, 500])
  mask, group = np.arange(5000)[None] < length[:, None], np.zeros(4, int)
  out = gated_efficiency(ok, cost, mask, group, tool_eps=0.0, length_eps=0.0)
  assert_allclose(out, [1, 0.7551, 0.1962, 0], atol=6e-5)
  assert_allclose(group_relative(out, group), [1.264, 0.6596, -0.7196, -1.2039], atol=2e-4)
  assert_array_equal(most_efficient(ok, cost, length, group), [1, 0, 0, 0])


@pytest.mark.parametrize("won, cost, least, want", [(14, 3, 0, 0.3202), (14, 0, 0, 1), (2, 3, 1, 0.921)])
def test_golden_eapo(won, cost, least, want):
  outcome = (np.arange(16) < won).astype(float)
  costs = np.full(16, 9.0)
  costs[0], costs[1] = cost, least
  out = solved_tasks_pay_for_tools(outcome, outcome, costs, np.zeros(16, int))
  assert_allclose(out[0], want, atol=6e-5)
  assert (np.asarray(out)[won:] == 0).all()


def test_otc():
  outcome, group = np.array([1.0, 1, 0, 1, 1]), np.array([0, 0, 0, 1, 1])
  out = np.asarray(least_tool_calls(outcome, np.array([2.0, 4, 1, 0, 3]), group))
  assert_allclose(out, [1, np.sin(np.pi / 2 * 8 / 6), 0, 1, np.cos(3 * np.pi / 7)], atol=1e-6)
  assert_allclose(few_tool_calls(np.array([0.0, 1, 2])), [1, np.cos(np.pi / 3), np.cos(2 * np.pi / 5)], atol=1e-6)


def test_tool_cost():
  calls = np.array([[1, 2], [0, 3]])
  assert_allclose(tool_cost(calls), [3, 3])
  assert_allclose(tool_cost(calls, np.array([1.0, 0.5])), [2, 1.5])


def batch(seed):
  rng = np.random.default_rng(seed)
  valid = rng.random(N) < 0.8
  return dict(
    outcome=np.where(valid, rng.integers(0, 2, N), np.nan).astype(np.float32), group=rng.integers(0, 2, N), valid=valid,
    tool_cost=np.where(valid, rng.integers(0, 5, N), np.nan).astype(np.float32),
  ), np.arange(T) < rng.integers(1, T, N)[:, None]  # fmt: skip


@few
@given(seeds)
def test_gates_equal_loops_and_never_pay_a_failure(seed):
  columns, mask = batch(seed)
  outcome, cost, length = columns["outcome"], columns["tool_cost"], mask.sum(1)
  out = np.asarray(jit_gated(**columns, mask=mask))
  calls, solved = np.asarray(jit_calls(**columns)), np.asarray(jit_solved(**columns, reward=outcome))
  for n in range(N):
    won = [m for m in range(N) if columns["group"][m] == columns["group"][n] and outcome[m] == 1]
    if outcome[n] != 1:
      assert out[n] == calls[n] == solved[n] == 0
      continue
    least = [min(x[won]) for x in (cost, length)]
    deltas = [(x[n] - low) / (low + eps) for x, low, eps in zip((cost, length), least, (1, 1e-6))]
    assert_allclose(out[n], np.prod([2 / (1 + np.exp(d)) for d in deltas]), rtol=1e-4)
    assert 0 < out[n] <= 1 and (out[n] == 1) == (max(deltas) <= 0)
    assert 0 <= calls[n] <= 1 + 1e-6 and 0 < solved[n] <= 1
  p = np.random.default_rng(seed).permutation(N)
  assert_allclose(jit_gated(**{k: x[p] for k, x in columns.items()}, mask=mask[p]), out[p], rtol=1e-6)


@few
@given(seeds)
def test_the_filter_keeps_one_that_none_dominates(seed):
  columns, mask = batch(seed)
  outcome, cost, group, length = columns["outcome"], columns["tool_cost"], columns["group"], mask.sum(1)
  kept = np.asarray(jit_filter(outcome, cost, length.astype(np.float32), group))
  for g in set(group):
    won = [n for n in range(N) if group[n] == g and outcome[n] == 1]
    assert kept[group == g].sum() == bool(won)
    for n in np.flatnonzero(kept & (group == g)):
      assert n in won and not any(cost[m] < cost[n] and length[m] < length[n] for m in won)


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: reference_bonus(np.ones(1), np.ones(1), np.array([1.5]), np.ones(1)), r"reference_accuracy must lie in"),
    (lambda: gated_efficiency(np.ones(1), np.ones(2), np.ones((1, 2), bool), [0]), "tool_cost must have shape"),
    (lambda: gated_efficiency(np.ones(1), np.ones(1), np.ones((1, 2), bool), [1]), "group must hold ids"),
    (lambda: tool_cost(np.ones((1, 2)), np.ones(3)), "weight must have shape"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
