"""A policy small enough to check by hand, and ragged rollouts with rubbish wherever nobody may look."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.policy import Hidden, Policy
from jaxagent.types import Rollouts

V, D, T = 64, 16, 24


def tiny_policy(vocab_size=V, width=D, positions=T):
  """Embeddings and one attention layer over segments."""

  def init(key):
    k = iter(jax.random.split(key, 5))
    shapes = {"embed": (vocab_size, width), "position": (positions, width), **{n: (width, width) for n in "qkv"}}
    return {name: 0.3 * jax.random.normal(next(k), shape) for name, shape in shapes.items()}

  def forward(params, tokens, position, segment, *, prefix_end=None, routing=None):
    x = params["embed"][tokens] + params["position"][position]
    t = jnp.arange(tokens.shape[1])
    sees = (t[None, :] <= t[:, None])[None] & (segment[:, :, None] == segment[:, None, :]) & (segment >= 0)[:, :, None]
    scores = jnp.einsum("btd,bsd->bts", x @ params["q"], x @ params["k"]) / width**0.5
    mixed = jax.nn.softmax(jnp.where(sees, scores, -1e30), -1) @ (x @ params["v"])
    return Hidden(jnp.where((segment >= 0)[..., None], x + mixed, 0.0))

  def head(params, states):
    return states @ params["embed"].T

  axes = {"embed": ("vocab", "embed"), "position": (None, "embed"), **{n: ("embed", "heads") for n in "qkv"}}
  return Policy(init, forward, head, lambda p: p, None, None, axes, vocab_size)


def ragged(seed=0, n=16, width=T, rubbish=np.nan, ref=False):
  """Rows 0 and 1 are branches of one rollout, row n - 1 is invalid, group 2 has equal rewards; `rubbish` at masked places."""
  rng = np.random.default_rng(seed)
  length = rng.integers(8, width + 1, n)
  tokens, mask, turn = rng.integers(0, V, (n, width)), np.zeros((n, width), bool), np.full((n, width), -1)
  prefix = rng.integers(2, 5, n)
  for i in range(n):
    first = prefix[i] + rng.integers(2, 4)
    mask[i, prefix[i] : first], turn[i, prefix[i] : first] = True, 0
    mask[i, first + 1 : length[i]], turn[i, first + 1 : length[i]] = True, 1
  rollout = np.maximum(np.arange(n) - 1, 0)
  group = rollout // 4
  reward = rng.integers(0, 2, n).astype(np.float32)[rollout]
  reward[group == 2] = 0.35
  valid = np.arange(n) != n - 1
  spoiled = np.where(mask & valid[:, None], 0, rubbish)

  def logp(scale=1.0):
    return (-rng.exponential(scale, (n, width)) + spoiled).astype(np.float32)

  old = logp()
  return Rollouts(
    tokens=np.where(np.arange(width) < length[:, None], tokens, -7),
    position=np.broadcast_to(np.arange(width), (n, width)).copy(),
    mask=mask, turn=turn, length=length, prefix_length=prefix, rollout=rollout, agent=np.zeros(n, int), group=group,
    env=np.zeros(n, int), task=group, outcome=reward, reward=np.where(valid, reward, np.nan).astype(np.float32),
    turn_reward=np.zeros((n, 2), np.float32), valid=valid, truncated=np.arange(n) % 5 == 4,
    temperature=rng.choice([0.7, 1.0, 1.3], n).astype(np.float32),
    logp_rollout=(old + 0.2 * rng.normal(size=old.shape)).astype(np.float32), logp_old=old, logp_ref=logp() if ref else None,
  )  # fmt: skip
