import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from ragged import N, S, T, one_row, pick, ragged, turn_lists

from jaxagent.advantages.gae import (
  adaptive_lam,
  add_token_credit,
  gae,
  length_adaptive_gae,
  multiply_token_credit,
  standardize_turns,
  token_rewards,
  turn_gae,
  value_share_between_turns,
  value_targets,
)

COLUMNS = ("reward", "turn_reward", "value", "mask", "turn", "bootstrap")
CRITIC = [gae, length_adaptive_gae, value_targets, turn_gae]
CREDIT = [add_token_credit, multiply_token_credit]
JITTED = {f: jax.jit(f) for f in [*CRITIC, *CREDIT, standardize_turns]}


def run(f, *args, **kwargs):
  """The jitted function with its own defaults as arguments, so that it compiles once in this file."""
  parameters = inspect.signature(f).parameters.items()
  defaults = {k: p.default for k, p in parameters if isinstance(p.default, float)}
  return JITTED[f](*args, **{**defaults, **kwargs})


seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)

# the worked example of MPO: three turns of 3, 2 and 4 tokens
VALUE = [0.40, 0.44, 0.38, 0.55, 0.50, 0.62, 0.70, 0.66, 0.74]
TURN_GAE = [0.4492] * 3 + [0.374] * 2 + [0.38] * 4
ADDITIVE = [0.44965, 0.414725, 0.483225, 0.346, 0.402, 0.418426, 0.351958, 0.408308, 0.341308]
INSIDE = [0.136425, 0.1015, 0.17, 0.064, 0.12, 0.337117, 0.27065, 0.327, 0.26]
FLAT = [0.4522, 0.4338, 0.5198, 0.3682, 0.4403, 0.3371, 0.2707, 0.327, 0.26]


def example(context=0):
  """One row of three turns, in the shape of the ragged batches, so that nothing compiles twice."""
  mask, turn = np.zeros((N, T), bool), np.full((N, T), -1, np.int32)
  one = one_row(3, 2, 4, context=context)
  mask[:1, : one[0].shape[1]], turn[:1, : one[0].shape[1]] = one
  value = np.full(mask.shape, np.nan, np.float32)
  value[mask] = VALUE
  zeros = np.zeros(N, np.float32)
  return dict(
    reward=zeros + 1, turn_reward=np.zeros((N, S), np.float32), value=value, mask=mask, turn=turn, bootstrap=zeros
  )


@pytest.mark.parametrize("context", [0, 2])
def test_golden_mpo(context):
  batch = example(context)
  kept = batch["mask"]
  turns = run(turn_gae, **batch)
  credit = run(add_token_credit, turns, **batch)
  assert_allclose(turns[kept], TURN_GAE, atol=1e-6)
  assert_allclose(credit[kept], ADDITIVE, atol=1e-6)
  assert_allclose(run(gae, **batch)[kept], FLAT, atol=6e-5)
  assert_allclose(value_share_between_turns(batch["value"], kept, batch["turn"]), 0.921394, atol=1e-6)
  mean = np.repeat([np.mean(INSIDE[:3]), np.mean(INSIDE[3:5]), np.mean(INSIDE[5:])], [3, 2, 4])
  assert_allclose(credit[kept] - turns[kept] + mean, INSIDE, atol=1e-6)
  assert (np.asarray(credit)[~kept] == 0).all()


def test_golden_mpo_turn_deltas():  # lam 0 leaves the deltas
  assert_allclose(run(turn_gae, **example(), lam=0.0)[0, [0, 3, 5]], [0.15, 0.07, 0.38], atol=1e-6)


def test_golden_t1():  # gamma = lam = 1 and a terminal reward: return minus value
  batch = example()
  batch["mask"] = batch["mask"] & (np.arange(T) < 3)
  batch["reward"] = batch["reward"] * np.float32(0.5)
  batch["value"][0, :3] = [0.3, 0.35, 0.5]
  assert_allclose(run(gae, **batch, lam=1.0)[0, :3], [0.2, 0.15, 0.0], atol=1e-6)
  assert_allclose(run(gae, **batch, lam=0.0)[0, :3], [0.05, 0.15, 0.0], atol=1e-6)


def test_golden_length_adaptive():
  mask = np.arange(4100)[None] < np.array([20, 100, 400, 1000, 4000, 3, 0])[:, None]
  assert_allclose(adaptive_lam(mask), [0, 0.8, 0.95, 0.98, 0.995, 0, 0], atol=1e-6)


