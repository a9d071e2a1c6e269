"""Surrogates beyond ppo_clip and gspo, on packed rows of ragged segments and turns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses import (
  cispo,
  cispo_capped,
  divergence_clip_kl,
  divergence_clip_tv,
  dual_clip,
  gmpo,
  gspo,
  mode_token_clip,
  ppo_clip,
  sapo,
  sequence_mean,
  sequence_sum,
  token_mean,
  truncated_importance,
  turn_clip,
  turn_mean_clip,
  two_sided_clip,
  vespo,
)

gmpo, gspo, vespo, turn_clip, turn_mean_clip = map(jax.jit, (gmpo, gspo, vespo, turn_clip, turn_mean_clip))
ELEMENTWISE = [dual_clip, two_sided_clip, cispo, cispo_capped, sapo, divergence_clip_tv, divergence_clip_kl]
BY_SEGMENT = [gmpo, vespo, turn_clip, turn_mean_clip]
WIDE = dict(low=0.2, high=0.28)


def grad(function, argnums=0):
  return jax.jit(jax.grad(function, argnums))


def at(function, ratio, advantage, logp=None, **settings):
  """The surrogate of one token."""
  logp = jnp.log(jnp.float32(ratio)) - 8.0 if logp is None else jnp.float32(logp)
  old = logp - jnp.log(jnp.float32(ratio))
  return function(logp[None], old[None], jnp.full(1, float(advantage)), **settings)[0]


@pytest.mark.parametrize(
  "function, ratio, advantage, want",
  [
    (partial(dual_clip, **WIDE), 1.5, 1, -1.28),
    (partial(dual_clip, **WIDE), 1.5, -1, 1.5),
    (partial(dual_clip, **WIDE), 0.5, 1, -0.5),
    (partial(dual_clip, **WIDE), 0.5, -1, 0.8),
    (partial(dual_clip, **WIDE), 5, -1, 3),
    (partial(dual_clip, cap=2.0, **WIDE), 5, -1, 2),  # SPO++
    (partial(dual_clip, cap=2.0, **WIDE), 5, 1, -1.28),
    (partial(two_sided_clip, **WIDE), 5, -1, 4),
    (partial(two_sided_clip, **WIDE), 5, 1, -1.28),
    (partial(two_sided_clip, **WIDE), 0.5, -1, 0.8),
    (sapo, 1, 1, -2),
    (sapo, 1.5, 1, -2.489837),
    (sapo, 1.5, -1, 2.393585),
    (sapo, 3, -1, 3.393917),
  ],
)
def test_golden(function, ratio, advantage, want):
  assert_allclose(at(function, ratio, advantage), want, rtol=2e-6)


def test_cispo_golden_of_both_conventions():
  assert_allclose(at(cispo_capped, 7, 1, logp=-2.0), 10.0, rtol=1e-6)
  assert_allclose(at(cispo, 7, 1, logp=-2.0), 2.56, rtol=1e-6)
  assert_allclose(at(cispo, 0.5, 1, logp=-2.0), 1.6, rtol=1e-6)
  assert_allclose(at(cispo_capped, 0.5, 1, logp=-2.0), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
  "ratio, advantage, want", [(1, 1, 1), (1.5, 1, 0.940015), (1.5, -1, 0.93414), (3, -1, 0.388779)]
)
def test_sapo_slope_golden(ratio, advantage, want):  # in r
  slope = grad(lambda x: sapo(x, jnp.zeros(()), jnp.float32(advantage)))(jnp.log(jnp.float32(ratio)))
  assert_allclose(-slope * advantage / ratio, want, rtol=2e-5)


def one_row(d, advantage=1.0):
  d = jnp.asarray([d], jnp.float32)
  row = dict(mask=jnp.ones(d.shape, bool), segment=jnp.zeros(d.shape, int))
  return dict(logp=d, logp_old=jnp.zeros_like(d), advantage=jnp.broadcast_to(jnp.float32(advantage), d.shape), **row)


@pytest.mark.parametrize("d, advantage, want", [([0.6, -0.1], 1, 1.161834), ([-0.6, 0.1], -1, 0.860708)])
def test_gmpo_golden(d, advantage, want):
  assert_allclose(gmpo(**one_row(d, advantage)), np.full((1, 2), -advantage * want), rtol=1e-6)


@pytest.mark.parametrize(
  "advantage, phi", [(1, [1.120422, 1, 0.502043, 0.199148]), (-1, [0.339785, 1, 1.241593, 1.082682])]
)
def test_vespo_golden(advantage, phi):
  for w, want in zip([0.5, 1.0, 1.5, 2.0], phi):
    row = one_row([np.log(w) / 2, np.log(w) / 2], advantage)
    slope = grad(lambda x, row=row: vespo(**{**row, "logp": x}).sum())(row["logp"])
    assert_allclose(slope, np.full((1, 2), -advantage * want), rtol=1e-5)


TURN = [0.05, -0.02, 0.03]  # log ratios of a turn
CREDIT = [0.44965, 0.414725, 0.483225]  # its tokens' advantages, of mean .4492


def test_turn_clip_golden():
  row = dict(turn=jnp.zeros((1, 3), int), **one_row(TURN, CREDIT))
  assert_allclose(turn_clip(**row), [-1.061837 * np.array(CREDIT)], rtol=1e-6)
  slope = grad(lambda x: turn_clip(**{**row, "logp": x}).sum())(row["logp"])
  assert_allclose(slope, [[-0.477455, -0.44037, -0.513106]], rtol=1e-5)
  mean = turn_mean_clip(**row, low=0.5, high=1.0)
  assert_allclose(mean, [-1.020201 * np.array(CREDIT)], rtol=1e-6)


def test_without_the_stopped_gradient_credit_cancels_and_length_multiplies():
  plain = lambda x: -jnp.sum(jnp.exp(jnp.sum(x)) * jnp.asarray(CREDIT))  # noqa: E731
  assert_allclose(grad(plain)(jnp.asarray(TURN)), np.full(3, -1.430931), rtol=1e-5)


def test_at_the_old_policy_the_gradient_of_a_token_is_its_advantage():
  row = dict(turn=jnp.array([[0, 0, 1]]), **one_row([0.0, 0.0, 0.0], CREDIT))
  weight = token_mean(row["mask"])
  for f in (turn_clip, turn_mean_clip):
    slope = grad(lambda x, f=f: jnp.sum(weight * f(**{**row, "logp": x})))(row["logp"])
    assert_allclose(slope, [-np.array(CREDIT) / 3], rtol=1e-6)


def test_product_and_mean_of_the_sequence_golden():
  row = one_row([0.01, -0.02, 0.03])
  turn = jnp.zeros((1, 3), int)
  assert_allclose(turn_clip(**row, turn=turn), np.full((1, 3), -1.02020134), rtol=1e-6)
  assert_allclose(turn_mean_clip(**row, turn=turn, low=1, high=1), np.full((1, 3), -1.00668894), rtol=1e-6)


@st.composite
def packed_rows(draw):
  """Three rows of ten tokens: ragged segments of ragged turns with context between them, padding at the end."""
  rng = np.random.default_rng(draw(st.integers(0, 10_000)))
  segment, turn, mask = np.full((3, 10), -1), np.full((3, 10), -1), np.zeros((3, 10), bool)
  for row in range(3):
    t, s, k = 0, 0, 0
    while t < 10 - rng.integers(0, 4):
      n = int(min(rng.integers(1, 5), 10 - t))
      segment[row, t : t + n] = s
      if rng.random() < 0.8:
        turn[row, t : t + n], mask[row, t : t + n] = k, rng.random(n) < 0.8
        k += 1
      s, t = s + int(rng.random() < 0.5), t + n
  floats = rng.normal(0, 0.3, (3, 3, 10)).astype(np.float32)
  return dict(zip(("logp", "logp_old", "advantage"), floats), mask=mask, segment=segment), turn


def value_by_loops(function, row, turn):
  out = np.zeros((3, 10))
  d = row["logp"].astype(float) - row["logp_old"]
  for r, t in zip(*np.nonzero(row["mask"])):
    ids = turn if function in (turn_clip, turn_mean_clip) else row["segment"]
    peers = [u for u in range(10) if row["mask"][r, u] and ids[r, u] == ids[r, t]]
    a = row["advantage"][r, t]
    if function is gmpo:
      signs = [row["advantage"][r, u] >= 0 for u in peers]
      out[r, t] = -a * np.exp(np.mean([min(d[r, u], 0.4) if up else max(d[r, u], -0.4) for u, up in zip(peers, signs)]))
    elif function is vespo:
      k, rate = (2, 3) if a >= 0 else (3, 2)
      w = np.exp(sum(d[r, u] for u in peers))
      out[r, t] = -a * row["logp"][r, t] * np.exp(rate) * w**k * np.exp(-rate * w)
    else:
      low, high = (0.5, 2.0) if function is turn_clip else (1 - 3e-4, 1 + 4e-4)
      rho = np.exp((np.sum if function is turn_clip else np.mean)([d[r, u] for u in peers]))
      out[r, t] = -min(rho * a, np.clip(rho, low, high) * a)
  return out


@pytest.mark.parametrize("function", BY_SEGMENT)
@settings(max_examples=25, deadline=None)
@given(batch=packed_rows())
def test_equals_loops_on_packed_rows_and_ignores_rubbish(function, batch):
  row, turn = batch
  extra = dict(turn=turn) if function in (turn_clip, turn_mean_clip) else {}
  want = value_by_loops(function, row, turn)
  out = np.asarray(function(**row, **extra))
  assert_allclose(out[row["mask"]], want[row["mask"]], rtol=2e-4, atol=1e-5)
  spoilt = {k: np.where(row["mask"], row[k], v) for k, v in dict(logp=np.nan, logp_old=1e9, advantage=np.nan).items()}
  same = np.asarray(function(**{**row, **spoilt}, **extra))
  assert_allclose(same, np.where(row["mask"], out, 0.0), atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(batch=packed_rows())
def test_turn_numbers_may_be_anything_and_need_not_be_unique_over_segments(batch):
  row, turn = batch
  order = np.argsort(np.random.default_rng(0).permutation(12))
  renamed = np.where(turn >= 0, 50 * order[np.maximum(turn, 0)], -1)
  assert_allclose(turn_clip(**row, turn=renamed), turn_clip(**row, turn=turn), atol=1e-6)
  restarted = turn.copy()  # from 0 in every segment
  for r, k in zip(*np.unique(np.stack([np.repeat(np.arange(3), 10), row["segment"].reshape(-1)]), axis=1)):
    here = (row["segment"][r] == k) & (turn[r] >= 0)
    restarted[r, here] -= turn[r, here].min(initial=99)
  assert_allclose(turn_clip(**row, turn=restarted), turn_clip(**row, turn=turn), atol=1e-6)


@pytest.mark.parametrize("function", ELEMENTWISE)
def test_gradient_equals_finite_differences(function):
  rng = np.random.default_rng(0)
  old, a = rng.normal(-1.5, 0.3, 24).astype(np.float32), rng.normal(size=24).astype(np.float32)
  x = old + rng.choice([-0.6, -0.1, 0.1, 0.6], 24).astype(np.float32)  # off the kinks
  x = np.where(np.abs(np.abs(np.exp(x) - np.exp(old)) - 0.15) < 0.03, old, x)
  if function in (cispo, cispo_capped):  # the weight is a constant
    d = np.exp(np.clip(x - old, *np.log([0.8, 1.28]) if function is cispo else (-9, 9)))
    assert_allclose(grad(lambda x: function(x, old, a).sum())(jnp.asarray(x)), -a * d, rtol=1e-5)
    return
  f = lambda x: function(x, old, a)  # noqa: E731
  numeric = (f(x + 5e-3) - f(x - 5e-3)) / 1e-2
  assert_allclose(grad(lambda x: f(x).sum())(jnp.asarray(x)), numeric, atol=2e-3)


def test_gmpo_gradient_is_that_of_the_sequence_objective():
  row = one_row([0.6, -0.1, 0.2, -0.7], 0.7)

  def ours(x):
    return jnp.sum(sequence_mean(row["mask"], np.zeros(1, int)) * gmpo(**{**row, "logp": x}))

  def paper(x):
    return -0.7 * jnp.exp(jnp.mean(jnp.minimum(x, 0.4)))

  assert_allclose(grad(ours)(row["logp"]), grad(paper)(row["logp"]), rtol=1e-5)


def test_luspo_is_gspo_under_the_sequence_sum():
  mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
  d = np.array([[1e-3, -2e-3, 2e-3], [1e-3, 9.0, 9.0]], np.float32)
  token = gspo(d, 0 * d, np.ones((2, 3), np.float32), mask, np.zeros((2, 3), int), low=2e-3, high=2.5e-3)
  s = np.exp([np.mean(d[0]), d[1, 0]])
  assert_allclose(np.sum(sequence_sum(mask, np.arange(2)) * token), -(3 * s[0] + 1 * s[1]) / 2, rtol=1e-6)


def test_two_sided_is_dual_clip_where_the_cap_is_above_the_clip():
  rng = np.random.default_rng(0)
  logp, old, a = rng.normal(0, 2, (3, 200)).astype(np.float32)
  assert_allclose(two_sided_clip(logp, old, a, cap=4.0), dual_clip(logp, old, a, cap=4.0), rtol=1e-6)


def test_divergence_golden():  # the paper's two tokens: 1e-4 -> 1e-2 may go on, .99 -> .80 may not
  logp, old = jnp.log(jnp.array([1e-2, 0.8, 0.8, 0.99])), jnp.log(jnp.array([1e-4, 0.99, 0.99, 0.8]))
  a = jnp.array([1.0, -1.0, 1.0, 1.0])
  want = [-100, 0, -0.8 / 0.99, 0]  # the third returns to pi_old, the last goes away from it
  assert_allclose(divergence_clip_tv(logp, old, a, threshold=0.15), want, rtol=1e-4)
  assert_allclose(divergence_clip_kl(logp, old, a, threshold=0.05), want, rtol=1e-4)


def test_divergence_never_stops_a_step_towards_the_old_policy():
  rng = np.random.default_rng(0)
  logp, old = -rng.exponential(1, (2, 300)).astype(np.float32)
  a = -np.sign(logp - old)  # always back
  for f in (divergence_clip_tv, divergence_clip_kl):
    assert_allclose(f(logp, old, a, threshold=0.0), -np.exp(logp - old) * a, rtol=1e-5)
    assert_array_equal(f(logp, old, -a, threshold=0.0), np.zeros(300))


def test_mode_token_golden():
  logp, old = jnp.log(jnp.array([0.6, 0.3, 0.45])), jnp.log(jnp.array([0.1, 0.3, 0.9]))
  forced, a = jnp.array([True, False, True]), jnp.array([1.0, 1.0, 1.0])
  assert_allclose(mode_token_clip(logp, old, a, forced), [-1.2, -1.0, -0.9], rtol=1e-6)
  none = jnp.zeros(3, bool)
  assert_allclose(mode_token_clip(logp, old, a, none), ppo_clip(logp, old, a), rtol=1e-6)


@pytest.mark.parametrize("rho, r, a, want", [(2, 1.05, 1, 2.1), (2, 1.5, 1, 2.4), (2, 0.5, -1, -1.6)])
def test_importance_times_surrogate_golden(rho, r, a, want):
  weight = truncated_importance(np.log([rho]), np.zeros(1))
  assert_allclose(-weight[0] * at(ppo_clip, r, a), want, rtol=1e-6)


def test_masked_surrogate_golden():  # two rollouts, one masked token
  ratio = np.array([[1.1, 0.9, 3.0, 1.3], [0.7, 1.05, 9, 9]], np.float32)
  mask, a = np.array([[1, 1, 0, 1], [1, 1, 0, 0]], bool), np.array([[1.0], [-1.0]]) * np.ones((2, 4))
  loss = ppo_clip(np.log(ratio), np.zeros((2, 4)), a)
  assert_allclose(-np.sum(np.asarray(loss) * mask, 1) / mask.sum(1), [1.0667, -0.925], atol=1e-4)
  assert_allclose(-np.sum(sequence_mean(mask, np.arange(2)) * loss), 0.0708, atol=1e-4)
  assert_allclose(-np.sum(token_mean(mask) * loss), 0.27, atol=1e-6)


@pytest.mark.parametrize("function", [*ELEMENTWISE, *BY_SEGMENT])
def test_finite_for_any_log_ratio(function):
  x = jnp.array([[-1e4, -40.0, -200.0, -1e-3]])
  old = x[:, ::-1]
  extra = dict(mask=np.ones((1, 4), bool), segment=np.zeros((1, 4), int)) if function in BY_SEGMENT else {}
  extra |= dict(turn=np.zeros((1, 4), int)) if function in (turn_clip, turn_mean_clip) else {}
  both = jax.jit(jax.value_and_grad(lambda x, a: function(x, old, jnp.full((1, 4), a), **extra).sum()))
  for sign in (1.0, -1.0):
    value, slope = both(x, sign)
    assert np.isfinite(value) and np.isfinite(slope).all()


@pytest.mark.parametrize("function", [*ELEMENTWISE, *BY_SEGMENT, partial(mode_token_clip, forced=np.zeros((2, 3)))])
def test_shapes_are_checked(function):
  row = {k: np.zeros((2, 3), np.float32) for k in ("logp", "logp_old", "advantage")}
  if function in BY_SEGMENT:
    row |= dict(mask=np.ones((2, 3), bool), segment=np.zeros((2, 3), int))
  if function in (turn_clip, turn_mean_clip):
    row |= dict(turn=np.zeros((2, 3), int))
  for name in row:
    if name != "logp":
      with pytest.raises(ValueError, match=f"{name} must have shape"):
        function(**{**row, name: row[name][:, :2]})


def test_half_precision_is_computed_in_float32():
  x = jnp.full((1, 4), 0.01, jnp.bfloat16)
  for f in ELEMENTWISE:
    assert f(x, jnp.zeros_like(x), jnp.ones_like(x)).dtype == jnp.float32
