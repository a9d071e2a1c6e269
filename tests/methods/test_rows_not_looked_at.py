"""No preset looks at the columns of an invalid row, nor at a per-turn column off the row's turns: eagerly or jitted."""

import dataclasses

import jax
import numpy as np
from numpy.testing import assert_allclose
from ragged import N, S, T, ragged
from thinned import thinned

from jaxagent.methods import PRESETS, Method, credit, prepare
from jaxagent.types import Rollouts

OPTIONS = {"spo_plus_plus": {"tasks": N}, "spo_muon": {"tasks": N}}
METHODS = {k: v if isinstance(v, Method) else v(**OPTIONS.get(k, {})) for k, v in PRESETS.items()}


def columns(rng, group):
  per_turn = rng.random((N, S)).astype(np.float32)
  return dict(
    rewards=rng.normal(size=(N, 2)), penalties=-0.3 * rng.random((N, 2)), anchor=rng.integers(-1, 3, (N, S)),
    step_quality=np.where(per_turn < 0.3, np.nan, per_turn), step_credit=per_turn, verdict=rng.integers(-1, 2, (N, 5)),
    logp_privileged=rng.normal(size=(N, T)), first_error=rng.integers(0, T, N), tool_cost=rng.integers(0, 5, N),
    assertions_passed=rng.integers(-1, 40, N), potential=rng.random((N, S + 1)), reference_accuracy=rng.random(N),
    reference_tokens=rng.integers(10, 40, N), positive_weight=np.ones((N, T)), forced=np.zeros((N, T), bool),
    selection=rng.choice(np.array([-1.0, 0, 0.5, 1]), N),
  )  # fmt: skip


def rollouts(spoil):
  b, rng = ragged(11), np.random.default_rng(0)
  mask, valid, turn = b["mask"], b["valid"], np.where(b["mask"], b["turn"], -1)
  assert not valid.all() and mask.any(1)[valid].any()
  here = (turn[:, :, None] == np.arange(S)).any(1)
  outcome = (b["rollout"] % 2).astype(np.float32)
  extra = {k: spoil(x[b["rollout"]], valid, here) for k, x in columns(rng, b["group"]).items()}
  old, sampled, reference = np.where(mask, -rng.exponential(size=(3, N, T)), np.nan).astype(np.float32)
  zero = np.zeros(N, np.int32)
  return Rollouts(
    tokens=np.zeros((N, T), np.int32), position=np.tile(np.arange(T), (N, 1)), mask=mask, turn=turn,
    length=np.full(N, T), prefix_length=zero, rollout=b["rollout"], agent=zero, group=b["group"], env=zero,
    task=b["group"], outcome=np.where(valid, outcome, np.nan), reward=np.where(valid, outcome, np.nan),
    turn_reward=spoil(np.zeros((N, S), np.float32), valid, np.ones((N, S), bool)), valid=valid,
    truncated=np.zeros(N, bool), temperature=np.ones(N, np.float32), logp_rollout=sampled, logp_old=old,
    logp_ref=reference, version=np.where(mask, 3, -1), value=b["value"], bootstrap=b["bootstrap"], columns=extra,
  )  # fmt: skip


def clean(x, valid, here):
  return x


def spoiled(x, valid, here):
  rubbish = {"f": np.nan, "i": -(10**6), "b": True}[x.dtype.kind]
  looked_at = np.broadcast_to(np.expand_dims(valid, tuple(range(1, x.ndim))), x.shape)
  if x.shape == (N, S):
    looked_at = looked_at & here
  return np.where(looked_at, x, np.asarray(rubbish, x.dtype))


def prepared(method, spoil, wrap):
  r = rollouts(spoil)
  extra = {k: x for t in method.trackers for k, x in t.update(t.init(), r)[1].items()}
  r = dataclasses.replace(r, columns={**r.columns, **extra})
  p, metrics = wrap(lambda r: (prepare(method, r), credit(method, r)[1]))(r)
  return p.advantage, p.weight, p.aggregate, *metrics.values()


@thinned("wrap, name", [lambda f: f, jax.jit], METHODS, every=4)
def test_nothing_looks_at_them(name, wrap):
  want, got = (prepared(METHODS[name], spoil, wrap) for spoil in (clean, spoiled))
  for a, b in zip(got, want):
    assert_allclose(a, b, atol=1e-6)
