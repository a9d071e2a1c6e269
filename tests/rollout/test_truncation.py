"""Cutting rollouts to prefix and window, against loops and against a policy whose attention slides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.methods import grpo, plain, prepare
from jaxagent.models.policy import Hidden
from jaxagent.rollout.packing import pack, unpack
from jaxagent.rollout.truncation import truncate_backprop
from jaxagent.training.loss import loss
from jaxagent.training.scoring import score
from jaxagent.types import PER_TOKEN, check

N, T = 16, 24


def rollouts(seed=0):
  r, rng = tiny.ragged(seed, ref=True), np.random.default_rng(seed)
  routing = rng.integers(0, 4, (N, T, 2, 3)).astype(np.int16)
  value, quality, deep = (rng.normal(size=(N, T, *last)).astype(np.float32) for last in ((), (), (2,)))
  columns = {"quality": quality, "deep": deep, "rewards": np.ones((N, 2), np.float32)}
  return dataclasses.replace(r, routing=routing, value=value, columns=columns)


def by_loops(r, n, window, multiplier, all_if_fits=False):
  """Places of row n that are sent, and those of them with a loss."""
  prefix, length = int(r.prefix_length[n]), int(r.length[n])
  response = list(range(prefix, length))
  sent = response[-multiplier * window :]
  trained = sent if all_if_fits and len(sent) == len(response) else sent[-window:]
  if multiplier == 1 and len(sent) < len(response):
    trained = trained[1:]
  return [*range(prefix), *sent], [t for t in trained if r.mask[n, t]]


def per_token(r):
  named = {k: getattr(r, k) for k in PER_TOKEN if getattr(r, k) is not None and k not in ("mask", "turn")}
  return {**named, "quality": r.columns["quality"], "deep": r.columns["deep"]}


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 1000), window=st.integers(1, 12), multiplier=st.integers(1, 4), room=st.integers(0, 3),
  all_if_fits=st.booleans(),
)  # fmt: skip
def test_equals_loops(seed, window, multiplier, room, all_if_fits):
  r = rollouts(seed)
  prefix = int(r.prefix_length.max()) + room
  out = check(
    truncate_backprop(r, window=window, multiplier=multiplier, prefix=prefix, loss_on_all_if_fits=all_if_fits)
  )
  assert out.tokens.shape == (N, min(T, prefix + multiplier * window))
  for n in range(N):
    sent, trained = by_loops(r, n, window, multiplier, all_if_fits)
    assert out.length[n] == len(sent) and out.prefix_length[n] == r.prefix_length[n]
    for name, x in per_token(r).items():
      assert_array_equal(per_token(out)[name][n, : len(sent)], x[n, sent], err_msg=name)
    assert [sent[t] for t in np.flatnonzero(out.mask[n])] == trained
    assert_array_equal(out.turn[n, : len(sent)], [r.turn[n, t] if t in trained else -1 for t in sent])
  for name in ("rollout", "group", "reward", "turn_reward", "valid", "truncated", "temperature"):
    assert_array_equal(getattr(out, name), getattr(r, name))
  assert out.columns["rewards"] is r.columns["rewards"]


def test_golden():
  r = tiny.ragged(n=2)
  ones, row = np.ones((1, 12), bool), np.arange(12)[None]
  r = jax.tree.map(lambda x: x[:1, :12] if np.shape(x) == (2, T) else x[:1], r)
  r = dataclasses.replace(
    r, tokens=row + 100, position=row, mask=ones & (row >= 2), turn=np.where(row >= 2, 0, -1),
    length=np.array([12]), prefix_length=np.array([2]), rollout=np.array([0]),
  )  # fmt: skip
  out = truncate_backprop(r, window=2, multiplier=3)
  assert_array_equal(out.tokens, [[100, 101, 106, 107, 108, 109, 110, 111]])
  assert_array_equal(out.position, out.tokens - 100)
  assert_array_equal(out.mask, [[0, 0, 0, 0, 0, 0, 1, 1]])
  assert_array_equal(truncate_backprop(r, window=5, multiplier=2).mask, row >= 7)
  assert_array_equal(truncate_backprop(r, window=5, multiplier=2, loss_on_all_if_fits=True).mask, row >= 2)
  assert_array_equal(truncate_backprop(r, window=2, multiplier=1).mask, [[0, 0, 0, 1]])


@pytest.mark.parametrize("window", [T, 100])
def test_short_rollouts_stay_as_they_are(window):
  r = rollouts()
  jax.tree.map(assert_array_equal, truncate_backprop(r, window=window), r)


def test_the_same_under_jit_and_on_the_host():
  r = rollouts()
  host = truncate_backprop(r, window=4, multiplier=2, prefix=5)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(host))
  cut = jax.jit(functools.partial(truncate_backprop, window=4, multiplier=2, prefix=5))
  jax.tree.map(assert_array_equal, cut(r), host)
  jax.tree.map(
    assert_array_equal, truncate_backprop(jax.tree.map(jnp.asarray, r), window=4, multiplier=2, prefix=5), host
  )


def test_under_jit_a_prefix_without_room_is_an_invalid_row():
  r = rollouts()
  out = check(jax.jit(functools.partial(truncate_backprop, window=3, multiplier=2, prefix=3))(r))
  long = r.prefix_length > 3
  assert_array_equal(out.valid, r.valid & ~long)
  assert long.any() and not out.mask[long].any() and out.tokens.shape == (N, 9)


prepared = jax.jit(functools.partial(prepare, grpo), compiler_options=tiny.QUICK)


def test_what_has_no_token_in_the_window_leaves_the_denominator():
  r = rollouts()
  r = dataclasses.replace(
    r, mask=r.mask & (np.arange(T) < r.length[:, None] - np.where(np.arange(N) == 3, 5, 0)[:, None])
  )
  p = prepared(truncate_backprop(r, window=4, multiplier=2, prefix=5))
  kept = np.asarray(p.keep)
  assert not kept[3].any() and kept[2].any()
  rollouts_left = len(set(r.rollout[kept.any(1)]))
  assert_allclose(np.asarray(p.aggregate).sum(1)[2], 1 / rollouts_left, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), row_tokens=st.integers(13, 40))
def test_the_result_packs(seed, row_tokens):
  out = truncate_backprop(rollouts(seed), window=4, multiplier=2, prefix=5)
  p = prepared(out)
  b, plan = pack(p, row_tokens=row_tokens, rows=3)
  inside = np.asarray(p.keep).any(1)[:, None] & (np.arange(13) < np.asarray(out.length)[:, None])
  for rows_of, source in (
    (b.position, out.position),
    (b.mask, p.keep),
    (b.columns["quality"], p.rollouts.columns["quality"]),
  ):
    assert_array_equal(unpack(rows_of, plan), np.where(inside, source, 0))
  for n in np.flatnonzero(plan.row >= 0):
    end = b.prefix_end.reshape(-1, row_tokens)[plan.row[n], plan.offset[n]]
    assert end == plan.offset[n] + out.prefix_length[n]


# --- a policy whose attention slides

WINDOW, PREFIX, LONG = 8, 3, 83
BASE = tiny.tiny_policy(positions=LONG)
PARAMS = BASE.init(jax.random.key(1))


def sliding(layers):
  """Attention to the prefix and the last WINDOW tokens, the query included, `layers` times with the same weights."""

  def forward(params, tokens, position, segment, *, prefix_end=None, routing=None):
    x = params["embed"][tokens] + params["position"][position]
    t = jnp.arange(tokens.shape[1])
    near = (t[None, :] < prefix_end[:, :, None]) | (t[:, None] - t[None, :] < WINDOW)
    sees = (t[None, :] <= t[:, None]) & near & (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
    for _ in range(layers):
      scores = jnp.einsum("btd,bsd->bts", x @ params["q"], x @ params["k"])
      x = x + jnp.tanh(jax.nn.softmax(jnp.where(sees, scores, -1e30), -1) @ (x @ params["v"]))
    return Hidden(jnp.where((segment >= 0)[..., None], x, 0.0))

  return dataclasses.replace(BASE, forward=forward)


@functools.cache
def long_rollouts():
  """Four rows of PREFIX + 80, PREFIX + 50, PREFIX + 20 and PREFIX + 6 tokens, all the policy's after the prefix."""
  r = tiny.ragged(n=4)
  length, place = PREFIX + np.array([80, 50, 20, 6]), np.arange(LONG)
  mask = (place >= PREFIX) & (place < length[:, None])
  rng = np.random.default_rng(0)
  return dataclasses.replace(
    r, tokens=rng.integers(0, tiny.V, (4, LONG)), position=np.tile(place, (4, 1)), mask=mask,
    turn=np.where(mask, 0, -1), length=length, prefix_length=np.full(4, PREFIX), rollout=np.arange(4),
    group=np.zeros(4, int), reward=np.array([1.0, 0, 0, 1], np.float32), valid=np.ones(4, bool),
    logp_rollout=np.zeros((4, LONG), np.float32), logp_old=None,
  )  # fmt: skip