def by_loops(batch, n, gamma, lam):
  reward, after, ahead, out = batch["reward"][n], batch["bootstrap"][n], 0.0, np.zeros(T)
  for k, places in reversed(turn_lists(batch, n)):
    for t in reversed(places):
      received = reward + batch["turn_reward"][n, k] * (t == places[-1])
      ahead = received + gamma * after - batch["value"][n, t] + gamma * lam * ahead
      out[t], after, reward = ahead, batch["value"][n, t], 0.0
  return out


@few
@given(seeds)
def test_tokens_equal_a_loop(seed):
  batch = ragged(seed)
  out = run(gae, **pick(batch, *COLUMNS), gamma=0.9, lam=0.8)
  assert_allclose(out, [by_loops(batch, n, 0.9, 0.8) for n in range(N)], atol=1e-5)
  adaptive = run(length_adaptive_gae, **pick(batch, *COLUMNS), alpha=0.4)
  lam = np.maximum(0, 1 - 1 / (0.4 * np.maximum(batch["mask"].sum(1), 1)))
  assert_allclose(adaptive, [by_loops(batch, n, 1.0, lam[n]) for n in range(N)], atol=1e-5)


def turns_by_loops(batch, n, gamma, lam):
  reward, after, ahead, out = batch["reward"][n], batch["bootstrap"][n], 0.0, np.zeros(T)
  for k, places in reversed(turn_lists(batch, n)):
    before = batch["value"][n, places[0]]
    ahead = reward + batch["turn_reward"][n, k] + gamma * after - before + gamma * lam * ahead
    out[places], after, reward = ahead, before, 0.0
  return out


@few
@given(seeds)
def test_turns_equal_a_loop(seed):
  batch = ragged(seed)
  out = run(turn_gae, **pick(batch, *COLUMNS), gamma=0.9, lam=0.7)
  assert_allclose(out, [turns_by_loops(batch, n, 0.9, 0.7) for n in range(N)], atol=1e-5)


@few
@given(seeds)
def test_credit_keeps_the_mean_of_every_turn(seed):
  batch = ragged(seed)
  columns = pick(batch, *COLUMNS)
  turns = np.asarray(run(turn_gae, **columns))
  added = np.asarray(run(add_token_credit, turns, **columns))
  multiplied = np.asarray(run(multiply_token_credit, turns, **columns, strength=0.5))
  assert (multiplied * turns >= 0).all()
  for n in range(N):
    for _, places in turn_lists(batch, n):
      for credited in (added, multiplied):
        assert_allclose(credited[n, places].mean(), turns[n, places[0]], atol=1e-5, rtol=1e-5)
        if len(places) == 1:
          assert_allclose(credited[n, places], turns[n, places], rtol=1e-5)
  for f in CREDIT:  # no strength: the turn's advantage at every token
    assert_allclose(run(f, turns, **columns, strength=0.0), turns, atol=1e-5, rtol=1e-5)


def test_multiplicative_credit_equals_a_loop():
  batch = example()
  turns = np.asarray(run(turn_gae, **batch))
  want = []
  for places in ([0, 1, 2], [3, 4], [5, 6, 7, 8]):
    a = np.array(INSIDE)[places]
    odds = np.exp(np.sign(turns[0, places]) * a / (a.std() + 1e-6))
    want += list(turns[0, places] * len(places) * odds / odds.sum())
  assert_allclose(run(multiply_token_credit, turns, **batch)[0, :9], want, rtol=1e-4)


@few
@given(seeds)
def test_monte_carlo_targets_do_not_depend_on_the_values(seed):
  batch = ragged(seed)
  batch["bootstrap"][:] = 0
  columns = pick(batch, *COLUMNS)
  a = run(value_targets, **columns)
  b = run(value_targets, **{**columns, "value": batch["value"] * 7 + 1})
  assert_allclose(a, b, atol=2e-5)


@few
@given(seeds)
def test_turns_are_standardised_each_once(seed):
  batch = ragged(seed)
  turns = run(turn_gae, **pick(batch, *COLUMNS))
  out = np.asarray(run(standardize_turns, turns, batch["mask"], batch["turn"]))
  each = [out[n, places[0]] for n in range(N) for _, places in turn_lists(batch, n)]
  if len(each) > 1:
    assert_allclose([np.mean(each), np.std(each)], [0, 1], atol=1e-3)
  else:
    assert_array_equal(out, 0)


