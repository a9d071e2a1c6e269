"""Files in memory, and the tools that an agent has on them. What is wrong with a call is told to the model."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxagent.envs.base import Malformed, ToolCall

MAX_FILES = 64
MAX_FILE = 200_000  # characters

# how each tool's arguments are written in the one argument `input`: path first, the last one takes the rest
PARAMETERS = {"list": (), "read": ("path", "line"), "write": ("path", "text"), "edit": ("path", "line", "text")}
REQUIRED = {**PARAMETERS, "read": ("path",)}
_DESCRIPTIONS = {
  "list": "Names the files.",
  "read": "Shows a file with line numbers, from `line` on (default 1).",
  "write": "Makes or replaces a file.",
  "edit": "Replaces one line. One past the last line appends; an empty text deletes.",
}
_INPUTS = {"list": "nothing", "read": "path", "write": "path, line break, text", "edit": "path line text"}
NAMED, SINGLE = "named", "input"


def schemas(arguments: str) -> tuple[dict[str, Any], ...]:
  """JSON schemas of the tools, with an argument per parameter ("named"), or one argument `input`."""
  return tuple(_schema(name, arguments) for name in PARAMETERS)


def _schema(name: str, arguments: str) -> dict[str, Any]:
  if arguments == SINGLE:
    properties, required = {"input": {"type": "string", "description": _INPUTS[name]}}, ["input"]
  else:
    properties = {p: {"type": "integer" if p == "line" else "string"} for p in PARAMETERS[name]}
    required = list(REQUIRED[name])
  parameters = {"type": "object", "properties": properties, "required": required}
  function = {"name": name, "description": _DESCRIPTIONS[name], "parameters": parameters}
  return {"type": "function", "function": function}


def as_input(call: ToolCall) -> ToolCall:
  """The call with its arguments in the one argument `input`."""
  values = [str(call.arguments[p]) for p in PARAMETERS[call.name] if p in call.arguments]
  return ToolCall(call.name, {"input": ("\n" if call.name == "write" else " ").join(values)})


@dataclasses.dataclass
class Workspace:
  """`max_output` bounds the characters of a reply; a longer one is cut, and says so."""

  files: dict[str, str]
  max_output: int = 10_000

  def reply(self, call: ToolCall | Malformed) -> str:
    """Does the call. Nothing that a model can write raises."""
    if isinstance(call, Malformed):
      return f"error: {call.error}"
    try:
      tool, arguments = self._parsed(call)
      return self._cut(tool(**arguments))
    except _Refused as refusal:
      return f"error: {refusal}"

  def _parsed(self, call: ToolCall) -> tuple[Callable[..., str], dict[str, Any]]:
    if call.name not in PARAMETERS:
      raise _Refused(f"no tool {call.name[:16]!r}, only {', '.join(PARAMETERS)}")
    arguments = dict(call.arguments)
    if set(arguments) == {SINGLE} and isinstance(arguments[SINGLE], str):
      arguments = _split(call.name, arguments[SINGLE])
    if not set(REQUIRED[call.name]) <= set(arguments) <= set(PARAMETERS[call.name]):
      raise _Refused(f"{call.name} takes {', '.join(PARAMETERS[call.name]) or 'nothing'}")
    if "line" in arguments:
      arguments["line"] = _number(arguments["line"])
    if not all(isinstance(value, str) for name, value in arguments.items() if name != "line"):
      raise _Refused(f"{call.name} takes texts, and a number as line")
    return getattr(self, f"_{call.name}"), arguments

  def _list(self) -> str:
    return "\n".join(sorted(self.files)) or "no files"

  def _read(self, path: str, line: int = 1) -> str:
    numbered = [f"{number}: {words}" for number, words in enumerate(self._file(path), 1)]
    return "\n".join(numbered[max(line, 1) - 1 :]) or "nothing"

  def _file(self, path: str) -> list[str]:
    if path not in self.files:
      raise _Refused(f"no file {path[:32]!r}")
    return self.files[path].removesuffix("\n").split("\n") if self.files[path] else []

  def _write(self, path: str, text: str) -> str:
    if not path or len(path) > 64 or any(c.isspace() for c in path):
      raise _Refused("a path has 1 to 64 characters and no spaces")
    if len(self.files) >= MAX_FILES and path not in self.files:
      raise _Refused(f"there are {MAX_FILES} files already")
    if len(text) > MAX_FILE:
      raise _Refused(f"a file has at most {MAX_FILE} characters")
    self.files[path] = text
    return "ok"

  def _edit(self, path: str, line: int, text: str) -> str:
    lines = self._file(path)
    if not 1 <= line <= len(lines) + bool(text):
      raise _Refused(f"{path} has {len(lines)} lines, got line {line}")
    lines[line - 1 : line] = [text] if text else []
    return self._write(path, "".join(f"{line}\n" for line in lines))

  def _cut(self, text: str) -> str:
    if len(text) <= self.max_output:
      return text
    return f"{text[: self.max_output]}\n({len(text) - self.max_output} characters more)"


class _Refused(Exception):
  """A call that is answered with what was wrong."""


def _split(tool: str, text: str) -> dict[str, str]:
  if tool == "write":
    path, found, rest = text.partition("\n")
    return {"path": path, "text": rest} if found else {"path": path}
  names = PARAMETERS[tool]
  values = text.split(" ", len(names) - 1) if names and text else []
  if tool == "edit" and len(values) == 2:
    values.append("")
  return dict(zip(names, values))


def _number(value: Any) -> int:
  if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
    return int(value)
  if isinstance(value, int) and not isinstance(value, bool):
    return value
  raise _Refused("line is a whole number")