@functools.cache
def scorer(layers):
  return jax.jit(lambda b: score(sliding(layers), PARAMS, b, chunk=400).logp, compiler_options=tiny.QUICK)


def logp(layers, r):
  tokens, plan = pack(plain(r), row_tokens=r.tokens.shape[1], rows=4, microbatches=1)
  return unpack(np.asarray(scorer(layers)(jax.tree.map(lambda x: x[0], tokens)))[None], plan)


def error(layers, multiplier):
  """The largest gap in the log-prob of a token with a loss, sliced against whole."""
  whole, r = logp(layers, long_rollouts()), long_rollouts()
  cut = truncate_backprop(r, window=WINDOW, multiplier=multiplier)
  sliced = logp(layers, dataclasses.replace(cut, mask=np.arange(cut.tokens.shape[1]) < cut.length[:, None]))
  row, place = np.nonzero(cut.mask)
  return np.abs(sliced[row, place] - whole[row, cut.position[row, place]]).max()


@pytest.mark.parametrize("layers, multiplier", [(1, 2), (1, 4), (2, 4), (3, 4), (6, 8)])
def test_exact_where_the_slice_holds_the_receptive_field(layers, multiplier):
  assert (multiplier - 1) * WINDOW - 1 >= layers * (WINDOW - 1)
  assert error(layers, multiplier) < 1e-5


