"""The sampled tokens of rollouts, scored as if the policy had been asked differently."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.methods import plain
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.packing import pack, unpack
from jaxagent.rollout.restate import with_prefix
from jaxagent.types import Scores, Trajectory

ROW = 128  # rows are padded to this times a power of two, and so is their number, so that few programs are compiled


def rescored(
  scorer: Callable[..., Scores],
  params: Any,
  asked: Sequence[tuple[Trajectory, Sequence[int]]],
  *,
  microbatch_rows: int,
) -> list[np.ndarray]:
  """Log-probs (nats, at the row's temperature) of each trajectory's tokens under another first prompt, at the places
  that they have in the trajectory; 0 in its prompt.

  `scorer` is `training.step.make_scorer`'s. Recorded experts belong to the old prompt: the router chooses anew.
  """
  rows = [with_prefix(trajectory, prefix) for trajectory, prefix in asked]
  length, microbatches = _doubled(ROW, max(len(row.tokens) for row in rows)), _doubled(1, len(rows) / microbatch_rows)
  turns = max(row.turns for row in rows)
  apart = plain(to_rollouts([_alone(row, i) for i, row in enumerate(rows)], tokens=length, turns=turns))
  batch, plan = pack(apart, row_tokens=length, rows=microbatch_rows, microbatches=microbatches)
  logp = unpack(jax.device_get(scorer(params, batch, plan.microbatches).logp), plan)
  return [_moved(logp[i], *one) for i, one in enumerate(asked)]


def _doubled(size: int, least: float) -> int:
  while size < least:
    size *= 2
  return size


def _alone(row: Trajectory, number: int) -> Trajectory:
  """The row as a rollout of its own, without what is not scored."""
  row.rollout, row.group, row.agent, row.turn_step, row.columns = number, number, 0, [], {}
  return row


def _moved(logp: np.ndarray, trajectory: Trajectory, prefix: Sequence[int]) -> np.ndarray:
  out = np.zeros(len(trajectory.tokens), np.float32)
  old, new = trajectory.prefix_length, len(prefix)
  out[old:] = logp[new : new + len(trajectory.tokens) - old]
  return out
