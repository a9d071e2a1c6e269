"""What is right and wrong in an attempt at a calculator problem, as a judge would say it: see `jaxagent.judges`.

`question.kind` names what is asked; `question.facts` has the number of the task, the steps' actions, and what else the
kind needs.
"""

import json
from typing import Any

from jaxagent.envs.base import Action, ToolCall

CALLED, ANSWERED, FORMED = "calc is asked for the problem's value", "the answer is right", "every call is understood"
WHEN, GUIDANCE = "a problem of arithmetic", "Call calc with the whole problem, then answer with its result alone."


def judge(problem: str, value, kind: str, facts: dict[str, Any]) -> str:
  """The reply in the form that the prompt of this kind asks for; `value(expression)` is the tool's answer, or raises
  ValueError. ValueError: a kind that these rules do not know."""
  actions = facts.get("actions", [])
  marks = [_marks(problem, value, action) for action in actions]
  if kind in ("draco/task", "draco/rollout", "draco/merge"):
    own = {"draco/task": [CALLED, ANSWERED, FORMED], "draco/rollout": []}
    return json.dumps({"criteria": own.get(kind, facts["criteria"])})
  if kind == "draco/verdicts":
    found = [{"criterion": i, "verdict": _judged(marks, c)[0], "why": "rule"} for i, c in _numbered(facts)]
    return json.dumps({"verdicts": found})
  if kind == "draco/credit":
    judged = [(i, *_judged(marks, c)) for i, c in _numbered(facts)]
    return json.dumps({"credits": [{"criterion": i, "verdict": v, "steps": s} for i, v, s in judged]})
  if kind == "cliff/first_error":
    wrong = next((step for step, mark in enumerate(marks) if mark["wrong"]), None)
    return json.dumps({"first_error": 0 if wrong is None else 1 + facts["parts"].index(wrong)})
  if kind == "shaping/progress":
    done = max((1.0 if m["answer"] else 0.5 if m["called"] else 0.0 for m in marks), default=0.0)
    return json.dumps({"progress": done})
  if kind == "taspo/evidence":
    steps = [step for step, mark in enumerate(marks, 1) if mark["called"]]
    return json.dumps({"items": [{"guidance": GUIDANCE, "when": WHEN, "steps": steps}] if steps else []})
  if kind == "taspo/match":
    return json.dumps({"applies": [i for i, (_, when) in enumerate(facts["items"], 1) if when == WHEN]})
  raise ValueError(f"the rules of calculator do not answer {kind!r}")


def _marks(problem: str, value, action: Action) -> dict[str, bool]:
  """Of one step: whether it calls for the right value, answers rightly, is malformed, or is wrong in any way."""
  right = str(value(problem))
  calls = [_called(value, call) for call in action.calls]
  called = bool(calls) and all(got == right for got in calls)
  answer = not action.calls and not action.truncated and action.text.strip() == right
  return {"called": called, "answer": answer, "malformed": None in calls, "wrong": not called and not answer}


def _called(value, call: Any) -> str | None:
  if not isinstance(call, ToolCall) or call.name != "calc" or not isinstance(call.arguments.get("input"), str):
    return None
  try:
    return str(value(call.arguments["input"]))
  except ValueError:
    return None


def _numbered(facts: dict[str, Any]) -> list[tuple[int, str]]:
  return list(enumerate(facts["criteria"], 1))


def _judged(marks: list[dict[str, bool]], criterion: str) -> tuple[str, list[int]]:
  """The verdict and the steps from 1 that are responsible."""
  last = len(marks)
  name = {CALLED: "called", ANSWERED: "answer"}.get(criterion)
  if name is None:
    malformed = [step for step, mark in enumerate(marks, 1) if mark["malformed"]]
    return ("fail", malformed) if malformed else ("n/a", [])
  found = [step for step, mark in enumerate(marks, 1) if mark[name]]
  return ("pass", found) if found else ("fail", [last])
