import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxagent.rewards.shaping import cosine_length, length_penalty, repetition_penalty, tool_error_penalty

N, T = 4, 16
jit_repetition = jax.jit(repetition_penalty, static_argnames="size")


def masks(*lengths, width=20):
  return np.arange(width)[None] < np.array(lengths)[:, None]


def test_cosine_length_by_hand():
  out = cosine_length(np.array([1.0, 1, 0, 0, 1]), masks(0, 8, 8, 4, 16), limit=16)
  assert_allclose(out, [2, 1.5, -5, -10 * (1 + np.cos(np.pi / 4)) / 2, -10], atol=1e-5)


def test_cosine_prefers_short_successes_and_long_failures():
  lengths = range(16)
  for outcome, sign in ((1.0, -1), (0.0, 1)):
    out = cosine_length(np.full(16, outcome), masks(*lengths), limit=16)
    assert (np.diff(out) * sign > 0).all()


@pytest.mark.parametrize(
  "ids, size, want",
  [([1, 2, 3, 4], 2, 0.0), ([5, 5, 5, 5, 5], 2, -0.75), ([1, 2, 1, 2, 1], 3, -1 / 3), ([1, 2], 3, 0.0)],
)
def test_golden_repetition(ids, size, want):
  tokens = np.zeros((1, T), int)
  tokens[0, : len(ids)] = ids
  assert_allclose(jit_repetition(tokens, masks(len(ids), width=T), size=size), [want], atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_repetition_equals_a_set(seed):
  rng = np.random.default_rng(seed)
  tokens, mask = rng.integers(-1, 3, (N, T)), rng.random((N, T)) < 0.85
  out = np.asarray(jit_repetition(tokens, mask, size=2))
  for n in range(N):
    grams = [tuple(tokens[n, t : t + 2]) for t in range(T - 1) if mask[n, t : t + 2].all()]
    assert_allclose(out[n], -(1 - len(set(grams)) / len(grams)) if grams else 0, atol=1e-6)
  garbage = np.where(mask, tokens, rng.integers(0, 99, (N, T)))
  assert_allclose(jit_repetition(garbage, mask, size=2), out)


def test_penalties():
  assert_allclose(tool_error_penalty(np.array([0, 1, 2, 0]), np.array([0, 4, 2, 3])), [0, -0.0625, -0.25, 0])
  assert_allclose(length_penalty(masks(5, 10, 20), free=10), [0, 0, -0.25])
  assert_allclose(length_penalty(masks(8, 8), free=8, rollout=np.zeros(2, int)), [-0.25, -0.25])


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: repetition_penalty(np.zeros((1, 4), int), np.ones((1, 4), bool), size=0), "size must be at least 1"),
    (lambda: repetition_penalty(np.zeros((1, 4), int), np.ones((1, 3), bool)), "mask must have shape"),
    (lambda: tool_error_penalty(np.array([3]), np.array([2])), r"tool_errors / tool_calls must lie in \[0, 1\]"),
    (lambda: cosine_length(np.zeros(2), np.ones((1, 3), bool)), "outcome must have shape"),
  ],
)
def test_bad_input_is_named(call, said):
  with pytest.raises(ValueError, match=said):
    call()
