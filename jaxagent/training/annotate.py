"""Facts from outside the arrays, between collecting rollouts and computing the objective."""

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.methods.objective import Annotator
from jaxagent.models.chat import Chat
from jaxagent.sampling.engine import Engine
from jaxagent.types import Rollouts, Trajectory


@dataclasses.dataclass(frozen=True)
class Tools:
  """What an annotator may use beside the trajectories."""

  chat: Chat
  engine: Engine


def annotate(
  annotators: Sequence[Annotator], trajectories: Sequence[Trajectory], tools: Tools, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
  """Columns `[N, ...]` from every annotator on every group, N and T of `shape`; zeros for filler rows.

  An entry per trajectory: a number, an array of one fixed shape, or one value per token, which is padded to T with 0.
  ValueError: an annotator that returns other columns than it declares, or not one entry per trajectory.
  """
  rows: dict[int, list[int]] = {}
  for row, trajectory in enumerate(trajectories):
    rows.setdefault(trajectory.group, []).append(row)
  jobs = [(annotator, group) for annotator in annotators for group in rows.values()]

  async def run() -> list[Mapping[str, Any]]:
    return await asyncio.gather(*(a([trajectories[i] for i in group], tools) for a, group in jobs))

  entries: dict[str, dict[int, np.ndarray]] = {}
  for (annotator, group), columns in zip(jobs, _run(run)):
    if set(columns) != set(annotator.columns):
      raise ValueError(f"{type(annotator).__name__} declares {annotator.columns} but returned {tuple(columns)}")
    for name, values in columns.items():
      if len(values) != len(group):
        raise ValueError(f"{type(annotator).__name__}: {name} has {len(values)} entries for {len(group)} trajectories")
      entries.setdefault(name, {}).update(zip(group, map(np.asarray, values)))
  return {name: _column(name, found, trajectories, shape) for name, found in entries.items()}


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


def _column(name: str, entries: dict[int, np.ndarray], trajectories, shape: tuple[int, int]) -> np.ndarray:
  n, t = shape
  per_token = all(e.ndim and len(e) == len(trajectories[i].tokens) for i, e in entries.items())
  shapes = {(t, *e.shape[1:]) if per_token else e.shape for e in entries.values()}
  if len(shapes) > 1:
    raise ValueError(f"column {name!r} has entries of shapes {sorted(shapes)}; give one shape, or one value per token")
  first = next(iter(entries.values()))
  out = np.zeros((n, *shapes.pop()), np.float32 if first.dtype.kind == "f" else first.dtype)
  for i, entry in entries.items():
    out[(i, slice(len(entry))) if per_token else i] = entry
  return out