def test_deep_policies_are_approximated_the_better_the_more_is_sent():
  errors = [error(6, m) for m in (2, 4, 8)]
  assert errors == sorted(errors, reverse=True) and errors[1] > 1e-3 > 100 * errors[2]
  assert error(1, 1) > 0.1  # the window alone: never enough


def gradient(layers, r):
  b, _ = pack(prepared(r), row_tokens=LONG, rows=4, microbatches=1)
  value = lambda p: loss(sliding(layers), grpo.objective, p, jax.tree.map(lambda x: x[0], b), chunk=400)[0]  # noqa: E731
  return jax.jit(jax.value_and_grad(value), compiler_options=tiny.QUICK)(PARAMS)


def test_the_gradient_is_that_of_the_whole_rollout_with_the_loss_on_its_end():
  r = long_rollouts()
  end = r.mask & (np.arange(LONG) >= r.length[:, None] - WINDOW)
  (value, slope), (want, expected) = (
    gradient(2, x) for x in (truncate_backprop(r, window=WINDOW), dataclasses.replace(r, mask=end))
  )
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(expected)))
  assert norm > 1e-3
  assert_allclose(value, want, atol=1e-5 * norm)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=0, atol=1e-5 * norm), slope, expected)


@pytest.mark.parametrize(
  "options, message",
  [
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"window": 4, "multiplier": 0}, "multiplier must be at least 1, got 0"),
    ({"window": 4, "prefix": 2}, r"the prefix of row \d+ has 4 tokens, but there is room for 2; raise prefix"),
  ],
)
def test_errors(options, message):
  with pytest.raises(ValueError, match=message):
    truncate_backprop(rollouts(), **options)


def test_under_jit_the_shape_must_be_given():
  with pytest.raises(ValueError, match="under jit the shape must be known; give prefix"):
    jax.jit(functools.partial(truncate_backprop, window=4))(rollouts())
