import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from ragged import N, S, T, one_row, pick, ragged, turn_lists

from jaxagent.advantages.group import group_relative
from jaxagent.advantages.redistribution import (
  add_step_credit,
  by_score,
  in_reverse,
  in_time,
  longest_success,
  match_steps,
  matched_credit,
  prefix_suffix,
  privileged_weights,
  redistribute_by_quality,
  weigh_by_privileged,
  within_batch,
)

seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)
jit_quality = jax.jit(redistribute_by_quality)
jit_weights = jax.jit(privileged_weights, static_argnames="turns")
jit_cliff = jax.jit(prefix_suffix, static_argnames="zero_mean")
NAN = np.nan


# --- quality of steps (DRACO)


def per_step(advantage, quality, tokens):
  """One number per step, from rows of one shape."""
  mask, turn = np.zeros((1, 320), bool), np.full((1, 320), -1)
  m, t = one_row(*tokens)
  mask[:, : m.size], turn[:, : m.size] = m, t
  padded = np.full((1, 7), NAN)
  padded[0, : len(quality)] = quality
  out = np.asarray(jit_quality(np.array([advantage], np.float32), padded, mask, turn))[0]
  return out[np.cumsum([0, *tokens[:-1]])]


E6 = [1, 1, 0.5, 1 / 3, 0.5, 1 / 3, NAN]
E6_TOKENS = [40, 40, 30, 50, 30, 60, 60]


@pytest.mark.parametrize(
  "advantage, quality, tokens, want",
  [
    (1, [1, 1], [2, 4], [1.5, 0.75]),  # paper, E.5
    (1, [0.5, 1], [2, 4], [1, 1]),
    (1, E6, E6_TOKENS, [1.8117, 1.8117, 1.2078, 0.4831, 1.2078, 0.4026, 0.7381]),  # paper, E.6
    (-1, E6, E6_TOKENS, [0, 0, -1.898, -1.5184, -1.898, -1.2653, -0.7381]),
    (1, [0, 0], [2, 4], [1, 1]),  # a winner whose every citation failed: uniform
    (-1, [1, 1], [2, 4], [-1, -1]),  # a loser whose every citation passed: uniform
    (1, [NAN, NAN], [2, 4], [1, 1]),  # no step cited: uniform
    (1, [1, 1, 1], [10, 20, 30], [2, 1, 0.6667]),
    (0, [0.5, 1], [2, 4], [0, 0]),
  ],
)
def test_golden_draco(advantage, quality, tokens, want):
  out = per_step(advantage, quality, tokens)
  assert_allclose(out, want, atol=6e-5)
  assert_allclose((out * tokens).sum(), advantage * sum(tokens), rtol=1e-5)


def test_golden_draco_step_totals():
  totals = per_step(1, E6, E6_TOKENS) * E6_TOKENS
  assert_allclose(totals, [72.468, 72.468, 36.234, 24.156, 36.234, 24.156, 44.286], atol=2e-3)


def quality_batch(seed, *, branches=True):
  rng = np.random.default_rng(seed)
  batch = ragged(seed, branches=branches)
  batch["advantage"] = np.where(batch["valid"], rng.normal(size=N)[batch["rollout"]], NAN).astype(np.float32)
  quality = rng.choice([0.0, 0.25, 1.0, NAN], (N, S)).astype(np.float32)
  return {**batch, "step_quality": quality}


QUALITY = ("advantage", "step_quality", "mask", "turn", "rollout")


