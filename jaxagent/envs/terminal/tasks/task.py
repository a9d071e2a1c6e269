"""What a task is, and the facts that its verifier looks for.

Every task has `ASSERTIONS` assertions. A task with fewer facts counts each of them several times, so that all tasks
weigh the same under the one global scale. No fact holds in the folder as it is given; all hold after the solution.
"""

import configparser
import dataclasses
import json
import random
from typing import Any, Protocol

from jaxagent.envs.terminal.folder import Folder

ASSERTIONS = 20
MAX_FILE = 65536  # bytes of a file that a fact may look into


class Fact(Protocol):
  def __str__(self) -> str: ...

  def holds(self, folder: Folder) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Case:
  """Runs `script` on its own, in another sandbox: with these arguments and this input it prints `output`."""

  script: str
  arguments: tuple[str, ...]
  stdin: str
  output: str

  def __str__(self) -> str:
    return f"{self.script} {' '.join(self.arguments)} < {self.stdin!r} prints {self.output!r}"


@dataclasses.dataclass(frozen=True)
class Task:
  """`guards` are facts that hold from the start; while one is broken, no assertion passes.

  `setup` is a command that runs after `files` were written, before the agent's first turn. `solution` is commands that
  print nothing.
  """

  name: str
  prompt: str
  solution: tuple[str, ...]
  facts: tuple[Fact, ...] = ()
  cases: tuple[Case, ...] = ()
  files: tuple[tuple[str, str], ...] = ()
  setup: str = ""
  guards: tuple[Fact, ...] = ()

  def __post_init__(self):
    n = len(self.facts) + len(self.cases)
    if not n or ASSERTIONS % n:
      raise ValueError(f"the facts of a task must divide {ASSERTIONS} assertions, got {n} in {self.name}")

  @property
  def identity(self) -> str:
    """What makes it this task: two tasks with the same one are the same problem."""
    return json.dumps([self.name, self.prompt, self.files])


@dataclasses.dataclass(frozen=True)
class Exists:
  path: str

  def __str__(self) -> str:
    return f"{self.path} is a file"

  def holds(self, folder: Folder) -> bool:
    return folder.mode(self.path) is not None


@dataclasses.dataclass(frozen=True)
class Content:
  """The whole text, a line break at its end aside."""

  path: str
  content: str

  def __str__(self) -> str:
    return f"{self.path} holds {self.content[:60]!r}"

  def holds(self, folder: Folder) -> bool:
    found = text(folder, self.path)
    return found is not None and found.removesuffix("\n") == self.content.removesuffix("\n")


@dataclasses.dataclass(frozen=True)
class Prefix:
  path: str
  prefix: str

  def __str__(self) -> str:
    return f"{self.path} begins with {self.prefix!r}"

  def holds(self, folder: Folder) -> bool:
    return (text(folder, self.path) or "").startswith(self.prefix)


@dataclasses.dataclass(frozen=True)
class Line:
  """Line `index` (from 0) of a file of `total` lines."""

  path: str
  index: int
  total: int
  line: str

  def __str__(self) -> str:
    return f"line {self.index + 1} of {self.path} is {self.line!r}"

  def holds(self, folder: Folder) -> bool:
    lines = (text(folder, self.path) or "").removesuffix("\n").split("\n")
    return len(lines) <= self.total and self.index < len(lines) and lines[self.index].rstrip("\r") == self.line


@dataclasses.dataclass(frozen=True)
class Moved:
  old: str
  new: str
  content: str

  def __str__(self) -> str:
    return f"{self.old} was moved to {self.new}"

  def holds(self, folder: Folder) -> bool:
    return folder.stat(self.old) is None and Content(self.new, self.content).holds(folder)


@dataclasses.dataclass(frozen=True)
class Mode:
  """The permission bits under `mask`, of a file as large as `content`, which the bits may forbid us to read."""

  path: str
  mode: int
  content: str
  mask: int = 0o777

  def __str__(self) -> str:
    return f"{self.path} has mode {self.mode:o} under {self.mask:o}"

  def holds(self, folder: Folder) -> bool:
    found = folder.mode(self.path)
    size = folder.stat(self.path)
    same = size is not None and size.st_size == len(self.content.encode())
    return found is not None and same and (found & self.mask) == self.mode


@dataclasses.dataclass(frozen=True)
class Setting:
  """`key` (a path of names) has `value`; with value None the file can be parsed and has no such key."""

  path: str
  format: str
  key: tuple[str, ...]
  value: Any

  def __str__(self) -> str:
    return f"{'.'.join(self.key)} in {self.path} is {self.value!r}"

  def holds(self, folder: Folder) -> bool:
    settings = parsed(text(folder, self.path), self.format)
    found = None if settings is None else settings.get(self.key)
    return settings is not None and type(found) is type(self.value) and found == self.value


@dataclasses.dataclass(frozen=True)
class Others:
  """The settings besides `changed` are these and no more."""

  path: str
  format: str
  changed: frozenset[tuple[str, ...]]
  settings: tuple[tuple[tuple[str, ...], Any], ...]

  def __str__(self) -> str:
    return f"the other settings of {self.path} are as they were"

  def holds(self, folder: Folder) -> bool:
    found = parsed(text(folder, self.path), self.format) or {}
    return {k: v for k, v in found.items() if k not in self.changed} == dict(self.settings)


def text(folder: Folder, path: str, most: int = MAX_FILE) -> str | None:
  content = folder.read(path, most)
  try:
    return None if content is None else content.decode()
  except UnicodeDecodeError:
    return None


def parsed(content: str | None, format: str) -> dict[tuple[str, ...], Any] | None:
  """{path of names: value} of an "ini", "env" or "json" text; None where it does not parse."""
  if content is None:
    return None
  try:
    return {"ini": _ini, "env": _env, "json": _json}[format](content)
  except (ValueError, RecursionError, configparser.Error):
    return None


def _ini(content: str) -> dict[tuple[str, ...], Any]:
  parser = configparser.RawConfigParser(strict=True, default_section="\0")
  parser.optionxform = str  # type: ignore[assignment]
  parser.read_string(content)
  return {(section, key): value for section in parser.sections() for key, value in parser[section].items()}


def _env(content: str) -> dict[tuple[str, ...], Any]:
  lines = [line for line in content.split("\n") if line.strip() and not line.startswith("#")]
  pairs = [line.partition("=") for line in lines]
  names = [name for name, _, _ in pairs]
  if len(set(names)) < len(names) or not all(equals for _, equals, _ in pairs):
    raise ValueError("a name twice, or a line without =")
  return {(name,): value for name, _, value in pairs}


def _json(content: str) -> dict[tuple[str, ...], Any]:
  def leaves(value: Any, path: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    if not isinstance(value, dict):
      return {path: value}
    return {k: v for name, below in value.items() for k, v in leaves(below, (*path, name)).items()}

  return leaves(json.loads(content), ())


def word(rng: random.Random, letters: int = 5) -> str:
  return "".join(rng.choice(("bdfgklmnprstvz", "aeiou")[i % 2]) for i in range(letters))


def words(rng: random.Random, n: int, letters: int = 5) -> list[str]:
  """Distinct ones."""
  found: dict[str, None] = {}
  while len(found) < n:
    found[word(rng, letters)] = None
  return list(found)


def lines_of(path: str, lines: list[str], *, skip: int = 0) -> tuple[Line, ...]:
  """A fact for each line from `skip` on."""
  return tuple(Line(path, i, len(lines), line) for i, line in enumerate(lines) if i >= skip)
