import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from ragged import N, S, T, one_row, pick, ragged, turn_lists

from jaxagent.advantages.group import group_centered, group_relative
from jaxagent.advantages.returns import (
  PromptRates,
  add_clipped_penalty,
  add_penalties_clipped,
  batch_standardized,
  minus_baseline,
  prompt_rates,
  rates_at,
  relative_per_reward,
  reward_to_go,
  reward_to_go_kl,
  standardize_tokens,
  success_rate,
  turn_relative,
  turn_relative_pooled,
  turn_returns,
  update_rates,
)
from jaxagent.scheduling import solve_rate_spread

TURNS = ("reward", "turn_reward", "mask", "turn")
seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)
jit_gdpo, jit_bws, jit_group = jax.jit(relative_per_reward), jax.jit(batch_standardized), jax.jit(group_relative)
jit_to_go, jit_tokens, jit_returns = jax.jit(reward_to_go), jax.jit(standardize_tokens), jax.jit(turn_returns)
jit_relative, jit_pooled, jit_update = jax.jit(turn_relative), jax.jit(turn_relative_pooled), jax.jit(update_rates)

# Tev's group of four: potential after each turn, 0.25 of its gain is the turn's reward, one rollout passes
POTENTIAL = [[0, 0.2, 0.2, 0.66], [0, 0.2, 0.5], [0, 0, 0.2, 0.5, 1], [0, 0]]
RETURNS = [[0.165, 0.115, 0.115], [0.125, 0.075], [1.25, 1.25, 1.2, 1.125], [0]]
PER_TURN = [[-0.4373, -0.6701, -1], [-0.5168, -0.7435], [1.7193, 1.4136, 1, 0], [-0.7652]]
POOLED = [[-0.692, -0.784, -0.784], [-0.765, -0.857], [1.3, 1.3, 1.208, 1.07], [-0.995]]


def tev():
  """In the shape of the ragged batches, so that nothing compiles twice."""
  mask, turn = np.zeros((N, T), bool), np.full((N, T), -1, np.int32)
  turn_reward, reward = np.zeros((N, S), np.float32), np.array([0, 0, 1, 0, np.nan, np.nan], np.float32)
  for n, potential in enumerate(POTENTIAL):
    gains = 0.25 * np.diff(potential)
    mask[n, : len(gains)], turn[n, : len(gains)], turn_reward[n, : len(gains)] = True, range(len(gains)), gains
  return dict(reward=reward, turn_reward=turn_reward, mask=mask, turn=turn, rollout=np.arange(N), gamma=1.0)


def test_agents_of_one_step_count_once_and_share_what_follows():
  """Two teams. In the first both agents act in step 1, in the second each in a step of its own."""
  turn = np.array([[0, 1, 2], [1, -1, -1], [0, 2, -1], [1, -1, -1]])
  columns = dict(
    reward=np.array([1.0, 1, 0, 0]), mask=turn >= 0, turn=turn, rollout=np.array([0, 0, 1, 1]),
    turn_reward=np.array([[0, 0.25, 0], [0, 0.5, 0], [0.5, 0, 0.125], [0, 1, 0]]),
  )  # fmt: skip
  returns = np.array([[1.75, 1.75, 1], [1.625, 1.125, 0.125]])[[0, 0, 1, 1]]
  assert_allclose(turn_returns(**columns), returns)
  relative = turn_relative(**columns, group=np.zeros(4, int), eps=0.0)  # of two, +-1
  assert_allclose(relative, [[1, 1, 1], [1, 0, 0], [-1, -1, 0], [-1, 0, 0]], atol=1e-6)
  six = returns[[0, 2]].ravel()
  pooled = turn_relative_pooled(**columns, group=np.zeros(4, int), eps=0.0)
  want = np.where(turn >= 0, np.take_along_axis((returns - six.mean()) / six.std(), np.maximum(turn, 0), 1), 0)
  assert_allclose(pooled, want, atol=1e-6)


def flat(ragged_rows):
  return [x for row in ragged_rows for x in row]


def test_golden_tev():
  batch, kept = tev(), tev()["mask"]
  returns = np.asarray(jit_returns(**batch))
  assert_allclose([returns[n, k] for n, row in enumerate(RETURNS) for k in range(len(row))], flat(RETURNS), atol=1e-6)
  batch |= dict(group=np.zeros(N, int), valid=np.arange(N) < 4)
  assert_allclose(returns[:4, 0], [0.165, 0.125, 1.25, 0], atol=1e-6)  # R = pass + 0.25 Phi of the end
  assert_allclose(jit_relative(**batch)[kept], flat(PER_TURN), atol=1e-4)
  assert_allclose(jit_pooled(**batch)[kept], flat(POOLED), atol=6e-4)


