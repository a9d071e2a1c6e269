import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.methods import plain
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training.scoring import score

POLICY = tiny.tiny_policy()
PARAMS = POLICY.init(jax.random.key(0))
logp_of = jax.jit(lambda params, b: score(POLICY, params, b, chunk=64).logp, compiler_options=tiny.QUICK)


def batch(row_tokens=24, rows=16):
  tokens, plan = pack(plain(tiny.ragged()), row_tokens=row_tokens, rows=rows, microbatches=1)
  return jax.tree.map(lambda x: jnp.asarray(x[0]), tokens), plan


def dense(params, b):
  """log softmax over everything at once, one token at a time."""
  logits = POLICY.head(params, POLICY.forward(params, b.tokens, b.position, b.segment).states)
  logp = jax.nn.log_softmax(logits[:, :-1] / b.temperature[:, 1:, None])
  inside = (b.segment[:, 1:] == b.segment[:, :-1]) & (b.segment[:, 1:] >= 0)
  chosen = jnp.take_along_axis(logp, b.tokens[:, 1:, None], -1)[..., 0]
  pad = lambda x: jnp.pad(jnp.where(inside, x, 0), ((0, 0), (1, 0)))  # noqa: E731
  return pad(chosen), pad(-jnp.sum(jnp.exp(logp) * logp, -1))


@pytest.mark.parametrize("row_tokens, chunk", [(24, 1), (50, 16 * 5), (24, 10_000)])
def test_equals_dense_in_value_and_gradient(row_tokens, chunk):
  b, _ = batch(row_tokens)

  def ours(params):
    s = score(POLICY, params, b, chunk=chunk, columns=("logp", "entropy"))
    return jnp.sum(s.logp * b.position) + 3 * jnp.sum(s.entropy), (s.logp, s.entropy)

  def theirs(params):
    logp, entropy = dense(params, b)
    return jnp.sum(logp * b.position) + 3 * jnp.sum(entropy), (logp, entropy)

  slope, got = jax.jit(jax.grad(ours, has_aux=True), compiler_options=tiny.QUICK)(PARAMS)
  want_slope, want = jax.jit(jax.grad(theirs, has_aux=True), compiler_options=tiny.QUICK)(PARAMS)
  for x, y in zip(got, want):
    assert_allclose(x, y, rtol=1e-6, atol=1e-6)
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(want_slope)))
  jax.tree.map(lambda x, y: assert_allclose(x, y, atol=1e-6 * norm), slope, want_slope)


def test_the_shift_by_hand():
  b, _ = batch()
  one = logp_of(PARAMS, b)
  h = POLICY.forward(PARAMS, b.tokens, b.position, b.segment).states
  for n, t in ((0, 1), (3, 5), (7, 2)):
    logits = np.asarray(POLICY.head(PARAMS, h[n, t - 1]) / b.temperature[n, t], np.float64)
    assert_allclose(one[n, t], logits[b.tokens[n, t]] - np.log(np.exp(logits).sum()), atol=1e-5)


def test_packed_equals_padded():
  scores = []
  for row_tokens, rows in ((24, 16), (48, 9), (200, 3)):
    b, plan = batch(row_tokens, rows)
    logp = np.asarray(logp_of(PARAMS, b))
    assert_array_equal(logp[np.asarray(b.segment) < 0], 0)
    scores.append(unpack(logp[None], plan))
  assert (scores[0][:, 0] == 0).all() and (scores[0][0, 1:8] < 0).all()
  assert_allclose(scores[1], scores[0], atol=2e-6)
  assert_allclose(scores[2], scores[0], atol=2e-6)


def test_where_the_padding_is_does_not_matter():  # left, right, both
  r = tiny.ragged()
  n, length = 3, int(r.length[3])
  rows = []
  for left in (0, 5, 24 - 0):
    b = jax.tree.map(lambda x: jnp.zeros((1, 60, *x.shape[2:]), x.dtype), batch()[0])
    at = lambda x, v, left=left: x.at[0, left : left + length].set(v)  # noqa: E731
    b = dataclasses.replace(
      b, tokens=at(b.tokens, r.tokens[n, :length]), position=at(b.position, np.arange(length)),
      segment=at(jnp.full((1, 60), -1), 0), temperature=jnp.ones((1, 60)),
    )  # fmt: skip
    rows.append(logp_of(PARAMS, b)[0, left : left + length])
  assert_allclose(rows[1], rows[0], atol=1e-6)
  assert_allclose(rows[2], rows[0], atol=1e-6)


def test_constant_columns_carry_no_gradient():
  b, _ = batch()
  entropy = lambda p, c: score(POLICY, p, b, chunk=64, columns=("entropy",), constant=c).entropy.sum()  # noqa: E731
  slope = jax.jit(jax.grad(entropy), static_argnums=1, compiler_options=tiny.QUICK)
  still, moving = (slope(PARAMS, c)["embed"] for c in (("entropy",), ()))
  assert not np.asarray(still).any() and np.abs(moving).max() > 1e-3


def largest_buffer(f, *args):
  text = jax.jit(f).lower(*args).compile().as_text()
  return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))


def test_no_buffer_of_all_logits_in_the_compiled_program():
  rows, length, vocab, chunk = 4, 64, 512, 32
  policy = tiny.tiny_policy(vocab_size=vocab, positions=length)
  params = policy.init(jax.random.key(0))
  b = jax.tree.map(lambda x: jnp.zeros((rows, length, *x.shape[2:]), x.dtype), batch()[0])
  b = dataclasses.replace(b, temperature=jnp.ones((rows, length)))

  def ours(params):
    s = score(policy, params, b, chunk=chunk, columns=("logp", "entropy"))
    return s.logp.sum() + s.entropy.sum()

  def theirs(params):
    return jax.nn.log_softmax(policy.head(params, policy.forward(params, b.tokens, b.position, b.segment).states)).sum()

  assert largest_buffer(jax.grad(ours), params) <= max(chunk * vocab, rows * length * length)
  assert largest_buffer(jax.grad(theirs), params) >= rows * length * vocab
