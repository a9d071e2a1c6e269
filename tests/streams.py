"""Token streams for the tests of the engine: small policies, and what a full forward says of a stream."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.policy import Hidden, Policy

VOCABULARY, WIDTH = 17, 8
WINDOW, ROOM, STEPS = 6, 20, 5
SHAPE = {"vocab_size": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "init_scale": 0.5}


def toy_policy() -> Policy:
  """One attention layer with learned positions; its "experts" are the token and its position, so rows are known."""

  def init(key):
    shapes = {"embed": (VOCABULARY, WIDTH), "place": (512, WIDTH), "mix": (WIDTH, 24), "head": (WIDTH, VOCABULARY)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / 2 for k, (name, shape) in zip(keys, shapes.items())}

  def project(params, tokens, position):
    x = params["embed"][tokens] + params["place"][position]
    return x, *jnp.split(jnp.einsum("btd,de->bte", x, params["mix"]), 3, -1)

  def read(x, q, k, v, mask):
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k) / WIDTH, -1e30)
    return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), v)

  def forward(params, tokens, position, segment):
    x, q, k, v = project(params, tokens, position)
    mask = (segment[:, :, None] == segment[:, None]) & (position[:, :, None] >= position[:, None])
    return Hidden(read(x, q, k, v, mask))

  def cache(rows, capacity):
    k, v = (jnp.full((capacity, rows, WIDTH), 1e3) for _ in range(2))
    return {"k": k, "v": v, "position": jnp.full((rows, capacity), -1)}

  def extend(weights, cache, tokens, position):
    x, q, k, v = project(weights, tokens, position)
    rows, slot = jnp.arange(len(tokens))[:, None], jnp.where(position < 0, cache["position"].shape[1], position)
    k, v = (cache[n].at[slot, rows].set(new, mode="drop") for n, new in (("k", k), ("v", v)))
    stored = cache["position"].at[rows, slot].set(position, mode="drop")
    mask = (stored[:, None] >= 0) & (stored[:, None] <= position[..., None])
    states = read(x, q, k.swapaxes(0, 1), v.swapaxes(0, 1), mask)
    routing = jnp.stack([tokens, position], -1)[:, :, None].astype(jnp.int16)
    return Hidden(states, {"routing": routing}), {"k": k, "v": v, "position": stored}

  def head(params, states):
    return states @ params["head"]

  return Policy(init, forward, head, lambda params: params, cache, extend, None, VOCABULARY)


SLIDING = {"attention": "prefix_sliding", "window": WINDOW, "max_prefix": ROOM}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 24}
CONFIGS = {
  "dense": DecoderConfig(**SHAPE, mlp_width=48, qk_norm=True),
  "moe": DecoderConfig(**SHAPE, **EXPERTS),
  "sliding": DecoderConfig(**SHAPE, **SLIDING, mlp_width=48, qk_norm=True),
  "mixed moe": DecoderConfig(**SHAPE | SLIDING | EXPERTS | {"attention": ("full", "prefix_sliding")}),
}


class Letters:
  """Token i is the i-th letter."""

  def decode(self, ids):
    return "".join(chr(97 + i) for i in ids)


@functools.cache
def built(name):
  policy = toy_policy() if name == "toy" else decoder_policy(CONFIGS[name], rewind=STEPS)
  return policy, policy.init(jax.random.key(7))


@functools.cache
def scorer(name):
  policy, _ = built(name)

  @jax.jit
  def score(params, tokens, temperature, prefix_length):
    position = jnp.arange(tokens.shape[1])[None]
    kept = {} if policy.max_prefix is None else {"prefix_end": jnp.full_like(position, prefix_length)}
    hidden = policy.forward(params, tokens, position, jnp.zeros_like(position), **kept)
    logp = jax.nn.log_softmax(policy.head(params, hidden.states).astype(jnp.float32) / temperature)
    return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[0, :, 0], jnp.argmax(logp[0], -1), hidden.aux

  return score


def rescore(name, tokens, temperature=1.0, params=None, prefix_length=0, width=224):
  """log softmax(logits / T) of every token but the first, every greedy successor, and aux, in one full forward."""
  padded = np.zeros((1, width), np.int32)
  padded[0, : len(tokens)] = tokens
  params = built(name)[1] if params is None else params
  logp, greedy, aux = scorer(name)(params, padded, temperature or 1.0, prefix_length)
  size = len(tokens)
  return np.asarray(logp)[: size - 1], np.asarray(greedy)[:size], jax.tree.map(lambda x: np.asarray(x)[0, :size], aux)


def prompts_of(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