def test_golden_gdpo():
  rewards, group = np.array([[1.0, 0], [0, 1], [1, 1], [0, 0]]), np.array([0, 0, 1, 1])
  out = relative_per_reward(rewards, group, ddof=1)
  assert_allclose(out, [0, 0, 1.224639, -1.224639], atol=2e-6)
  assert_allclose(out * (np.std([0, 0, 1.414014, -1.414014], ddof=1) + 1e-4), [0, 0, 1.414014, -1.414014], atol=2e-5)


def test_gdpo_tells_apart_what_the_sum_does_not():
  rewards, group = np.array([[0.0, 0], [1, 0], [0, 0], [1, 1]]), np.array([0, 0, 1, 1])
  summed = group_relative(rewards.sum(1), group)
  assert_allclose(summed[1], summed[3], rtol=1e-5)  # sums [0, 1] and [0, 2] look alike
  out = relative_per_reward(rewards, group)
  assert_allclose(out[3] / out[1], 2.0, rtol=1e-3)


@pytest.mark.parametrize("function", [batch_standardized, lambda r: relative_per_reward(r[:, None], np.arange(24) % 3)])
def test_a_constant_added_to_all_rewards_changes_nothing(function):
  reward = np.random.default_rng(0).integers(-200, 200, 24) / 64  # reward + offset is exact in float32
  out = function((reward + 2.0**14).astype(np.float32))
  assert_allclose(out, function(reward.astype(np.float32)), atol=5e-6)


def test_golden_spo_tracker():
  rates = PromptRates(jnp.array([4.5]), jnp.array([4.5]), jnp.zeros(1, jnp.int32))
  task, outcome, event = np.zeros(3, int), np.array([1.0, 0, 1]), np.array([0, 1, 1])
  rates = rates_at(update_rates(rates, task, outcome, event), 3)
  assert_allclose([rates.alpha[0], rates.beta[0]], [4.450195, 3.780273], atol=2e-6)
  assert_allclose(success_rate(rates), [0.540698], atol=1e-6)
  assert_allclose(solve_rate_spread(success_rate(rates)), [0.548341], atol=1e-6)


def test_prior_of_the_tracker():
  rates = prompt_rates(np.array([4.0, 0, 8]), np.full(3, 8.0))
  assert_allclose(rates.alpha, [4.5, 0.5, 8.5])
  assert_allclose(rates.beta, [4.5, 8.5, 0.5])
  scaled = prompt_rates(np.array([4.0, 0, 8]), np.full(3, 8.0), mass=8.0)
  assert_allclose(scaled.alpha + scaled.beta, [8, 8, 8], rtol=1e-6)
  assert_allclose(success_rate(scaled), success_rate(rates), rtol=1e-6)


LENGTHS = np.array([100, 400, 50, 200])
TOKENS = np.arange(400)[None] < LENGTHS[:, None]


def test_golden_spo_muon():
  advantage, penalties = np.array([0.6, -0.4, 0.9, -0.1]), np.array([[-0.4, 0], [0, 0], [0.1, 0], [-0.05, 0]])
  shifted = add_clipped_penalty(advantage, penalties)
  assert_allclose(shifted, [0.35, -0.4, 1, -0.15], atol=1e-6)
  out = np.asarray(standardize_tokens(shifted, TOKENS, ddof=1))
  assert_allclose(out[:, 0], [1.24484, -0.66053, 2.89616, -0.02541], atol=2e-5)
  assert_allclose(out.sum() / TOKENS.sum(), 0, atol=1e-5)
  raw = np.asarray(shifted)
  mean = (raw * LENGTHS).sum() / LENGTHS.sum()
  assert_allclose(mean, -0.14, atol=1e-6)
  assert_allclose(np.sqrt((LENGTHS * (raw - mean) ** 2).sum() / (LENGTHS.sum() - 1)), 0.393624, atol=1e-6)
  each = (raw - raw.mean()) / raw.std(ddof=1)  # per trajectory instead: a residual in the token mean
  assert_allclose(each, [0.2428, -0.9712, 1.2949, -0.5665], atol=6e-5)
  assert_allclose((each * LENGTHS).sum() / LENGTHS.sum(), -0.55035, atol=1e-4)


def test_penalties_clipped_one_by_one():
  penalties = np.array([[-0.4, -0.4], [0.1, -0.3]])
  assert_allclose(add_clipped_penalty(np.zeros(2), penalties), [-0.25, -0.2], atol=1e-6)
  assert_allclose(add_penalties_clipped(np.zeros(2), penalties), [-0.5, -0.15], atol=1e-6)


def test_golden_batch_standardised():
  out = batch_standardized(np.array([1.3825, 1, 0, 1.0042, 0, 0]))
  assert_allclose(out, [1.4141, 0.7529, -0.9757, 0.7601, -0.9757, -0.9757], atol=2e-4)


