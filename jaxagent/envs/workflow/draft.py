"""A workspace as the reference solvers edit it: every change is a tool call that an agent could make.

It shares no code with the progress scorer or the strict verifier.
"""

import json
from collections.abc import Callable
from typing import Any

from jaxagent.envs.base import ToolCall


class Draft:
  """`calls` are the changes made so far, in order."""

  def __init__(self, files: dict[str, str]):
    self.files, self.calls = dict(files), []

  def cells(self, path: str) -> list[list[str]]:
    """A cell list for each line that is left, the line of column names included."""
    return [line.split(self._sep(path)) for line in self._lines(path)]

  def records(self, path: str) -> list[list[str]]:
    return self.cells(path)[path.endswith(".csv") :]

  def record(self, path: str) -> dict[str, Any]:
    return json.loads(self.files[path])

  def edit(self, path: str, line: int, text: str) -> None:
    """Line numbers begin at 1; one past the end appends, an empty text deletes."""
    lines = self._lines(path)
    lines[line - 1 : line] = [text] if text else []
    self.files[path] = "".join(f"{line}\n" for line in lines)
    self.calls.append(ToolCall("edit", {"path": path, "line": line, "text": text}))

  def write(self, path: str, value: dict[str, Any]) -> None:
    self.files[path] = json.dumps(value)
    self.calls.append(ToolCall("write", {"path": path, "text": self.files[path]}))

  def map_cells(self, path: str, change: Callable[[list[str]], list[str]]) -> None:
    """Edits every record that `change` changes."""
    for number, cells in enumerate(self.cells(path), 1):
      if not (number == 1 and path.endswith(".csv")):
        self._put(path, number, cells, change(list(cells)))

  def drop_repeats(self, path: str) -> None:
    seen, number = set(), 1
    while number <= len(self._lines(path)):
      line = self._lines(path)[number - 1]
      if line in seen:
        self.edit(path, number, "")
      else:
        seen.add(line)
        number += 1

  def restore(self, path: str, source: str) -> None:
    """Appends the records of `source` whose key `path` lacks."""
    have = {cells[0] for cells in self.records(path)}
    for cells in self.records(source):
      if cells[0] not in have:
        self.edit(path, len(self._lines(path)) + 1, self._sep(path).join(cells))

  def name_columns(self, path: str, columns: str) -> None:
    self._put(path, 1, self.cells(path)[0], columns.split(","))

  def _put(self, path: str, number: int, old: list[str], new: list[str]) -> None:
    if new != old:
      self.edit(path, number, self._sep(path).join(new))

  def _lines(self, path: str) -> list[str]:
    return [line for line in self.files[path].split("\n") if line]

  def _sep(self, path: str) -> str:
    return "," if path.endswith(".csv") else " "


def pieces(number: str) -> str:
  """A number that may count dozens: "3dz" is 36."""
  return str(12 * int(number.removesuffix("dz"))) if number.endswith("dz") else number
