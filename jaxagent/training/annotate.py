"""Facts from outside the arrays, between collecting rollouts and computing the objective."""

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.methods.annotators import Given
from jaxagent.methods.objective import Annotator
from jaxagent.models.chat import Chat
from jaxagent.rollout.batch import column
from jaxagent.sampling.engine import Engine
from jaxagent.types import Rollouts, Trajectory


@dataclasses.dataclass(frozen=True)
class Tools:
  """What an annotator may use beside the trajectories."""

  chat: Chat
  engine: Engine


def annotate(
  annotators: Sequence[Annotator], trajectories: Sequence[Trajectory], tools: Tools, rollouts: Rollouts
) -> dict[str, np.ndarray]:
  """Columns `[N, ...]` for `rollouts`, whose rows the trajectories are, from every annotator on every group.

  An entry per trajectory, of a kind that `rollout.batch.column` takes; zeros for filler rows. A `Given` without a
  source is not asked for what the rollouts hold already.
  ValueError: an annotator that returns other columns than it declares, or not one entry per trajectory; those of
  `column`.
  """
  rows: dict[int, list[int]] = {}
  for row, trajectory in enumerate(trajectories):
    rows.setdefault(trajectory.group, []).append(row)
  there = [isinstance(a, Given) and a.source is None and set(a.columns) <= set(rollouts.columns) for a in annotators]
  asked = [annotator for annotator, held in zip(annotators, there) if not held]
  jobs = [(annotator, group) for annotator in asked for group in rows.values()]

  async def run() -> list[Mapping[str, Any]]:
    return await asyncio.gather(*(a([trajectories[i] for i in group], tools) for a, group in jobs))

  entries: dict[str, dict[int, Any]] = {}
  for (annotator, group), columns in zip(jobs, _run(run)):
    if set(columns) != set(annotator.columns):
      raise ValueError(f"{type(annotator).__name__} declares {annotator.columns} but returned {tuple(columns)}")
    for name, values in columns.items():
      if len(values) != len(group):
        raise ValueError(f"{type(annotator).__name__}: {name} has {len(values)} entries for {len(group)} trajectories")
      entries.setdefault(name, {}).update(zip(group, values))
  shape = (*rollouts.tokens.shape, rollouts.turn_reward.shape[1])
  return {name: column(name, found, trajectories, shape) for name, found in entries.items()}


def with_columns(rollouts: Rollouts, columns: Mapping[str, Any]) -> Rollouts:
  """`rollouts` with these columns: fields where they have the name of one, else in `rollouts.columns`."""
  fields = {f.name for f in dataclasses.fields(Rollouts)} - {"columns"}
  own = {k: v for k, v in columns.items() if k in fields}
  rest = {k: v for k, v in columns.items() if k not in fields}
  return dataclasses.replace(rollouts, columns={**rollouts.columns, **rest}, **own)


def _run(job) -> list:
  """The coroutine's result, also where an event loop is running already (a notebook)."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(job())
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, job()).result()

