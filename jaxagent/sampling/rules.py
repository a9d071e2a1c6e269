"""Logits -> one drawn token per row. Parameters are arrays with one entry per row: changing them compiles nothing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxagent.types import pytree

BLOCK = 128  # vocabulary entries whose sum is one step of the coarse search
BIASES = 512  # ids whose logits one request may change
NO_ID = 2**31 - 1


@pytree
class Bias:
  """What is added to logits: `added` at the ids (`NO_ID` is filler), `rest` everywhere else: 0, or -inf to forbid."""

  id: Int[Array, "B W"]
  added: Float[Array, "B W"]
  rest: Float[Array, "B"]


@pytree
class Rules:
  """How each of B rows is sampled; see `jaxagent.sampling.Sampling` for the meaning of the values."""

  temperature: Float[Array, "B"]
  top_k: Int[Array, "B"]
  top_p: Float[Array, "B"]
  min_p: Float[Array, "B"]
  bias: Bias | None = None


@pytree
class Drawn:
  """One token per row, with what the record of a rollout keeps of it (nats)."""

  id: Int[Array, "B"]
  logp_rollout: Float[Array, "B"]
  logp_sampled: Float[Array, "B"]
  entropy: Float[Array, "B"]


def uniforms(keys: UInt32[Array, "B 2"], position: Int[Array, "B"]) -> Float[Array, "B"]:
  """u_b in [0, 1) from (keys[b], position[b]) alone: the same whatever the other rows, the slot or the call."""

  def one(key, at):
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), at))

  return jax.vmap(one)(keys, position)


def sample(logits: Float[Array, "B V"], uniform: Float[Array, "B"], rules: Rules) -> Drawn:
  """x ~ q by inverse CDF, q = softmax((logits + bias) / T) after top-k, then top-p, then min-p; argmax where T = 0.

  `logp_rollout` = log softmax(logits / T)[x], before bias and truncation, what a scorer of the same T computes.
  `logp_sampled` = log q(x). `entropy` is that of softmax(logits / T). All in float32 nats. A row with T = 0 is drawn
  from a point mass, so its `logp_sampled` is 0; its `logp_rollout` and `entropy` are taken at T = 1 (such rows are not
  trained on). A token of probability 0 under q is never drawn. Logits of -inf are allowed; NaN gives NaN log-probs and
  a valid id.
  """
  greedy = rules.temperature == 0
  temperature = jnp.where(greedy, 1.0, rules.temperature)[:, None]
  logits = logits.astype(jnp.float32)
  z = (logits - jnp.max(logits, -1, keepdims=True)) / temperature
  mass = jnp.exp(z)
  total = jnp.sum(mass, -1)
  entropy = jnp.log(total) - jnp.sum(jnp.where(mass > 0, mass * z, 0.0), -1) / total
  biased, scores = jnp.zeros(greedy.shape, bool), z
  if (bias := rules.bias) is not None:
    biased = (bias.rest != 0) | jnp.any(bias.id != NO_ID, -1)
    scores = jax.lax.cond(
      jnp.any(biased), lambda: jnp.where(biased[:, None], _add(bias, logits) / temperature, z), lambda: z
    )
  truncates = ((rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)) & ~greedy
  changed = truncates | biased
  kept = jax.lax.cond(jnp.any(changed), lambda: jnp.where(keep(scores, rules), jnp.exp(scores), 0.0), lambda: mass)
  chosen = jnp.where(greedy, jnp.argmax(scores, -1), inverse_cdf(kept, uniform)).astype(jnp.int32)

  def at(x):
    return jnp.take_along_axis(x, chosen[:, None], -1)[:, 0]

  logp_rollout = at(z) - jnp.log(total)
  logp_sampled = jnp.where(changed, at(scores) - jnp.log(jnp.sum(kept, -1)), logp_rollout)
  return Drawn(chosen, logp_rollout, jnp.where(greedy, 0.0, logp_sampled), entropy)


def _add(bias: Bias, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
  """Logits plus bias, less the largest."""
  rows = jnp.arange(logits.shape[0])[:, None]
  added = jnp.broadcast_to(bias.rest[:, None], logits.shape).at[rows, bias.id].set(bias.added, mode="drop")
  changed = logits + added
  return changed - jnp.max(changed, -1, keepdims=True)


def keep(z: Float[Array, "B V"], rules: Rules) -> Bool[Array, "B V"]:
  """Which entries survive top-k, then top-p over what is left, then min-p. `z` are log-probs up to a constant per row.

  Top-k keeps exactly k entries, top-p the smallest set of the most probable entries whose mass is at least p; of equal
  entries the one with the lower index goes first. Min-p keeps p(x) >= min_p · max p. At least one entry is kept.
  """
  z = z - jnp.max(z, -1, keepdims=True)
  ranked = (rules.top_k > 0) | (rules.top_p < 1)
  everything = jnp.ones(z.shape, bool)
  kept = jax.lax.cond(jnp.any(ranked), lambda: _keep_ranked(z, rules) | ~ranked[:, None], lambda: everything)
  return kept & (jnp.exp(z) >= rules.min_p[:, None])


def _keep_ranked(z, rules):
  size = z.shape[-1]
  index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), z.shape)
  negative, order = jax.lax.sort_key_val(-z, index, dimension=-1, is_stable=True)
  first_k = index < jnp.where(rules.top_k > 0, rules.top_k, size)[:, None]
  mass = jnp.where(first_k, jnp.exp(-negative), 0.0)
  before = jnp.cumsum(mass, -1) - mass
  enough = before >= (rules.top_p * jnp.sum(mass, -1))[:, None]
  kept = first_k & ~(enough & (rules.top_p < 1)[:, None])
  last = jnp.maximum(jnp.sum(kept, -1, keepdims=True) - 1, 0)
  threshold = -jnp.take_along_axis(negative, last, -1)
  return (z > threshold) | ((z == threshold) & (index <= jnp.take_along_axis(order, last, -1)))


def inverse_cdf(mass: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
  """min{x : mass[x] > 0 and sum(mass[:x + 1]) > u · sum(mass)}: one uniform per row. `mass` need not be normalised.

  Searched in two levels, sums of blocks and then one block, so no prefix sum over the whole vocabulary is taken.
  """
  rows, size = mass.shape
  blocks = -(-size // BLOCK)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * BLOCK - size))).reshape(rows, blocks, BLOCK)
  sums = jnp.sum(mass, -1)
  upto = jnp.cumsum(sums, -1)
  target = uniform * upto[:, -1]
  block = _first_above(upto, sums, target)[:, None]
  inside = jnp.take_along_axis(mass, block[..., None], 1)[:, 0]
  before = jnp.take_along_axis(upto - sums, block, -1)[:, 0]
  return block[:, 0] * BLOCK + _first_above(jnp.cumsum(inside, -1), inside, target - before)


def _first_above(upto, mass, target):
  """First entry of positive mass whose prefix sum is above target; where rounding leaves none, the last of those."""
  index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
  above = (upto > target[:, None]) & (mass > 0)
  last = jnp.max(jnp.where(mass > 0, index, 0), -1)
  return jnp.where(jnp.any(above, -1), jnp.argmax(above, -1).astype(jnp.int32), last)