@few
@given(seeds)
def test_total_sign_and_reference(seed):
  batch = quality_batch(seed)
  out = np.asarray(jit_quality(**pick(batch, *QUALITY)))
  assert (out[~batch["mask"]] == 0).all() and np.isfinite(out).all()
  for r in set(batch["rollout"]):
    rows = [n for n in range(N) if batch["rollout"][n] == r and batch["mask"][n].any()]
    if not rows:
      continue
    a, steps = batch["advantage"][rows[0]], [(n, k, p) for n in rows for k, p in turn_lists(batch, n)]
    tokens = sum(len(p) for *_, p in steps)
    q = np.array([batch["step_quality"][n, k] for n, k, _ in steps])
    q = np.where(np.isnan(q), np.nanmean(q), q) if not np.isnan(q).all() else np.full(len(q), NAN)
    w = q if a >= 0 else 1 - q
    for (n, _, places), mine in zip(steps, w):
      want = a if np.isnan(w).any() or w.sum() == 0 else a * tokens * mine / (len(places) * w.sum())
      assert_allclose(out[n, places], want, rtol=1e-4, atol=1e-6)
    values = np.concatenate([out[n, p] for n, _, p in steps])
    assert_allclose(values.sum(), a * tokens, rtol=1e-4, atol=1e-5)
    assert (values * a >= 0).all()


@few
@given(seeds)
def test_quality_laws(seed):
  batch = quality_batch(seed, branches=False)
  columns = pick(batch, *QUALITY)
  out = np.asarray(jit_quality(**columns))
  doubled = jit_quality(**{**columns, "advantage": 2 * batch["advantage"]})
  assert_allclose(doubled, 2 * out, rtol=1e-5)  # linear in A
  mirrored = jit_quality(**{**columns, "advantage": -batch["advantage"], "step_quality": 1 - batch["step_quality"]})
  assert_allclose(mirrored, -out, rtol=1e-4, atol=1e-6)  # a loser is a mirrored winner
  p = np.random.default_rng(seed).permutation(N)
  shuffled = jit_quality(**{k: x[p] for k, x in columns.items()})
  assert_allclose(shuffled, out[p], rtol=1e-5, atol=1e-6)


def test_better_steps_get_more_on_winners_and_less_blame_on_losers():
  for advantage in (1, -1):
    low, high = per_step(advantage, [0.25, 0.5], [3, 3]), per_step(advantage, [0.75, 0.5], [3, 3])
    assert high[0] > low[0]


def test_a_step_earns_the_same_total_whatever_its_length():
  for tokens in ([2, 4], [5, 1]):  # six tokens in all
    assert_allclose(per_step(1, [0.25, 0.75], tokens) * tokens, [1.5, 4.5], rtol=1e-5)


# --- two log-prob passes (TASPO)

DELTA = [[0.8, 0.01, 0.4], [-0.3, -0.02], [0.05, 0.2, 0, 0.15], [5.0]]
SETTINGS = dict(bound=0.5, scale=0.3, threshold=0.03)


def taspo():
  mask, turn = one_row(*(len(d) for d in DELTA))
  executable = mask & (turn < 3)  # the last turn has no executable action
  delta = np.concatenate(DELTA)[None]
  return dict(logp_privileged=delta - 2, logp_old=np.full_like(delta, -2), mask=mask, turn=turn, executable=executable)


@pytest.mark.parametrize(
  "advantage, weights, want",
  [
    (1.2, [1.186738, 0.824713, 0.988549, 1], [1.424086, 0.989655, 1.186259, 1.2]),
    (-1.2, [0.813262, 1.175287, 1.011451, 1], [-0.975914, -1.410345, -1.213741, -1.2]),
    (0.0, [1, 1, 1, 1], [0, 0, 0, 0]),
  ],
)
def test_golden_taspo(advantage, weights, want):
  batch = taspo()
  out = privileged_weights(np.array([advantage]), **batch, turns=4, **SETTINGS)
  assert_allclose(out, [weights], atol=2e-6)
  assert_allclose(np.mean(out), 1, atol=1e-6)
  tokens = weigh_by_privileged(np.array([advantage]), **batch, turn_reward=np.zeros((1, 4)), **SETTINGS)
  assert_allclose(tokens[0, [0, 3, 5, 9]], want, atol=2e-6)