def test_minus_baseline():
  assert_allclose(minus_baseline(np.array([1.0, np.nan]), np.full(2, 0.25), valid=np.array([True, False])), [0.75, 0])


def test_kl_in_the_reward():
  mask, turn = one_row(2, 1)
  out = reward_to_go_kl([1.0], np.zeros((1, 2)), mask, turn, np.array([[-1.0, -1, -2]]), np.full((1, 3), -1.5),
                        coefficient=0.1)  # fmt: skip
  assert_allclose(out, [[1 - 0.05 - 0.05 + 0.05, 1 - 0.05 + 0.05, 1.05]], atol=1e-6)


@few
@given(seeds)
def test_reward_to_go_equals_a_loop(seed):
  batch = ragged(seed)
  out = np.asarray(jit_to_go(**pick(batch, *TURNS), gamma=0.9))
  for n in range(N):
    ahead, reward, want = 0.0, batch["reward"][n], np.zeros(T)
    for k, places in reversed(turn_lists(batch, n)):
      for t in reversed(places):
        ahead = reward + batch["turn_reward"][n, k] * (t == places[-1]) + 0.9 * ahead
        want[t], reward = ahead, 0.0
    assert_allclose(out[n], want, atol=1e-5)


@few
@given(seeds)
def test_tokens_have_mean_zero_and_spread_one(seed):
  batch = ragged(seed)
  mask = batch["mask"]
  for x in (batch["reward"], batch["value"]):
    out = np.asarray(jit_tokens(x, mask))
    assert (out[~mask] == 0).all() and np.isfinite(out).all()
    real = np.broadcast_to(x if x.ndim == 2 else x[:, None], mask.shape)[mask]
    if len(real) and real.max() - real.min() > 1e-6 * max(1, np.abs(real).max()):
      assert_allclose(out[mask], (real - real.mean()) / (real.std() + 1e-8), atol=1e-4)
    else:
      assert_array_equal(out, 0)


def returns_by_loops(batch, gamma):
  """{(rollout, turn): return}, with the rows of a rollout put together."""
  received, out = {}, {}
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      received[batch["rollout"][n], k] = batch["turn_reward"][n, k]
  for r in {r for r, _ in received}:
    turns = sorted(k for q, k in received if q == r)
    ahead = batch["reward"][next(n for n in range(N) if batch["rollout"][n] == r and batch["valid"][n])]
    for i, k in enumerate(reversed(turns)):
      out[r, k] = ahead = received[r, k] + (ahead if i == 0 else gamma * ahead)
  return out


def contiguous(batch):
  """Row 0 and its branch fall out together: a rollout half invalid has a hole in its turns."""
  batch["valid"] &= batch["valid"][batch["rollout"]]
  return {**batch, "mask": batch["mask"] & batch["valid"][:, None]}


@few
@given(seeds)
def test_turns_equal_loops_by_index_and_pooled(seed):
  batch = contiguous(ragged(seed))
  columns = pick(batch, *TURNS, "group", "valid", "rollout")
  want = returns_by_loops(batch, 0.9)
  group = {batch["rollout"][n]: batch["group"][n] for n in range(N)}
  for f, key in ((jit_relative, lambda r, k: (group[r], k)), (jit_pooled, lambda r, k: group[r])):
    out = np.asarray(f(**columns, gamma=0.9))
    assert (out[~batch["mask"]] == 0).all()
    for n in range(N):
      for k, places in turn_lists(batch, n):
        r = batch["rollout"][n]
        others = np.array([x for (q, j), x in want.items() if key(q, j) == key(r, k)])
        differ = np.ptp(others) > 1e-6 * max(1, np.abs(others).max())
        relative = (want[r, k] - others.mean()) / (others.std() + 1e-6) if differ else 0
        assert_allclose(out[n, places], relative, atol=2e-3)


@few
@given(seeds)
def test_permutation_and_garbage(seed):
  batch = contiguous(ragged(seed))
  columns = pick(batch, *TURNS, "group", "valid", "rollout")
  p = np.random.default_rng(seed).permutation(N)
  out = np.asarray(jit_relative(**columns, gamma=0.9))
  assert_allclose(jit_relative(**{k: x[p] for k, x in columns.items()}, gamma=0.9), out[p], atol=1e-4)
  invalid = ~batch["valid"]
  other = {**columns, "reward": np.where(invalid, 1e9, batch["reward"]).astype(np.float32)}
  assert_array_equal(jit_relative(**other, gamma=0.9), out)


