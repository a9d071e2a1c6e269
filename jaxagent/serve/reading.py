"""From token ids to what a client reads: text in whole characters, cut before a stop string, tool calls apart."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxagent.envs.base import Malformed, ToolCall
from jaxagent.models.chat import Chat, parse, write_calls
from jaxagent.types import Completion

TAIL = 8  # tokens that are decoded again with those that follow; a character has at most 4
UNKNOWN = "\ufffd"  # what an incomplete character decodes to


@dataclasses.dataclass(frozen=True)
class Rules:
  """How ids are read. `tools`: names of the tools that may be called; none: nothing is taken for a call."""

  chat: Chat
  stop_ids: tuple[int, ...]
  stop: tuple[str, ...]
  tools: tuple[str, ...] = ()

  @property
  def marks(self) -> tuple[str, ...]:
    """What a tool call begins with."""
    if self.tools and self.chat.tool_format == "plain":
      return tuple(f"<{name}>" for name in self.tools)
    return ("<tool_call>",) if self.tools else ()


@dataclasses.dataclass(frozen=True)
class Answer:
  """A choice, read. `finish` is OpenAI's finish_reason."""

  content: str | None
  calls: tuple[ToolCall, ...]
  finish: str
  completion: Completion


def read_completion(rules: Rules, completion: Completion) -> Answer:
  """The text without its end: the stop id, or the stop string and what its last token holds beyond it."""
  ids, stopped = completion.ids, completion.finish == "stop"
  ended = stopped and int(ids[-1]) in rules.stop_ids
  text = rules.chat.tokenizer.decode(ids[:-1] if ended else ids)
  if stopped:
    text = text[: min((at for stop in rules.stop if (at := text.find(stop)) >= 0), default=len(text))]
  content, calls = separate(rules, text)
  finish = "length" if not stopped else "tool_calls" if calls else "stop"
  return Answer(content, calls, finish, completion)


def separate(rules: Rules, text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
  """(content, calls). Where one call is malformed, all of the text is content: the client judges the model's words.

  In the plain format, where every tag could be a call, only those that name a tool are.
  """
  found = parse(text, rules.chat.tool_format) if rules.tools else []
  if any(isinstance(call, Malformed) for call in found):
    return text, ()
  plain = rules.chat.tool_format == "plain"
  calls = tuple(call for call in found if not plain or call.name in rules.tools)
  if not calls:
    return text, ()
  if plain:
    for call in calls:
      text = text.replace(write_calls([call], "plain"), "", 1)
  else:
    text = re.sub("<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
  return text.rstrip() or None, calls


class Reader:
  """One choice as it grows: `read` returns the text that is certain, and `rest` what of an answer was held back.

  Held back are characters whose bytes are not all there, what may begin a stop string, and, where tools may be called,
  everything from what may begin a call. The parts together are the `content` of `read_completion`.
  """

  def __init__(self, rules: Rules):
    self._rules = rules
    self._decode: Callable[[Sequence[int]], str] = rules.chat.tokenizer.decode
    self._ids: list[int] = []  # the last ones
    self._known = 0  # characters that they decode to for certain
    self._held = ""
    self._shown = 0

  def read(self, ids: Sequence[int]) -> str:
    self._held += self._decoded([int(i) for i in ids if i not in self._rules.stop_ids])
    text = self._held[: certain(self._held, self._rules.stop, self._rules.marks)]
    if self._rules.marks:
      text = text.rstrip()  # white space before a call is not content
    self._held = self._held[len(text) :]
    self._shown += len(text)
    return text

  def rest(self, answer: Answer) -> str:
    return (answer.content or "")[self._shown :]

  def _decoded(self, ids: list[int]) -> str:
    text, known = self._whole(self._ids + ids)
    new = text[self._known : known]
    self._ids = (self._ids + ids)[-TAIL:]
    _, self._known = self._whole(self._ids)
    return new

  def _whole(self, ids: list[int]) -> tuple[str, int]:
    text = self._decode(ids)
    return text, len(text) - text.endswith(UNKNOWN)


def certain(text: str, stop: Sequence[str], marks: Sequence[str]) -> int:
  """Characters of `text` before anything that is, or may become, a stop string or a mark."""
  end = len(text)
  for word in (*stop, *marks):
    at = text.find(word)
    if at < 0:
      at = next((i for i in range(max(len(text) - len(word) + 1, 0), len(text)) if word.startswith(text[i:])), end)
    end = min(end, at)
  return end