@few
@given(seeds)
def test_weights_have_mean_one_a_bound_and_no_sign(seed):
  rng = np.random.default_rng(seed)
  batch = ragged(seed)
  advantage = rng.choice([-1.0, 0.0, 0.7], N)[batch["rollout"]].astype(np.float32)
  columns = pick(batch, "mask", "turn", "rollout")
  a, b = batch["value"] * 9, np.where(batch["mask"], rng.normal(size=(N, T)), NAN).astype(np.float32)
  executable = rng.random((N, T)) < 0.7
  w = np.asarray(jit_weights(advantage, a, b, **columns, executable=executable, turns=S, scale=0.5))
  assert (np.abs(w - 1) < 0.5).all() and np.isfinite(w).all()
  tanh = {}
  for r in set(batch["rollout"]):
    rows = [n for n in range(N) if batch["rollout"][n] == r]
    steps = [(n, k, p) for n in rows for k, p in turn_lists(batch, n)]
    if steps:
      assert_allclose(np.mean([w[n, k] for n, k, _ in steps]), 1, atol=1e-5)
    d = {}
    for n, k, places in steps:
      gain = np.array([a[n, t] - b[n, t] for t in places if executable[n, t]])
      if len(gain):
        d[n, k] = np.where(np.abs(gain) >= 0.05, gain, 0).mean()
    q = {s: np.tanh(np.sign(advantage[s[0]]) * (x - np.mean(list(d.values()))) / 0.5) for s, x in d.items()}
    tanh |= {s: 1 + 0.25 * (x - np.mean(list(q.values()))) for s, x in q.items()}
  for n in range(N):
    for k, _ in turn_lists(batch, n):
      assert_allclose(w[n, k], tanh.get((n, k), 1.0), atol=1e-4)


def test_no_guidance_and_no_gradient():
  batch = taspo()
  same = privileged_weights(np.ones(1), **{**batch, "logp_privileged": batch["logp_old"]}, turns=4)
  assert_array_equal(same, np.ones((1, 4)))
  grad = jax.grad(lambda x: jnp.sum(privileged_weights(jnp.ones(1), **{**batch, "logp_privileged": x}, turns=4) ** 2))
  assert_array_equal(grad(jnp.asarray(batch["logp_privileged"])), np.zeros((1, 10)))


# --- the first mistake (Cliff)

LENGTHS = np.array([4, 6, 5, 8])
CLIFF_MASK = np.arange(8)[None] < LENGTHS[:, None]


@pytest.mark.parametrize(
  "outcome, first_error, prefix, correct, early, late",
  [
    ([1, 0, 0, 0], [99, 4, 2, 0], 0.0, 1.7572, 0.0251, -0.5522),
    ([1, 0, 0, 0], [99, 4, 2, 0], 0.5, 1.5312, 0.6652, -0.7782),
    ([1, 1, 1, 0], [-1, -1, -1, 6], 0.0, 0.3514, -0.2259, -1.958),
  ],
)
def test_golden_cliff(outcome, first_error, prefix, correct, early, late):
  outcome, first_error = np.array(outcome, float), np.array(first_error)
  out = np.asarray(prefix_suffix(outcome, np.zeros(4, int), first_error, CLIFF_MASK, prefix=prefix))
  for n in range(4):
    split = LENGTHS[n] if outcome[n] else first_error[n]
    assert_allclose(out[n, :split], correct if outcome[n] else early, atol=6e-5)
    assert_allclose(out[n, split : LENGTHS[n]], late, atol=6e-5)
  assert_allclose(out.sum(), 0, atol=1e-5)


def cliff_batch(seed):
  rng = np.random.default_rng(seed)
  batch = ragged(seed, branches=False)
  outcome = np.where(batch["valid"], rng.integers(0, 2, N), NAN).astype(np.float32)
  first_error = rng.integers(-1 if rng.random() < 0.3 else 0, T + 2, N)
  truncated = rng.random(N) < 0.2
  return dict(outcome=outcome, first_error=first_error, truncated=truncated, **pick(batch, "group", "mask", "valid"))


