"""A judge answers questions in words; what a use makes of the words is the use's own affair.

A judge that cannot answer raises `JudgeError`. Who asks gets no verdict then, and the rollouts that needed it are not
valid: a failure is never a reward of 0.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxagent.envs.base import Message


@dataclasses.dataclass(frozen=True)
class Question:
  """`kind` names the use ("draco/verdicts"), `messages` is all that a model is shown, `facts` what rules are.

  Facts are the structured form of the messages and the number of the task: never more than the words say, but for what
  only rules may know of a generated task.
  """

  kind: str
  messages: tuple[Message, ...]
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reply:
  """`tokens` of question and answer together, where the backend counts them."""

  text: str
  tokens: int = 0


class JudgeError(Exception):
  """No answer: what happened, in one line."""


class Judge(Protocol):
  """`reply` answers one question; `vote` tells apart repetitions of it. Many may be asked at once.

  `request` is all that the answer depends on, as JSON, where answers may be kept and given again; None where not.
  A judge with `__aenter__` and `__aexit__` is entered once for each batch of questions.
  """

  def request(self, question: Question, vote: int) -> Mapping[str, Any] | None: ...

  async def reply(self, question: Question, vote: int) -> Reply: ...


@dataclasses.dataclass(frozen=True)
class Rules:
  """Answers from what generated tasks know of themselves: `answer(question)` is a text in the form that was asked for.

  An environment's tasks may have it as a method, `judge(question)`.
  """

  answer: Callable[[Question], str]

  def request(self, question: Question, vote: int) -> None:
    return None

  async def reply(self, question: Question, vote: int) -> Reply:
    return Reply(self.answer(question))


def digest(request: Mapping[str, Any]) -> str:
  """A name for a request: equal for equal JSON, whatever the order of its keys."""
  text = json.dumps(request, sort_keys=True, ensure_ascii=False, allow_nan=False)
  return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
