"""Every preset as a Method, and one ragged batch that has the columns of all of them."""

import dataclasses

import numpy as np
import tiny

from jaxagent.methods import PRESETS, Method
from jaxagent.types import Rollouts

N, T, S = 16, tiny.T, 2
OPTIONS = {
  "spo_plus_plus": {"tasks": N}, "spo_muon": {"tasks": N}, "dapo_within": {"limit": 20, "margin": 10},
  "dr_grpo_within": {"max_tokens": 24},
}  # fmt: skip
METHODS = {k: v if isinstance(v, Method) else v(**OPTIONS.get(k, {})) for k, v in PRESETS.items()}


def dressed(r: Rollouts, logp: np.ndarray, rubbish: float) -> Rollouts:
  """`tiny.ragged` with outcomes 0 and 1, log-probs near `logp [N, T]` and all columns; rubbish where none may look."""
  rng = np.random.default_rng(7)
  live = r.mask & r.valid[:, None]
  outcome = (r.rollout % 3 == 0).astype(np.float32)
  old, sampled = logp + 0.15 * rng.normal(size=(2, N, T))
  extra = {name: spoiled(x, live, r.valid, rubbish) for name, x in columns(rng).items()}
  extra["forced"] = live & (np.cumsum(live, axis=1) == 1)
  return dataclasses.replace(
    r, outcome=outcome, reward=np.where(r.valid, outcome, rubbish).astype(np.float32), agent=(np.arange(N) == 1) * 1,
    turn_reward=np.where(r.valid[:, None], 0.1 * rng.random((N, S)), rubbish).astype(np.float32),
    logp_old=np.where(live, old, rubbish).astype(np.float32), version=np.where(live, 3, -1),
    logp_rollout=np.where(live, sampled, rubbish).astype(np.float32), bootstrap=np.zeros(N, np.float32),
    value=np.where(live, rng.normal(size=(N, T)), rubbish).astype(np.float32),
    columns=extra,
  )  # fmt: skip


def columns(rng):
  per_turn = rng.random((N, S)).astype(np.float32)
  return dict(
    rewards=rng.normal(size=(N, 2)), penalties=-0.3 * rng.random((N, 2)), anchor=rng.integers(-1, 3, (N, S)),
    step_quality=np.where(per_turn < 0.3, np.nan, per_turn), step_credit=per_turn, verdict=rng.integers(-1, 2, (N, 5)),
    logp_privileged=rng.normal(size=(N, T)), first_error=rng.integers(0, T, N), tool_cost=rng.integers(0, 5, N),
    assertions_passed=rng.integers(-1, 40, N), potential=rng.random((N, S + 1)), reference_accuracy=rng.random(N),
    reference_tokens=rng.integers(10, 40, N), selection=rng.choice(np.array([-1.0, -1, 0, 0.5, 1]), N),
  )  # fmt: skip


def spoiled(x, live, valid, rubbish):
  if x.dtype.kind == "i":
    return x.astype(np.int32)
  looked_at = live if x.shape == (N, T) else np.expand_dims(valid, tuple(range(1, x.ndim)))
  return np.where(looked_at, x, rubbish).astype(np.float32)


def tracked(method: Method, r: Rollouts) -> dict:
  """The columns that the method's trackers provide at their first batch."""
  return {k: x for tracker in method.trackers for k, x in tracker.update(tracker.init(), r)[1].items()}
