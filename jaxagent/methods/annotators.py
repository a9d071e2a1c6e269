"""Columns that the caller provides: what a judge, an encoder, a teacher or a table of reference runs said.

A preset that needs such facts declares them with a `Given`; hand it one with a source, or any other `Annotator` of the
same columns. An entry of a column `[N]` is a number, of `[N, C]` an array, of `[N, T]` a value per token of the
trajectory, of `[N, S]` or `[N, S+1]` a `types.PerTurn`; a `Rescore` stands for one that the trainer computes. None is
an entry that could not be had: its rollout is not valid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxagent.types import Trajectory


@dataclass(frozen=True)
class Rescore:
  """An entry of a column `[N, T]`: the log-probs (nats) of the row's sampled tokens under another first prompt.

  The ids of `prefix` take the place of those of the first prompt; the weights are those before the update.
  """

  prefix: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Table:
  """Entries by (task, rollout), in the order of `columns`: `Table(("first_error",), {(3, 0): (17,)})`."""

  columns: tuple[str, ...]
  values: Mapping[tuple[int, int], Sequence[Any]]

  def __call__(self, trajectory: Trajectory) -> dict[str, Any]:
    key = trajectory.task, trajectory.rollout
    if key not in self.values:
      raise ValueError(f"the table of {', '.join(self.columns)} has no entry for task {key[0]}, rollout {key[1]}")
    if len(self.values[key]) != len(self.columns):
      raise ValueError(f"entry {key} must hold {', '.join(self.columns)}, got {len(self.values[key])} values")
    return dict(zip(self.columns, self.values[key]))


@dataclass(frozen=True)
class Given:
  """An annotator of `columns` from `source`: a `Table`, or a function of one trajectory that returns them by name.

  Without a source it declares columns that the batch holds already, from the environment.
  Errors: ValueError where there is no source to ask, or where it leaves out a column.
  """

  columns: tuple[str, ...]
  source: Callable[[Trajectory], Mapping[str, Any]] | None = None

  async def __call__(self, trajectories: list[Trajectory], tools: Any) -> dict[str, list[Any]]:
    if self.source is None:
      raise ValueError(
        f"nothing provides {', '.join(self.columns)}: the environment's last steps have no such column, and the method"
        f" no source; set the section judge, where it provides them, or in Python give it Given({self.columns},"
        " source=...), in a config name a function that does"
      )
    rows = [self.source(trajectory) for trajectory in trajectories]
    if absent := {name for name in self.columns for row in rows if name not in row}:
      raise ValueError(f"the source of {', '.join(self.columns)} returned no {', '.join(sorted(absent))}")
    return {name: [row[name] for row in rows] for name in self.columns}
