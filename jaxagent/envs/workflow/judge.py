"""What a workflow's own contract says of an attempt, as a judge would: see `jaxagent.judges`.

The attempt is played again on a fresh workspace, so every answer is exact. `question.kind` names what is asked,
`question.facts` has the number of the task, the steps' actions, and what else the kind needs.
"""

import json
from typing import Any

from jaxagent.envs.base import Action
from jaxagent.envs.workflow.task import Task
from jaxagent.envs.workflow.workspace import Workspace

CALLS = "every tool call is understood"


class Attempt:
  """A replay: after each step the scores of the stages, the potential, and what was replied."""

  def __init__(self, task: Task, actions: list[Action], max_calls: int):
    workspace, left = Workspace(dict(task.files)), max_calls
    self.scores, self.potential = [task.contract.scores(workspace.files)], [task.contract.potential(workspace.files)]
    self.replies: list[list[str]] = []
    for action in actions:
      self.replies.append([workspace.reply(call) for call in action.calls[:left]])
      left -= len(self.replies[-1])
      self.scores.append(task.contract.scores(workspace.files))
      self.potential.append(task.contract.potential(workspace.files))

  def refused(self, step: int) -> bool:
    return any(reply.startswith("error:") for reply in self.replies[step])

  def first_wrong(self) -> int | None:
    """The first step with a refused call, that loses progress or harms what was right, or that ends too early."""
    for step, replies in enumerate(self.replies):
      before, after = self.potential[step : step + 2]
      harmed = self.scores[step + 1]["intact"] < self.scores[step]["intact"]
      if self.refused(step) or after < before or harmed or (not replies and after < 1):
        return step
    return None


def judge(task: Task, kind: str, facts: dict[str, Any], *, max_calls: int) -> str:
  """The reply in the form that the prompt of this kind asks for. ValueError: a kind that these rules do not know."""
  if kind in ("draco/task", "draco/rollout", "draco/merge"):
    return json.dumps({"criteria": _criteria(task) if kind == "draco/task" else _known(kind, facts)})
  if kind == "taspo/match":
    known = [when for when, _ in _guidance(task).values()]
    return json.dumps({"applies": [i for i, (_, when) in enumerate(facts["items"], 1) if when in known]})
  answers = {
    "shaping/progress": _progress, "cliff/first_error": _first_error, "draco/verdicts": _verdicts,
    "draco/credit": _credits, "taspo/evidence": _evidence,
  }  # fmt: skip
  if kind not in answers:
    raise ValueError(f"the rules of workflow do not answer {kind!r}")
  return json.dumps(answers[kind](task, Attempt(task, facts["actions"], max_calls), facts))


def _progress(task: Task, attempt: Attempt, facts: dict[str, Any]) -> dict[str, float]:
  return {"progress": attempt.potential[-1]}


def _first_error(task: Task, attempt: Attempt, facts: dict[str, Any]) -> dict[str, int]:
  wrong = attempt.first_wrong()
  return {"first_error": 0 if wrong is None else 1 + facts["parts"].index(wrong)}


def _stage(name: str) -> str:
  return {"intact": "what was right is left as it was", "report": "the report is right"}.get(
    name, f"the defects of class {name} are repaired"
  )


def _criteria(task: Task) -> list[str]:
  names = ["intact", *(name for name, _ in task.contract.stages), "report"]
  return [*(_stage(name) for name in names), CALLS]


def _known(kind: str, facts: dict[str, Any]) -> list[str]:
  """The task's own criteria are complete, and no two are the same."""
  return facts["criteria"] if kind == "draco/merge" else []


def _judged(attempt: Attempt, criterion: str) -> tuple[str, list[int]]:
  """The verdict, and the steps from 1 that are responsible: those that changed it last, else the last one."""
  last = len(attempt.replies)
  if criterion == CALLS:
    refused = [step + 1 for step in range(last) if attempt.refused(step)]
    called = [step + 1 for step in range(last) if attempt.replies[step]]
    return ("fail", refused) if refused else ("pass", called) if called else ("n/a", [])
  name = next(name for name in attempt.scores[0] if _stage(name) == criterion)
  scores = [scores[name] for scores in attempt.scores]
  moved = [step + 1 for step in range(last) if scores[step + 1] != scores[step]]
  if scores[-1] == 1:
    return "pass", moved or [last]
  return "fail", [step for step in moved if scores[step] < scores[step - 1]] or [last]


def _verdicts(task: Task, attempt: Attempt, facts: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  found = [(i, *_judged(attempt, criterion)) for i, criterion in enumerate(facts["criteria"], 1)]
  return {"verdicts": [{"criterion": i, "verdict": verdict, "why": "the contract"} for i, verdict, _ in found]}


def _credits(task: Task, attempt: Attempt, facts: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  found = [(i, *_judged(attempt, criterion)) for i, criterion in enumerate(facts["criteria"], 1)]
  return {"credits": [{"criterion": i, "verdict": verdict, "steps": steps} for i, verdict, steps in found]}


def _guidance(task: Task) -> dict[str, tuple[str, str]]:
  """Of each stage with defects: when its rule applies, and the rule."""
  rules = {corruption.name: corruption.rule for corruption in task.domain.corruptions}
  domain = task.domain.name
  return {name: (f"{domain} with defects of class {name}", rules[name]) for name, _ in task.contract.stages}


def _evidence(task: Task, attempt: Attempt, facts: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  found = []
  for name, (when, rule) in _guidance(task).items():
    scores = [scores[name] for scores in attempt.scores]
    steps = [step + 1 for step in range(len(attempt.replies)) if scores[step + 1] > scores[step]]
    if steps:
      found.append({"guidance": rule, "when": when, "steps": steps})
  return {"items": found}
