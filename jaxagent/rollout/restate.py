"""A rollout under another first prompt: the same words, as if the policy had been asked differently."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxagent.types import PerTurn, Trajectory


def with_prefix(trajectory: Trajectory, prefix: Sequence[int]) -> Trajectory:
  """A copy whose first prompt is `prefix`, and what was said after it as it was, at the positions that follow.

  Its column `logp_privileged` (nats, per token) holds the log-probs under the old prompt, of the policy that sampled;
  `logp_rollout` keeps them too, so that the gap to the trainer's is what the prompts differ by. Recorded experts belong
  to the old prompt and count as not recorded. Columns per token move with their tokens, new ones get 0; numbers
  that mean a place in the row are not changed.
  ValueError: a trajectory without a prompt, or still running, and an empty `prefix`.
  """
  old, new = trajectory.prefix_length, len(prefix)
  if not old or trajectory.status == "running":
    raise ValueError(
      f"with_prefix takes a finished rollout with a first prompt, got status {trajectory.status!r} and a prompt of"
      f" {old} tokens"
    )
  ids = np.asarray(prefix)
  if ids.ndim != 1 or (new and (ids.dtype.kind not in "iu" or ids.min() < 0)):
    raise ValueError(f"with_prefix: the new prefix must be token ids, got {prefix!r}")
  if not new:
    raise ValueError("with_prefix needs at least one token in the new prefix: the first action is predicted from it")
  length = len(trajectory.tokens)

  def moved(values: list, fill) -> list:
    return [fill] * new + list(values[old:])

  def column(x):
    if isinstance(x, PerTurn) or np.ndim(x) == 0 or len(x) != length:
      return x
    x = np.asarray(x)
    return np.concatenate([np.zeros((new, *x.shape[1:]), x.dtype), x[old:]])

  columns = {name: column(x) for name, x in trajectory.columns.items()}
  logp = moved(trajectory.logp_rollout, 0.0)
  return dataclasses.replace(
    trajectory,
    prefix_length=new,
    tokens=[*map(int, prefix), *trajectory.tokens[old:]],
    action=moved(trajectory.action, False),
    turn=moved(trajectory.turn, -1),
    logp_rollout=logp,
    logp_sampled=moved(trajectory.logp_sampled, 0.0),
    entropy=moved(trajectory.entropy, 0.0),
    version=moved(trajectory.version, -1),
    routing=[],
    columns={**columns, "logp_privileged": np.array(logp, np.float32)},
    turn_reward=list(trajectory.turn_reward),
    turn_step=list(trajectory.turn_step),
    transcript=list(trajectory.transcript),
  )