@few
@given(seeds)
def test_cliff_equals_loops_and_has_mean_zero(seed):
  batch = cliff_batch(seed)
  out = np.asarray(jit_cliff(**batch, prefix=0.3))
  assert (out[~batch["mask"]] == 0).all()
  for g in set(batch["group"]):
    rows = [n for n in range(N) if batch["group"][n] == g and batch["valid"][n]]
    r = batch["outcome"][rows]
    if not len(r) or r.std() == 0:
      assert (out[rows] == 0).all()
      continue
    error = np.where(batch["truncated"], 0, batch["first_error"])
    good, bad = (1 - r.mean()) / r.std(), -r.mean() / r.std()
    if any(error[n] < 0 and batch["outcome"][n] == 0 for n in rows):
      for n in rows:
        assert_allclose(out[n, batch["mask"][n]], good if batch["outcome"][n] else bad, rtol=1e-4)
      continue
    want = np.zeros((N, T))
    for n in rows:
      want[n] = good if batch["outcome"][n] else np.where(np.arange(T) < error[n], 0.3 * good, bad)
    kept = batch["mask"][rows]
    offset = want[rows][kept].mean() if kept.any() else 0
    assert_allclose(out[rows][kept], want[rows][kept] - offset, atol=1e-4)
    assert_allclose(out[rows].sum(), 0, atol=1e-3)


@few
@given(seeds)
def test_cliff_over_the_batch_permutes_and_ignores_invalid_rows(seed):
  batch = cliff_batch(seed)
  out = np.asarray(jit_cliff(**batch, zero_mean=within_batch))
  p = np.random.default_rng(seed).permutation(N)
  assert_allclose(jit_cliff(**{k: x[p] for k, x in batch.items()}, zero_mean=within_batch), out[p], atol=1e-5)
  error = np.where(batch["valid"], batch["first_error"], -1)
  assert_array_equal(jit_cliff(**{**batch, "first_error": error}, zero_mean=within_batch), out)


def test_cliff_falls_back_where_the_teacher_fails():
  outcome, group = np.array([1.0, 0, 0, 0]), np.zeros(4, int)
  out = prefix_suffix(outcome, group, np.array([0, 3, -1, 2]), CLIFF_MASK)
  want = np.asarray(group_relative(outcome, group))[:, None] * CLIFF_MASK
  assert_allclose(out, want, rtol=1e-5)
  cut = prefix_suffix(outcome, group, np.array([0, 3, -1, 2]), CLIFF_MASK, truncated=np.array([0, 0, 1, 0], bool))
  assert_allclose(np.sum(cut), 0, atol=1e-5)  # a truncated rollout needs no teacher


# --- a successful sibling (SCPO)

SIMILARITY = np.array([
  [0.92, 0.73, 0.20, 0.10, 0.05], [0.70, 0.93, 0.60, 0.28, 0.15], [0.68, 0.91, 0.62, 0.27, 0.16],
  [0.40, 0.88, 0.63, 0.30, 0.18], [0.20, 0.30, 0.94, 0.41, 0.18], [0.10, 0.10, 0.20, 0.30, 0.20],
])  # fmt: skip


@pytest.mark.parametrize(
  "threshold, order, want",
  [
    (0.8, in_time, {0: 0, 1: 1, 4: 2}),
    (0.8, in_reverse, {0: 0, 3: 1, 4: 2}),
    (0.8, by_score, {0: 0, 1: 1, 4: 2}),
    (0.6, in_time, {0: 0, 1: 1, 2: 2}),
    (0.6, in_reverse, {2: 0, 3: 1, 4: 2}),
    (0.6, by_score, {0: 0, 1: 1, 4: 2}),
  ],
)
def test_golden_scpo(threshold, order, want):
  match = match_steps(SIMILARITY, threshold=threshold, order=order)
  assert {i: j for i, j in enumerate(match) if j >= 0} == want
  credit = matched_credit(SIMILARITY, match)
  assert_allclose(credit, [SIMILARITY[i, want[i]] if i in want else 0 for i in range(6)], rtol=1e-6)


