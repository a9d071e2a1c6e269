"""Facts from outside the arrays, between collecting rollouts and computing the objective."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.judges import Panel
from jaxagent.methods.annotators import Given, Rescore
from jaxagent.methods.objective import Annotator
from jaxagent.models.chat import Chat
from jaxagent.rollout.batch import column
from jaxagent.rollout.collect import run, together
from jaxagent.sampling.engine import Engine
from jaxagent.types import Rollouts, Trajectory

# log-probs of rows under other first prompts, in the places of the rows' own tokens
Rescorer = Callable[[Sequence[tuple[Trajectory, Sequence[int]]]], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Tools:
  """What an annotator may use beside the trajectories; the last two where the config names them."""

  chat: Chat
  engine: Engine
  judge: Panel | None = None
  encoder: Callable[[list[str]], np.ndarray] | None = None


def annotate(
  annotators: Sequence[Annotator],
  trajectories: Sequence[Trajectory],
  tools: Tools | None,
  rollouts: Rollouts,
  rescore: Rescorer | None = None,
) -> dict[str, np.ndarray]:
  """Columns `[N, ...]` for `rollouts`, whose rows the trajectories are, from every annotator on every group.

  An entry per trajectory, of a kind that `rollout.batch.column` takes; zeros for filler rows. All `Rescore` entries are
  computed in one call of `rescore`, in the order of columns and rows. Where an entry is None, `valid` becomes False in
  all rows of the rollout. A `Given` without a source is not asked for what the rollouts hold already.
  ValueError: an annotator that returns other columns than it declares, or not one entry per trajectory; a column of
  which no row that was valid has an entry; those of `column`.
  """
  rows: dict[int, list[int]] = {}
  for row, trajectory in enumerate(trajectories):
    rows.setdefault(trajectory.group, []).append(row)
  there = [isinstance(a, Given) and a.source is None and set(a.columns) <= set(rollouts.columns) for a in annotators]
  asked = [annotator for annotator, held in zip(annotators, there) if not held]
  jobs = [(annotator, group) for annotator in asked for group in rows.values()]

  async def answers() -> list[Mapping[str, Any]]:
    async with _entered(tools):
      return await together([a([trajectories[i] for i in group], tools) for a, group in jobs])

  entries: dict[str, dict[int, Any]] = {}
  for (annotator, group), columns in zip(jobs, run(answers())):
    if set(columns) != set(annotator.columns):
      raise ValueError(f"{type(annotator).__name__} declares {annotator.columns} but returned {tuple(columns)}")
    for name, values in columns.items():
      if len(values) != len(group):
        raise ValueError(f"{type(annotator).__name__}: {name} has {len(values)} entries for {len(group)} trajectories")
      entries.setdefault(name, {}).update(zip(group, values))
  valid = _still_valid(entries, trajectories, rollouts, tools)
  entries = {name: {row: x for row, x in found.items() if x is not None} for name, found in entries.items()}
  _rescored(entries, trajectories, rescore)
  shape = (*rollouts.tokens.shape, rollouts.turn_reward.shape[1])
  columns = {name: column(name, found, trajectories, shape) for name, found in entries.items()}
  return columns if valid is None else {**columns, "valid": valid}


def with_columns(rollouts: Rollouts, columns: Mapping[str, Any]) -> Rollouts:
  """`rollouts` with these columns: fields where they have the name of one, else in `rollouts.columns`."""
  fields = {f.name for f in dataclasses.fields(Rollouts)} - {"columns"}
  own = {k: v for k, v in columns.items() if k in fields}
  rest = {k: v for k, v in columns.items() if k not in fields}
  return dataclasses.replace(rollouts, columns={**rollouts.columns, **rest}, **own)


def lost_rollouts(before: Rollouts, after: Rollouts) -> int:
  """Logical rollouts that were valid before and are not after."""
  return len(np.unique(np.asarray(before.rollout)[np.asarray(before.valid) & ~np.asarray(after.valid)]))


def _still_valid(
  entries: Mapping[str, Mapping[int, Any]], trajectories: Sequence[Trajectory], rollouts: Rollouts, tools: Tools | None
) -> np.ndarray | None:
  """`valid` without the rollouts of which an entry is missing; None if none is."""
  missing = {row: name for name, found in entries.items() for row, x in found.items() if x is None}
  if not missing:
    return None
  lost = {trajectories[row].rollout for row in missing}
  hit = [row for row, trajectory in enumerate(trajectories) if trajectory.rollout in lost]
  valid = np.array(rollouts.valid)
  before = int(valid.sum())
  valid[hit] = False
  if before and not valid.any():
    cause = getattr(getattr(tools, "judge", None), "cause", "")
    because = f"; the last failure: {cause}" if cause else ""
    names = ", ".join(sorted(set(missing.values())))
    raise ValueError(f"no rollout of the batch has {names}, so there is nothing to train on{because}")
  return valid


def _rescored(
  entries: dict[str, dict[int, Any]], trajectories: Sequence[Trajectory], rescore: Rescorer | None
) -> None:
  """Puts log-probs in the place of all `Rescore` entries."""
  wanted = [(name, row) for name in sorted(entries) for row in sorted(entries[name]) if _asks(entries[name][row])]
  if not wanted:
    return
  if rescore is None:
    raise ValueError(f"{wanted[0][0]} is to be scored under another prompt, but annotate has no `rescore`")
  found = rescore([(trajectories[row], entries[name][row].prefix) for name, row in wanted])
  for (name, row), logp in zip(wanted, found):
    entries[name][row] = logp


def _asks(entry: Any) -> bool:
  return isinstance(entry, Rescore)


def _entered(tools: Tools | None):
  judge = getattr(tools, "judge", None)
  return contextlib.nullcontext() if judge is None else judge
