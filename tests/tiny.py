"""A policy small enough to check by hand, and ragged rollouts with rubbish wherever nobody may look."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.policy import Hidden, Policy
from jaxagent.types import Rollouts

V, D, T = 64, 16, 24
QUICK = {"xla_backend_optimization_level": 0}  # compiler options: these programs are compiled more often than run


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
  """Rows 0 and 1 branch from one rollout, group 2 has equal rewards, then an invalid row and an empty one.

  Masked places, invalid rows and what lies past the length hold `rubbish` (or ids that no vocabulary has).
  """
  rng = np.random.default_rng(seed)
  row = np.arange(n)
  length = np.where(row == n - 1, 0, rng.integers(8, width + 1, n))
  tokens, mask, turn = rng.integers(0, V, (n, width)), np.zeros((n, width), bool), np.full((n, width), -1)
  prefix = np.where(length > 0, rng.integers(2, 5, n), 0)
  for i in range(n - 1):
    first = prefix[i] + rng.integers(2, 4)
    mask[i, prefix[i] : first], turn[i, prefix[i] : first] = True, 0
    mask[i, first + 1 : length[i]], turn[i, first + 1 : length[i]] = True, 1
  rollout = np.maximum(row - 1, 0)
  group, valid = rollout // 4, row < n - 2
  reward = rng.integers(0, 2, n).astype(np.float32)[rollout]
  reward[group == 2] = 0.35
  spoiled = np.where(mask & valid[:, None], 0, rubbish)
  old, noise = -rng.exponential(1.0, (n, width)), 0.2 * rng.normal(size=(n, width))
  reference = -rng.exponential(1.0, (n, width)) + spoiled
  return Rollouts(
    tokens=np.where(np.arange(width) < length[:, None], tokens, -7),
    position=np.broadcast_to(np.arange(width), (n, width)).copy(),
    mask=mask, turn=turn, length=length, prefix_length=prefix, rollout=rollout, agent=np.zeros(n, int), group=group,
    env=np.zeros(n, int), task=group, outcome=reward, reward=np.where(valid, reward, rubbish).astype(np.float32),
    turn_reward=np.zeros((n, 2), np.float32), valid=valid, truncated=row % 5 == 4,
    temperature=rng.choice([0.7, 1.0, 1.3], n).astype(np.float32),
    logp_rollout=(old + noise + spoiled).astype(np.float32), logp_old=(old + spoiled).astype(np.float32),
    logp_ref=reference.astype(np.float32) if ref else None,
  )  # fmt: skip
