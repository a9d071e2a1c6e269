import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxagent.models.cache import reset_rows
from jaxagent.models.nnx import policy_from_nnx

VOCAB, WIDTH = 11, 6


class Averager(nnx.Module):
  """A causal toy: each token sees the mean of its segment so far, and its position."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

  def states(self, tokens, position, segment):
    t = tokens.shape[1]
    seen = (segment[:, :, None] == segment[:, None]) & (segment >= 0)[:, None] & jnp.tri(t, dtype=bool)
    x = jnp.einsum("bts,bsd->btd", seen / jnp.maximum(seen.sum(-1, keepdims=True), 1), self.embed(tokens))
    x = x + jnp.sin(position)[..., None]
    for block in self.blocks:
      x = x + jnp.tanh(block(x))
    return x


class WithLogits(Averager):
  def __call__(self, tokens, position, segment):
    return self.embed.attend(self.states(tokens, position, segment))


class WithHead(Averager):
  def __call__(self, tokens, position, segment):
    return self.states(tokens, position, segment)

  def head(self, states):
    return self.embed.attend(states)


BOTH = pytest.mark.parametrize("build", [WithLogits, WithHead])


def rows(seed=0):
  tokens = jax.random.randint(jax.random.key(seed), (2, 6), 0, VOCAB)
  return tokens, jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.zeros((2, 6), jnp.int32)


@BOTH
def test_the_policy_says_what_the_module_says(build):
  policy = policy_from_nnx(build, vocab_size=VOCAB)
  params = policy.init(jax.random.key(3))
  module = build(nnx.Rngs(jax.random.key(3)))
  want = module(*rows()) if build is WithLogits else module.head(module(*rows()))
  logits = policy.head(params, policy.forward(params, *rows()).states)
  np.testing.assert_allclose(logits, want, atol=1e-6)
  assert logits.dtype == jnp.float32 and policy.vocab_size == VOCAB
  assert jax.tree.map(len, policy.axes, is_leaf=lambda x: isinstance(x, tuple)) == jax.tree.map(jnp.ndim, params)


@BOTH
def test_extending_equals_the_full_forward_also_in_a_reused_row(build):
  policy = policy_from_nnx(build, vocab_size=VOCAB)
  params = policy.init(jax.random.key(3))
  extend, cache = jax.jit(policy.extend, donate_argnums=1), policy.cache(2, 8)
  for seed in (0, 1):
    tokens, position, segment = rows(seed)
    states = []
    for step in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)):
      hidden, cache = extend(policy.prepare(params), cache, tokens[:, step], position[:, step])
      states.append(hidden.states)
    want = policy.forward(params, tokens, position, segment).states
    np.testing.assert_allclose(jnp.concatenate(states, 1), want, atol=1e-5)
    cache = reset_rows(cache, jnp.array([True, False]))


def test_padding_writes_nothing():
  policy = policy_from_nnx(WithLogits, vocab_size=VOCAB)
  params = policy.init(jax.random.key(3))
  tokens, position, segment = rows()
  hidden, cache = policy.extend(params, policy.cache(2, 6), tokens, jnp.where(position < 4, position, -1))
  np.testing.assert_array_equal(cache.position, [[0, 1, 2, 3, -1, -1]] * 2)
  want = policy.forward(params, tokens, position, segment).states
  np.testing.assert_allclose(hidden.states[:, :4], want[:, :4], atol=1e-5)


def test_gradients_reach_the_module():
  policy = policy_from_nnx(WithHead, vocab_size=VOCAB)
  params = policy.init(jax.random.key(3))

  def loss(params):
    return -jax.nn.log_softmax(policy.head(params, policy.forward(params, *rows()).states))[..., 2].sum()

  assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_a_module_made_before_keeps_its_values():
  module = WithLogits(nnx.Rngs(5))
  params = policy_from_nnx(lambda rngs: module, vocab_size=VOCAB).init(jax.random.key(0))
  np.testing.assert_array_equal(params["embed"]["embedding"], module.embed.embedding[...])


def test_hidden_state_and_routing_are_refused():
  class Dropping(WithLogits):
    def __init__(self, rngs):
      super().__init__(rngs)
      self.dropout = nnx.Dropout(0.1, rngs=rngs)

  with pytest.raises(ValueError, match=r"Dropping also has dropout\.rngs.*build it without dropout"):
    policy_from_nnx(Dropping, vocab_size=VOCAB)
  policy = policy_from_nnx(WithLogits, vocab_size=VOCAB)
  with pytest.raises(ValueError, match="cannot replay"):
    policy.forward(policy.init(jax.random.key(0)), *rows(), routing=jnp.zeros((2, 6, 1, 1), int))
