"""Terms beyond k1, k3 and the reverse KL; divergences against the exact one on a softmax over five tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.losses import (
  batch_load_balance,
  expert_fractions,
  kl_k1_weighted,
  kl_k2,
  kl_k3,
  kl_k3_straight,
  load_balance,
  positive_nll,
  positive_token_weight,
  token_mean,
  top_entropy,
)

RNG = np.random.default_rng(0)
LOGITS, REF, OLD = (jnp.asarray(RNG.normal(size=5), jnp.float32) for _ in range(3))
log_pi = jax.nn.log_softmax
FRACTIONS, BALANCE = jax.jit(expert_fractions, static_argnames="experts"), jax.jit(batch_load_balance)
TOP = jax.jit(top_entropy, static_argnames="share")


def exact_kl(p, q=REF):
  return jnp.sum(jnp.exp(log_pi(p)) * (log_pi(p) - log_pi(q)))


EXACT = jax.jit(jax.grad(exact_kl))(LOGITS)


def expected(term, sampler):
  """The mean of a per-token term over tokens of `sampler`, which carries no gradient, as a function of logits."""
  return lambda logits: jnp.sum(jnp.exp(log_pi(sampler)) * term(log_pi(logits)))


def gradient_gap(term, sampler):
  return np.abs(jax.jit(jax.grad(expected(term, sampler)))(LOGITS) - EXACT).max()


@pytest.mark.parametrize("d, want", [(-0.5, 0.10653), (0.0, 0.0), (0.5, 0.14872), (0.1, 0.005171)])
def test_k3_golden(d, want):
  for f in (kl_k3, kl_k3_straight):
    assert_allclose(f(jnp.array([0.0]), jnp.array([d])), [want], atol=5e-6)
  assert_allclose(kl_k2(jnp.array([0.0]), jnp.array([d])), [d * d / 2], rtol=1e-6)


def test_on_policy_k2_and_straight_k3_descend_the_reverse_divergence():
  for term in (kl_k2, kl_k3_straight):
    assert gradient_gap(lambda x, f=term: f(x, log_pi(REF)), LOGITS) < 1e-6
  assert gradient_gap(lambda x: kl_k3(x, log_pi(REF)), LOGITS) > 0.05  # descends the other one
  assert_allclose(expected(lambda x: kl_k3_straight(x, log_pi(REF)), LOGITS)(LOGITS), exact_kl(LOGITS), rtol=1e-5)
  assert abs(expected(lambda x: kl_k2(x, log_pi(REF)), LOGITS)(LOGITS) - exact_kl(LOGITS)) > 0.01  # no measurement


def test_weighted_k1_is_unbiased_on_stale_samples_and_k2_is_not():
  term = lambda x: kl_k1_weighted(x, log_pi(OLD), log_pi(REF))  # noqa: E731
  assert_allclose(expected(term, OLD)(LOGITS), exact_kl(LOGITS), rtol=1e-5)
  assert gradient_gap(term, OLD) < 1e-6
  assert gradient_gap(lambda x: kl_k2(x, log_pi(REF)), OLD) > 0.05


@pytest.mark.parametrize("function", [kl_k2, kl_k3_straight, lambda a, b: kl_k1_weighted(a, b, b)])
def test_finite_at_extremes(function):
  for logp, ref in ((-1e4, 0.0), (0.0, -1e4)):
    value, slope = jax.value_and_grad(lambda x, y: function(x, y).sum())(jnp.array([logp]), jnp.array([ref]))
    assert np.isfinite(value) and np.isfinite(slope).all()


def test_top_entropy_golden():
  entropy, keep = np.array([[0.1, 2.0, 9.0], [1.5, 0.2, 0.3]]), np.array([[1, 1, 0], [1, 1, 1]], bool)
  assert_array_equal(top_entropy(entropy, keep), [[0, 1, 0], [0, 0, 0]])
  assert_array_equal(top_entropy(entropy, keep, share=0.4), [[0, 1, 0], [1, 0, 0]])
  assert_array_equal(top_entropy(entropy, keep, share=0.0), [[0, 1, 0], [0, 0, 0]])
  assert_array_equal(top_entropy(entropy, keep, share=1.0), keep)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_top_entropy_equals_sorting_and_ignores_rubbish(seed, share):
  rng = np.random.default_rng(seed)
  keep = rng.random((4, 5)) < 0.7
  entropy = np.where(keep, rng.permutation(20).reshape(4, 5), np.nan).astype(np.float32)
  best = sorted(zip(*np.nonzero(keep)), key=lambda place: -entropy[place])
  want = np.zeros((4, 5), bool)
  for place in best[: max(int(np.ceil(share * len(best) - 1e-9)), 1)]:
    want[place] = True
  assert_array_equal(TOP(entropy, keep, share=share), want)


def test_top_entropy_needs_a_recorded_entropy():
  with pytest.raises(ValueError, match="entropy is NaN at a kept token"):
    top_entropy(np.full((1, 2), np.nan), np.ones((1, 2), bool))
  with pytest.raises(ValueError, match=r"share must lie in \[0, 1\]"):
    top_entropy(np.ones((1, 2)), np.ones((1, 2), bool), share=20.0)


def test_positive_nll_is_a_mean_over_correct_rollouts_alone():
  keep = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]], bool)
  logp = np.where(keep, RNG.normal(size=(3, 3)), np.nan).astype(np.float32)
  aggregate = token_mean(keep)
  weight = positive_token_weight(np.array([1.0, 0.0, 1.0]), keep, aggregate)
  loss = np.asarray(aggregate) * positive_nll(np.where(keep, logp, 0.0), weight)
  assert_allclose(loss.sum(), -np.mean([*logp[0], *logp[2, :2]]), rtol=1e-5)
  none = positive_token_weight(np.zeros(3), keep, aggregate)
  assert_array_equal(none, np.zeros((3, 3)))


def test_positive_nll_moves_only_correct_tokens():
  slope = jax.grad(lambda x: positive_nll(x, jnp.array([0.0, 2.0])).sum())(jnp.array([-1.0, -1.0]))
  assert_allclose(slope, [0, -2])


def test_batch_load_balance_golden():
  even, one = np.full((1, 4), 0.25, np.float32), np.eye(4, dtype=np.float32)[:1]
  probs = lambda row: np.broadcast_to(row, (2, 3, 1, 4))  # noqa: E731
  assert_allclose(batch_load_balance(probs(even), even), np.ones((2, 3)))
  assert_allclose(batch_load_balance(probs(one), one), np.full((2, 3), 4.0))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_batch_load_balance_equals_loops_however_the_batch_is_cut(seed):
  rng = np.random.default_rng(seed)
  mask, routing = rng.random((4, 5)) < 0.7, rng.integers(-1, 6, (4, 5, 2, 3)).astype(np.int16)
  probs = rng.dirichlet(np.ones(6), (4, 5, 2)).astype(np.float32)
  fractions = np.asarray(FRACTIONS(routing, mask, experts=6))
  kept = [place for place in zip(*np.nonzero(mask))]
  want = 0.0
  for layer in range(2):
    chosen = [e for place in kept for e in routing[place][layer] if e >= 0]
    f = np.array([chosen.count(e) / max(len(chosen), 1) for e in range(6)])
    assert_allclose(fractions[layer], f, rtol=1e-5)
    if kept:
      want += 6 * np.sum(f * np.mean([probs[place][layer] for place in kept], axis=0)) / 2
  weight = mask / max(mask.sum(), 1)
  assert_allclose(np.sum(weight * BALANCE(probs, fractions)), want, rtol=1e-4, atol=1e-6)
  parts = sum(np.sum(weight[i : i + 1] * BALANCE(probs[i : i + 1], fractions)) for i in range(4))
  assert_allclose(parts, want, rtol=1e-4, atol=1e-6)


def test_load_balance_pushes_probability_away_from_the_busy_expert():
  fractions = jnp.array([[0.7, 0.2, 0.1]])
  push = lambda x: batch_load_balance(jax.nn.softmax(x)[None, None, None], fractions).sum()  # noqa: E731
  slope = jax.jit(jax.grad(push))(jnp.zeros(3))
  assert slope[0] > 0 and slope[2] < 0
  assert_allclose(jax.grad(lambda f: batch_load_balance(jnp.ones((1, 1, 1, 3)), f).sum())(fractions), np.zeros((1, 3)))


SEQUENCES = np.array([[0, 0, 0, 0, 1, 1, -1]])
CHOSEN = np.array([0, 1, 2, 3, 0, 0, 3]).reshape(1, 7, 1, 1)


def test_load_balance_golden():
  even, one = np.full((1, 7, 1, 4), 0.25, np.float32), np.tile(np.eye(4, dtype=np.float32)[0], (1, 7, 1, 1))
  assert_allclose(load_balance(even, CHOSEN, SEQUENCES), [[1, 1, 1, 1, 1, 1, 0]])
  assert_allclose(load_balance(one, CHOSEN, SEQUENCES), [[1, 1, 1, 1, 4, 4, 0]])
  pair = np.array([[[[0.5, 0.3, 0.1, 0.1]]], [[[0.1, 0.7, 0.1, 0.1]]]], np.float32).reshape(1, 2, 1, 4)
  chosen = np.array([0, 1, 1, 2]).reshape(1, 2, 1, 2)  # shares 1/4, 1/2, 1/4, 0; means .3, .5, .1, .1
  assert_allclose(load_balance(pair, chosen, np.zeros((1, 2), int)), np.full((1, 2), 4 * (0.075 + 0.25 + 0.025)))


def test_the_mean_of_both_halves_is_not_the_balance_of_the_whole():
  """Why a sequence is never split: two tokens that use one expert each are even together and not apart."""
  probs, chosen = np.eye(2, dtype=np.float32).reshape(1, 2, 1, 2), np.arange(2).reshape(1, 2, 1, 1)
  assert_allclose(load_balance(probs, chosen, np.array([[0, 0]])), [[1, 1]])
  assert_allclose(load_balance(probs, chosen, np.array([[0, 1]])), [[2, 2]])


SEQUENCE_BALANCE = jax.jit(load_balance)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_load_balance_equals_loops_and_ignores_rubbish_in_padding(seed):
  rng = np.random.default_rng(seed)
  segment = np.sort(rng.integers(0, 3, (2, 9)), axis=1)
  segment[:, rng.integers(5, 10) :] = -1
  probs, experts = rng.dirichlet(np.ones(6), (2, 9, 2)).astype(np.float32), rng.integers(0, 6, (2, 9, 2, 3))
  probs[segment < 0], experts[segment < 0] = np.nan, -7
  out = SEQUENCE_BALANCE(probs, experts.astype(np.int16), segment)
  for b, t in zip(*np.nonzero(segment >= 0)):
    places, want = np.flatnonzero(segment[b] == segment[b, t]), 0.0
    for layer in range(2):
      f = np.bincount(experts[b, places, layer].ravel(), minlength=6) / (3 * len(places))
      want += 6 * np.sum(f * probs[b, places, layer].mean(0)) / 2
    assert_allclose(out[b, t], want, rtol=1e-5)
  assert (np.asarray(out)[segment < 0] == 0).all()


def test_load_balance_descends_towards_even_use():
  total = lambda x: load_balance(jax.nn.softmax(x)[None, :, None], np.array([0, 0, 1]).reshape(1, 3, 1, 1), np.zeros((1, 3), int)).sum()  # noqa: E501, E731
  slope = jax.jit(jax.grad(total))(jnp.zeros((3, 3)))
  assert (slope[:, 0] > 0).all() and (slope[:, 2] < 0).all()


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: load_balance(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 2, 1), int), np.zeros((1, 2))), "experts must have"),
    (lambda: kl_k2(np.zeros((2, 3)), np.zeros((2, 2))), "logp_ref must have shape"),
    (lambda: kl_k1_weighted(np.zeros(3), np.zeros(2), np.zeros(3)), "logp_old must have shape"),
    (lambda: top_entropy(np.zeros((2, 3)), np.ones((2, 2), bool)), "keep must have shape"),
    (lambda: positive_nll(np.zeros(3), np.zeros(2)), "positive_weight must have shape"),
    (lambda: batch_load_balance(np.zeros((1, 2, 3, 4)), np.zeros((4, 3))), "fractions must have shape"),
    (lambda: expert_fractions(np.zeros((1, 2, 3, 4)), np.ones(2, bool), experts=4), "mask must have shape"),
  ],
)
def test_errors(call, said):
  with pytest.raises(ValueError, match=said):
    call()
