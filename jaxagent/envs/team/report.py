"""From rollouts of the same instances under the four information conditions to gaps."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxagent.envs.team.meeting import CONDITIONS
from jaxagent.metrics.team import information_gaps, normalised_communication_gap
from jaxagent.types import Trajectory

COVERAGE = ("piu_recall", "piu_unsurfaced", "piu_undelivered", "message_waste")


@dataclasses.dataclass(frozen=True)
class InformationReport:
  """Accuracies and gaps in [-1, 1]; coverage is the team's mean. `failed` rollouts took no part."""

  accuracy: dict[str, float]  # by condition; solo: of the agent that is right most often
  retrieval: float
  communication: float
  total: float
  normalised_communication: float
  coverage: dict[str, float]
  tasks: int
  failed: int


def information_report(rollouts: Mapping[str, Sequence[Trajectory]]) -> InformationReport:
  """Of trajectories by condition, from `collect` on tasks that differ in `condition` alone.

  A task counts once, however many rollouts it has; agents of a team count once.
  ValueError: a condition that is missing, conditions with different tasks, a task whose rollouts all failed.
  Reconstruction, see `metrics.team`.
  """
  if set(rollouts) != set(CONDITIONS):
    raise ValueError(f"rollouts must be given for {', '.join(CONDITIONS)}, got {', '.join(rollouts) or 'none'}")
  episodes = {condition: _episodes(condition, rows) for condition, rows in rollouts.items()}
  tasks = {condition: sorted(found) for condition, found in episodes.items()}
  if any(found != tasks["team"] for found in tasks.values()):
    raise ValueError(f"all conditions must have the same tasks, got {({c: len(t) for c, t in tasks.items()})} of them")
  outcome = {c: _mean([[row.outcome for row in rows] for rows in found.values()]) for c, found in episodes.items()}
  alone = [np.mean([row.columns["right"] for row in rows], axis=0) for rows in episodes["solo"].values()]
  accuracy = {**outcome, "solo": float(np.max(np.mean(alone, axis=0)))}
  gaps = information_gaps(accuracy["piu"], accuracy["pool"], accuracy["team"])
  normalised = normalised_communication_gap(accuracy["pool"], accuracy["team"], accuracy["solo"])
  team = episodes["team"].values()
  coverage = {name: _mean([[row.columns[name] for row in rows] for rows in team]) for name in COVERAGE}
  failed = sum(row.agent == 0 and row.status == "failed" for rows in rollouts.values() for row in rows)
  return InformationReport(accuracy, *map(float, gaps), float(normalised), coverage, len(tasks["team"]), failed)


def _episodes(condition: str, rows: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
  """The row of agent 0, for its whole team, of every rollout that did not fail, by task."""
  found: dict[int, list[Trajectory]] = defaultdict(list)
  for row in rows:
    if row.agent == 0:
      found[row.task] += [row] if row.status != "failed" else []
  if empty := [task for task, left in found.items() if not left]:
    raise ValueError(f"all rollouts of task {min(empty)} under {condition!r} failed; collect them again")
  if not found:
    raise ValueError(f"no rollouts under {condition!r}")
  return dict(found)


def _mean(values: list[list[float]]) -> float:
  return float(np.mean([np.mean(of_task) for of_task in values]))
