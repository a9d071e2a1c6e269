"""calculator: the problem "12*34", one tool call, its result, and the answer.

    user       12*34
    assistant  <calc>12*34</calc>              in the tool format of the run
    tool       408
    assistant  408

Texts are as short as they can be, so that a byte-level decoder of 1 M parameters learns the task in minutes on a CPU.
What it has to learn is to copy: the problem into the call, the result into the answer.
"""

import ast
import dataclasses
import operator
import random
import re
from typing import Any, ClassVar

from jaxagent.checks import check_options
from jaxagent.envs import calculator_judge as rules
from jaxagent.envs.base import Action, Malformed, Message, Observation, Step, ToolCall, fault, with_system
from jaxagent.envs.splits import digest, require_split, split_of, task_seed

HELD_OUT = 0.1  # share of all problems that only the "eval" split draws
ATTEMPTS = 1000  # draws before a split is called empty
MAX_EXPRESSION = 64  # characters
MAX_MAGNITUDE = 10**15

TOOL = {
  "type": "function",
  "function": {
    "name": "calc",
    "description": "Evaluates integer arithmetic.",
    "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
  },
}

_OPERATIONS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}
OPERATORS = ("+", "-", "*")


def evaluate(expression: str) -> int:
  """The value of integer arithmetic with + - * // % and brackets.

  ValueError, in words for the model: anything else, more than 64 characters, a value beyond 10^15, division by zero.
  """
  if len(expression) > MAX_EXPRESSION:
    raise ValueError(f"expression longer than {MAX_EXPRESSION}")
  if not re.fullmatch(r"[0-9+\-*/%() ]+", expression):
    raise ValueError("bad expression")
  try:
    tree = ast.parse(expression.strip(), mode="eval")
  except SyntaxError as error:
    raise ValueError("bad expression") from error
  return _value(tree.body)


def _value(node: ast.AST) -> int:
  match node:
    case ast.Constant(value=int(value)):
      return _bounded(value)
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      return -_value(operand)
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
      try:
        return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
      except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
  raise ValueError("bad expression")


def _bounded(value: int) -> int:
  if abs(value) > MAX_MAGNITUDE:
    raise ValueError("number too large")
  return value


@dataclasses.dataclass(frozen=True)
class Calculator:
  """Tasks: arithmetic on `operations + 1` operands of one to `digits` digits. Endless; no problem is in both splits.

  `max_turns` bounds the turns of an episode; a later call ends it as truncated. `system` is a system prompt for
  pretrained models. `in_head` is the share of the demonstrated sums and differences that are answered at once, without
  a call: a model warm-started on them guesses until it learns that calling pays.
  """

  digits: int = 2
  operations: int = 1
  operators: str = "+-*"
  max_turns: int = 4
  in_head: float = 0.0
  system: str | None = None

  skills: ClassVar[tuple[str, ...]] = ("Call calc with the whole problem.", "Answer with the result alone.")

  def __post_init__(self):
    check_options(
      "calculator: ",
      (1 <= self.digits <= 4, "digits", self.digits, "in 1..4"),
      (1 <= self.operations <= 4, "operations", self.operations, "in 1..4"),
      (self.operators and set(self.operators) <= set(OPERATORS), "operators", self.operators, "some of '+-*'"),
      (0 <= self.in_head <= 1, "in_head", self.in_head, "in [0, 1]"),
      (self.max_turns >= 2, "max_turns", self.max_turns, "at least 2: a call and an answer"),
    )

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["CalculatorEpisode", int]:
    return CalculatorEpisode(self, require_split(split)), task_seed(split, index)

  def problem(self, split: str, seed: int) -> str:
    rng = random.Random(seed)
    for _ in range(ATTEMPTS):
      text = self._draw(rng)
      if split_of(text, held_out=HELD_OUT) == split:
        return text
    raise ValueError(
      f"calculator: no problem of the {split} split among {ATTEMPTS} draws; there are too few problems with digits="
      f"{self.digits}, operations={self.operations}, operators={self.operators!r}"
    )

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict, ...]]:
    problem = self.problem("train", task_seed("train", index))
    answer = str(evaluate(problem))
    if "*" not in problem and digest(f"in head {index}") < self.in_head:
      return (*self.opening(problem), {"role": "assistant", "content": answer}), (TOOL,)
    call = {"type": "function", "function": {"name": "calc", "arguments": {"input": problem}}}
    solved = (
      {"role": "assistant", "content": "", "tool_calls": [call]},
      {"role": "tool", "name": "calc", "content": answer},
      {"role": "assistant", "content": answer},
    )
    return (*self.opening(problem), *solved), (TOOL,)

  def judge(self, question: Any) -> str:
    """What the rules of arithmetic say of an attempt: see `jaxagent.judges`."""
    problem = self.problem("train", task_seed("train", question.facts["task"]))
    return rules.judge(problem, evaluate, question.kind, dict(question.facts))

  def opening(self, problem: str) -> tuple[Message, ...]:
    return with_system(self.system, {"role": "user", "content": problem})

  def _draw(self, rng: random.Random) -> str:
    operands = [self._operand(rng) for _ in range(self.operations + 1)]
    return operands[0] + "".join(rng.choice(self.operators) + operand for operand in operands[1:])

  def _operand(self, rng: random.Random) -> str:
    digits = rng.randint(1, self.digits)
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


class CalculatorEpisode:
  """One problem. Outcome 1 iff the first turn without a call is exactly the value of the problem."""

  tool_format = "chat"

  def __init__(self, tasks: Calculator, split: str):
    self._tasks, self._split = tasks, split
    self._answer, self._turns = "", 0

  async def reset(self, seed: int) -> dict[int, Observation]:
    problem = self._tasks.problem(self._split, seed)
    self._answer, self._turns = str(evaluate(problem)), 0
    return {0: Observation(self._tasks.opening(problem), (TOOL,))}

  async def step(self, actions: dict[int, Action]) -> Step:
    action = actions[0]
    self._turns += 1
    if not action.calls:
      right = action.text.strip() == self._answer and not action.truncated
      return Step(outcome=float(right), status="truncated" if action.truncated else "done")
    if self._turns >= self._tasks.max_turns:
      return Step(status="truncated", cause=f"a call in turn {self._turns} of at most {self._tasks.max_turns}")
    replies = tuple({"role": "tool", "name": "calc", "content": reply(call)} for call in action.calls)
    return Step(observations={0: Observation(replies)})

  async def close(self) -> None:
    pass


def reply(call: ToolCall | Malformed) -> str:
  """The tool's answer; what is wrong with a call goes back to the model, it does not end the episode."""
  if error := fault(call, "calc"):
    return f"error: {error}"
  try:
    return str(evaluate(call.arguments["input"]))
  except ValueError as error:
    return f"error: {error}"
