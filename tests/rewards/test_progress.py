import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from ragged import N, S, one_row, pick, ragged, turn_lists

from jaxagent.advantages.returns import turn_returns
from jaxagent.rewards.progress import (
  add_potential_shaping,
  add_potential_shaping_bootstrapped,
  all_prerequisites,
  contract_progress,
  last_known,
  progress_return,
  progress_rewards,
  shaping_term,
)

seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)
jit_shaped, jit_rewards = jax.jit(add_potential_shaping), jax.jit(progress_rewards)
jit_bootstrapped, jit_returns = jax.jit(add_potential_shaping_bootstrapped), jax.jit(turn_returns)

# Tev's DAG: A .2; B .3 after A; C .3 after A and B; D .2 after A
WEIGHT = np.array([0.2, 0.3, 0.3, 0.2])
DIRECT = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], bool)
CLOSURE = all_prerequisites(DIRECT)


def test_closure():
  assert_array_equal(CLOSURE, [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
  chain = np.eye(9, k=-1, dtype=bool)
  assert_array_equal(all_prerequisites(chain), np.tril(np.ones((9, 9), bool), -1))
  with pytest.raises(ValueError, match="stage 0 depends on itself"):
    all_prerequisites(chain | chain.T)


@pytest.mark.parametrize("scores, want", [((1, 0.5, 1, 0.8), 0.66), ((0, 1, 1, 1), 0.0), ((1, 1, 1, 1), 1.0)])
def test_golden_contract(scores, want):
  assert_allclose(contract_progress(np.array(scores), WEIGHT, CLOSURE), want, atol=1e-6)


@few
@given(seeds)
def test_progress_is_a_share_that_rises_with_every_score(seed):
  rng = np.random.default_rng(seed)
  scores = rng.random((5, 4)).astype(np.float32)
  phi = np.asarray(contract_progress(scores, WEIGHT, CLOSURE))
  assert ((phi >= 0) & (phi <= 1)).all()
  better = np.minimum(1, scores + rng.random((5, 4)) * (rng.random((5, 4)) < 0.3)).astype(np.float32)
  assert (contract_progress(better, WEIGHT, CLOSURE) >= phi - 1e-6).all()
  gated = [[min([s[v], *s[CLOSURE[v]]]) for v in range(4)] for s in scores]
  assert_allclose(phi, gated @ WEIGHT, atol=1e-6)


POTENTIAL = np.array([[0, 0.2, 0.2, 0.66, 9], [0, 0.2, 0.5, 9, 9], [0, 0, 0.2, 0.5, 1], [0, 0, 9, 9, 9]], float)


def test_golden_tev_rewards():
  turns = [3, 2, 4, 1]
  mask = np.arange(4)[None] < np.array(turns)[:, None]
  turn, passed = np.where(mask, np.arange(4), -1), np.array([0.0, 0, 1, 0])
  rewards = progress_rewards(POTENTIAL, mask, turn)
  assert_allclose(rewards, [[0.05, 0, 0.115, 0], [0.05, 0.075, 0, 0], [0, 0.05, 0.075, 0.125], [0, 0, 0, 0]], atol=1e-6)
  returns = turn_returns(passed, rewards, mask, turn)
  want = [[0.165, 0.115, 0.115, 0], [0.125, 0.075, 0, 0], [1.25, 1.25, 1.2, 1.125], [0, 0, 0, 0]]
  assert_allclose(returns, want, atol=1e-6)
  final = np.array([POTENTIAL[n, k] for n, k in enumerate(turns)])
  total = progress_return(passed, final)
  assert_allclose(total, [0.165, 0.125, 1.25, 0], atol=1e-6)
  assert_allclose(total, passed + np.sum(rewards, 1), atol=1e-6)  # sum of r_t is R
  assert total[2] == 1.25 and (total[passed == 0] < 0.25).all()  # a pass is always above a failure


def batch_with_potential(seed):
  batch = ragged(seed)
  rng = np.random.default_rng(seed)
  potential = rng.normal(size=(N, S + 1)).astype(np.float32) * 20
  return {**batch, "potential": potential, "truncated": (rng.random(N) < 0.4)[batch["rollout"]]}


@few
@given(seeds)
def test_shaping_is_a_baseline_of_the_state(seed):
  """G'_s = G_s - Phi(s), discounting included; over the whole rollout only -Phi(start) is left."""
  batch = batch_with_potential(seed)
  batch["rollout"] = np.arange(N)  # potentials of a branch are its own here
  for n in range(N):  # turns from 0 in every row
    shift = min((k for k, _ in turn_lists(batch, n)), default=0)
    batch["turn"][n] = np.where(batch["mask"][n], batch["turn"][n] - shift, -1)
  batch["turn_reward"] = np.zeros_like(batch["turn_reward"])
  columns = pick(batch, "turn_reward", "potential", "mask", "turn")
  returns = [
    np.asarray(jit_returns(batch["reward"], r, batch["mask"], batch["turn"], gamma=0.9))
    for r in (batch["turn_reward"], jit_shaped(**columns, gamma=0.9))
  ]
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      assert_allclose(returns[1][n, k], returns[0][n, k] - batch["potential"][n, k], atol=1e-3)


@few
@given(seeds)
def test_shaping_equals_a_loop_over_rollouts_with_branches(seed):
  batch = batch_with_potential(seed)
  batch["turn_reward"] = np.nan_to_num(batch["turn_reward"])
  columns = pick(batch, "turn_reward", "potential", "mask", "turn", "rollout")
  plain = np.asarray(jit_shaped(**columns, gamma=0.9))
  kept = np.asarray(jit_bootstrapped(**columns, truncated=batch["truncated"], gamma=0.9))
  last = {}
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      last[batch["rollout"][n]] = max(k, last.get(batch["rollout"][n], 0))
  want = [batch["turn_reward"].copy(), batch["turn_reward"].copy()]
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      end = k == last[batch["rollout"][n]]
      phi, after = batch["potential"][n, k : k + 2]
      want[0][n, k] += 0.9 * after * (not end) - phi
      want[1][n, k] += 0.9 * after * (not end or batch["truncated"][n]) - phi
  assert_allclose(plain, want[0], atol=1e-4)
  assert_allclose(kept, want[1], atol=1e-4)


@few
@given(seeds)
def test_places_past_the_end_change_nothing(seed):
  batch = batch_with_potential(seed)
  columns = pick(batch, "mask", "turn")
  phi = np.full((N, S + 1), np.nan, np.float32)
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      phi[n, k : k + 2] = batch["potential"][n, k : k + 2]
  out = np.asarray(jit_rewards(phi, **columns))
  assert np.isfinite(out).all()
  assert_array_equal(out, jit_rewards(batch["potential"], **columns))


def test_unparsable_potentials_reuse_the_one_before():
  out = last_known(np.array([[np.nan, 0.5, np.nan, np.nan, 0.25]]))
  assert_allclose(out, [[0, 0.5, 0.5, 0.5, 0.25]])


# --- the theorem, on an MDP of three states: s0 -a0-> s1 (r 0), s0 -a1-> s0 (0), s1 -a0-> T (1), s1 -a1-> s0 (.2)

GAMMA = 0.9
STEPS = {(0, 0): (1, 0.0), (0, 1): (0, 0.0), (1, 0): (2, 1.0), (1, 1): (0, 0.2)}


def shaped_values(potential, *, corrected):
  """Value iteration with the shaping terms evaluated once."""
  term = {
    (s, a): np.asarray(shaping_term(potential[s], potential[t], t == 2 and corrected, gamma=GAMMA))
    for (s, a), (t, _) in STEPS.items()
  }
  q = dict.fromkeys(STEPS, 0.0)
  for _ in range(400):
    value = [max(q[0, 0], q[0, 1]), max(q[1, 0], q[1, 1]), 0.0]
    q = {k: r + float(term[k]) + GAMMA * value[t] for k, (t, r) in STEPS.items()}
  return np.array(list(q.values()))


BASE = [0.9474, 0.8526, 1.0, 1.0526]


@pytest.mark.parametrize(
  "potential, corrected, want, greedy",
  [
    ((0.0, 0.0, 0.0), True, BASE, (0, 1)),
    ((0.2, 0.8, 1.0), True, [0.7474, 0.6526, 0.2, 0.2526], (0, 1)),
    ((0.2, 0.8, 1.0), False, [1.51, 1.339, 1.1, 0.939], (0, 0)),  # the policy flips without the terminal correction
    ((20.0, -20.0, -20.0), True, [-19.0526, -19.1474, 21, 21.0526], (0, 1)),
    ((20.0, -20.0, -20.0), False, [-19.0526, -19.1474, 3, 21.0526], (0, 1)),
    ((0.0, 20.0, 20.0), True, [0.9474, 0.8526, -19, -18.9474], (0, 1)),
    ((0.0, 20.0, 20.0), False, [17.1, 15.39, -1, -4.41], (0, 0)),
  ],
)
def test_the_optimal_policy_of_an_mdp_is_unchanged(potential, corrected, want, greedy):
  q = shaped_values(potential, corrected=corrected)
  assert_allclose(q, want, atol=1e-4)
  assert (int(q[1] > q[0]), int(q[3] > q[2])) == greedy
  if corrected:
    base = shaped_values((0.0, 0.0, 0.0), corrected=True)
    assert_allclose(q, base - np.array([potential[0]] * 2 + [potential[1]] * 2), atol=1e-4)  # Q' = Q - Phi


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=3, max_size=3))
def test_any_potential_leaves_the_policy(potential):
  q = shaped_values(tuple(potential), corrected=True)
  assert (int(q[1] > q[0]), int(q[3] > q[2])) == (0, 1)


MASK, TURN = one_row(1, 1)


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: contract_progress(np.full(4, 1.5), WEIGHT, CLOSURE), r"scores must lie in \[0, 1\]"),
    (lambda: contract_progress(np.ones(4), WEIGHT * 2, CLOSURE), "weight must sum to 1, got 2"),
    (lambda: contract_progress(np.ones(3), WEIGHT, CLOSURE), "scores must have one entry per stage"),
    (lambda: progress_return(np.zeros(2), np.array([0, 1.5])), r"progress must lie in \[0, 1\]"),
    (lambda: progress_rewards(np.array([[0, 2, 0.0]]), MASK, TURN), r"potential must lie in \[0, 1\]"),
    (lambda: progress_rewards(np.zeros((1, 2)), MASK, TURN), "turn must hold ids"),
    (lambda: add_potential_shaping(np.zeros((1, 3)), np.zeros((1, 3)), MASK, TURN), "potential must have shape"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