@few
@given(seeds, st.sampled_from([in_time, in_reverse, by_score]))
def test_matches_are_monotone_and_used_once(seed, order):
  rng = np.random.default_rng(seed)
  similarity = rng.random((rng.integers(0, 7), rng.integers(1, 7)))
  match = match_steps(similarity, threshold=0.5, order=order)
  used = match[match >= 0]
  assert (np.diff(used) > 0).all()
  assert all(similarity[i, j] >= 0.5 for i, j in enumerate(match) if j >= 0)


@few
@given(seeds)
def test_credit_is_positive_bounded_and_for_failures_only(seed):
  rng = np.random.default_rng(seed)
  turn_reward, credit = rng.normal(size=(N, S)).astype(np.float32), rng.random((N, S)).astype(np.float32)
  outcome = rng.choice([0.0, 0.5, 1.0], N)
  place = dict(mask=np.ones((N, S), bool), turn=np.tile(np.arange(S), (N, 1)))
  bonus = np.asarray(add_step_credit(turn_reward, credit, outcome, **place, weight=0.3)) - turn_reward
  assert (bonus[outcome == 1] == 0).all() and (bonus >= -1e-6).all()
  assert (bonus.sum(1) <= 0.9 + 1e-5).all()
  small = np.asarray(add_step_credit(turn_reward, credit, outcome, **place, weight=0.01)) - turn_reward
  assert_allclose(small[outcome < 1], 0.01 * credit[outcome < 1], atol=1e-6)


def test_a_rollout_of_several_rows_has_one_bonus_of_its_own_turns():
  mask, turn = np.ones((3, 2), bool), np.array([[0, 1], [2, 2], [0, 0]])
  mask[1, 1] = False
  credit = np.array([[1, 0.5, np.nan], [7, 7, 0.5], [1, np.nan, np.nan]])
  rollout = np.array([0, 0, 1])
  out = add_step_credit(np.zeros((3, 3)), credit, np.zeros(3), mask, turn, rollout=rollout, weight=0.9)
  assert_allclose(out, [[0.45, 0.225, 0], [0, 0, 0.225], [0.9, 0, 0]], rtol=1e-6)


def test_the_longest_successful_sibling():
  out = longest_success([1, 0, 1, 1, 0], [3, 9, 5, 5, 4], [0, 0, 0, 0, 1])
  assert_array_equal(out, [2, 2, 2, 2, -1])


ROW = dict(mask=np.ones((1, 4), bool), turn=np.zeros((1, 4), int))


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: redistribute_by_quality([1.0], np.full((1, 1), 1.5), **ROW), r"step_quality must lie in \[0, 1\]"),
    (lambda: redistribute_by_quality(np.ones((1, 4)), np.ones((1, 1)), **ROW), "advantage must have shape"),
    (lambda: redistribute_by_quality([1.0], np.ones((1, 0)), **ROW), "turn must hold ids"),
    (lambda: privileged_weights([1.0], np.zeros((1, 3)), np.zeros((1, 4)), **ROW, turns=1), "logp_privileged must"),
    (lambda: privileged_weights([1.0], np.zeros((1, 4)), np.zeros((1, 4)), **ROW, turns=1, bound=2.0), "bound must"),
    (lambda: prefix_suffix([0.5], [0], [0], ROW["mask"]), "outcome must be 0 or 1, got 0.5 in row 0"),
    (lambda: prefix_suffix([1.0], [1], [0], ROW["mask"]), "group must hold ids"),
    (lambda: match_steps(np.full((2, 2), 1.5)), "similarity must lie in"),
    (lambda: matched_credit(np.ones((2, 2)), np.array([0, 2])), "match must hold ids"),
    (lambda: add_step_credit(np.zeros((1, 2)), np.full((1, 2), -0.1), [0.0], **ROW), "step_credit must lie in"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