@few
@given(seeds)
def test_the_tracker_forgets_the_order_of_receipt(seed):
  rng = np.random.default_rng(seed)
  rates = prompt_rates(np.arange(4.0), np.full(4, 8.0))
  task, event = rng.integers(0, 4, N), rng.integers(0, 20, N)
  outcome, valid = rng.integers(0, 2, N).astype(np.float32), rng.random(N) < 0.8
  args, p = (task, np.where(valid, outcome, np.nan), event), rng.permutation(N)
  first = np.arange(N) < rng.integers(0, N)
  whole = rates_at(jit_update(rates, *args, valid=valid), 25)
  shuffled = rates_at(jit_update(rates, *(x[p] for x in args), valid=valid[p]), 25)
  halves = rates_at(jit_update(jit_update(rates, *args, valid=valid & ~first), *args, valid=valid & first), 25)
  for other in (shuffled, halves):
    assert_allclose(other.alpha, whole.alpha, rtol=1e-5)
    assert_allclose(other.beta, whole.beta, rtol=1e-5)
  for q in range(4):  # against the definition
    weight = np.where(valid & (task == q), 0.875 ** (25.0 - event), 0)
    want = 0.875**25 * rates.alpha[q] + (weight * outcome).sum()
    assert_allclose(whole.alpha[q], want, rtol=1e-5)


@few
@given(seeds)
def test_gdpo_with_one_reward_is_grpo_standardised_once_more(seed):
  batch = ragged(seed)
  columns = pick(batch, "group", "valid", "rollout")
  out = jit_gdpo(batch["reward"][:, None], **columns, scale_eps=1e-6)
  again = jit_bws(jit_group(batch["reward"], **columns), **pick(batch, "valid", "rollout"))
  assert_allclose(out, again, atol=1e-3)


def test_equal_rewards_give_exactly_zero():
  same, ids, valid = np.full(N, 0.35, np.float32), np.arange(N), np.ones(N, bool)
  group, mask = np.zeros(N, int), np.ones((N, T), bool)
  turns = dict(turn_reward=np.zeros((N, S), np.float32), mask=mask, turn=np.zeros((N, T), np.int32))
  relative = jit_relative(same, group=group, valid=valid, rollout=ids, gamma=1.0, **turns)
  assert_array_equal(relative, np.zeros((N, T)))
  assert_array_equal(jit_gdpo(same[:, None], group=group, valid=valid, rollout=ids, scale_eps=1e-4), np.zeros(N))
  assert_array_equal(jit_bws(same, valid=valid, rollout=ids), np.zeros(N))
  for kept in (mask, ~mask):
    assert_array_equal(jit_tokens(same, kept), np.zeros((N, T)))


def test_reinforce_plus_plus_baseline_is_two_slots():
  mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]], bool)
  reward, group = np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1])
  out = standardize_tokens(group_centered(reward, group), mask)
  centered = np.array([0.5, -0.5, 0, 0])[:, None] * np.ones((4, 3))
  want = (centered - centered[mask].mean()) / centered[mask].std()
  assert_allclose(out, np.where(mask, want, 0), rtol=1e-5)


def test_gradient_of_standardised_tokens_is_finite_where_all_are_equal():
  grad = jax.jit(jax.grad(lambda x: jnp.sum(standardize_tokens(x, jnp.ones((2, 3), bool)) ** 2)))(jnp.ones(2))
  assert np.isfinite(grad).all()


ROWS = dict(reward=np.zeros(3), turn_reward=np.zeros((3, 1)), mask=np.ones((3, 2), bool), turn=np.zeros((3, 2), int))


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: turn_relative(**ROWS, group=np.array([0, 3, 0])), r"group must hold ids in \[0, 3\), got 3 at index 1"),
    (lambda: turn_relative(**ROWS, group=np.zeros(2, int)), "group must have shape"),
    (lambda: turn_relative(**{**ROWS, "reward": np.full(3, np.nan)}, group=np.zeros(3, int)), "reward must be finite"),
    (lambda: standardize_tokens(np.array([0, np.nan, 0]), ROWS["mask"]), "advantage must be finite, got nan"),
    (lambda: relative_per_reward(np.full((3, 1), np.inf), np.zeros(3, int)), "rewards must be finite"),
    (lambda: reward_to_go(**{**ROWS, "turn": np.ones((3, 2), int)}), "turn must hold ids"),
    (lambda: relative_per_reward(np.zeros((3, 2)), np.zeros(3, int), weights=(1.0,)), "weights must hold one number"),
    (lambda: standardize_tokens(np.zeros((3, 3)), ROWS["mask"]), "advantage must have shape"),
    (lambda: update_rates(prompt_rates(np.zeros(2), np.ones(2)), [2], [1.0], [0]), "task must hold ids in"),
    (lambda: update_rates(prompt_rates(np.zeros(2), np.ones(2)), [0], [1.5], [0]), r"outcome must lie in \[0, 1\]"),
    (lambda: add_clipped_penalty(np.zeros(2), np.zeros(2)), "penalties must have shape"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()


def test_shapes_of_results():
  batch = ragged(0)
  assert jit_returns(**pick(batch, *TURNS, "rollout"), gamma=1.0).shape == (N, S)