@few
@given(seeds, st.floats(-1e9, 1e9))
def test_masked_places_and_other_rows_change_nothing(seed, garbage):
  batch = ragged(seed)
  other = {**batch, "value": np.where(batch["mask"], batch["value"], np.float32(garbage))}
  p = np.random.default_rng(seed).permutation(N)
  for f in CRITIC:
    out = np.asarray(run(f, **pick(batch, *COLUMNS)))
    assert np.isfinite(out).all() and (out[~batch["mask"]] == 0).all()
    assert_array_equal(run(f, **pick(other, *COLUMNS)), out)
    assert_array_equal(run(f, **{k: batch[k][p] for k in COLUMNS}), out[p])


def test_one_turn_is_reward_minus_value():
  mask, turn = one_row(3)
  out = turn_gae([2.0], np.zeros((1, 1)), np.full((1, 3), 0.25), mask, turn)
  assert_allclose(out, [[1.75] * 3])


def test_bootstrap_enters_through_the_last_delta_only():
  batch = example()
  del batch["bootstrap"]
  cut, done = (run(turn_gae, **batch, bootstrap=np.full(N, b, np.float32), lam=0.0) for b in (0.3, 0.0))
  assert_allclose((cut - done)[0, :9], [0.0] * 5 + [0.3] * 4, atol=1e-6)


def test_a_turn_without_tokens_hands_its_reward_to_the_turn_before():
  mask, turn = one_row(2, 1, 2)
  mask[0, 2] = False
  out = token_rewards([1.0], np.array([[0.25, 0.5, 0.125]]), mask, turn)
  assert_allclose(out, [[0, 0.75, 0, 0, 1.125]])
  advantage = turn_gae([0.0], np.zeros((1, 3)), np.ones((1, 5)), mask, turn)
  assert_allclose(advantage, [[-0.8, -0.8, 0, -1, -1]])  # and is no turn of its own: two deltas, 0 and -1


def test_share_of_variance_at_its_ends():
  mask, turn = one_row(2, 2)
  assert_allclose(value_share_between_turns(np.array([[1.0, 1.0, 3.0, 3.0]]), mask, turn), 1.0)
  assert_allclose(value_share_between_turns(np.array([[1.0, 3.0, 1.0, 3.0]]), mask, turn), 0.0, atol=1e-7)
  assert np.isnan(value_share_between_turns(np.full((1, 4), 0.35), mask, turn))


@pytest.mark.parametrize("f", [gae, turn_gae])
def test_gradients_are_finite_beside_masked_garbage(f):
  batch = ragged(3)
  columns = pick(batch, *COLUMNS)
  grad = jax.jit(jax.grad(lambda v: jnp.sum(f(**{**columns, "value": v}) ** 2)))(jnp.asarray(batch["value"]))
  grad = np.asarray(grad)
  assert np.isfinite(grad).all() and (grad[~batch["mask"]] == 0).all() and np.abs(grad[batch["mask"]]).max() > 0


@pytest.mark.parametrize("f", CREDIT)
def test_gradients_of_credit_are_finite_at_equal_values(f):
  batch = example()

  def loss(v):
    return jnp.sum(f(jnp.ones((N, T)), **{**batch, "value": v}) ** 2)

  assert np.isfinite(jax.jit(jax.grad(loss))(jnp.zeros((N, T)))).all()


@pytest.mark.parametrize(
  "change, said",
  [
    (dict(value=np.zeros((6, 8))), r"value must have shape .N T. with N=6, T=24, got .6, 8."),
    (dict(reward=np.zeros(2)), "reward must have shape"),
    (dict(reward=np.array([np.nan, 0, 0, 0, 0, 0])), "reward must be finite, got nan at index 0"),
    (dict(turn_reward=np.zeros(3)), "turn_reward must have shape"),
    (dict(bootstrap=np.zeros((1, 1))), "bootstrap must have shape"),
    (dict(turn_reward=np.zeros((6, 2))), r"turn must hold ids in \[0, 2\), got 2 at index 0, 5"),
  ],
)
def test_bad_input_is_named(change, said):
  with pytest.raises(ValueError, match=said):
    gae(**{**example(), **change})
