"""What a domain is: a latent world, its rendering to files, the defects that its files may have, and a solver.

Tables are text: a `.csv` has a line of column names and comma-separated cells, a `.log` has no names and cells between
single spaces; the first cell of a line is its key, the order of lines means nothing, and no cell is quoted. A `.json`
file is one object.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

Files = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Scale:
  """Records of a world, defects of each class, and classes of defects."""

  rows: int
  defects: int
  classes: int


# The tiers' names are the paper's (Tev); their sizes are ours.
SCALES = {"unit": Scale(8, 1, 2), "small": Scale(24, 3, 3), "full": Scale(80, 8, 4)}


@dataclasses.dataclass(frozen=True)
class Corruption:
  """A class of defects. `damage(files, key, rng)` puts one at the record `key` of `path`; `rule` tells the agent how it
  is undone. `after` names the classes that must be undone first; they stand before it in the domain."""

  name: str
  path: str
  rule: str
  targets: Callable[[Files], list[str]]
  damage: Callable[[Files, str, random.Random], Files]
  after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Domain:
  """`world(rng, rows)` draws a latent world W, `render(W)` its files, and `parse(render(W)) == W`.

  `report` is the file that the agent has to write: it is in the rendering and not in the agent's inputs, and counts
  only as far as everything else is repaired. `solve(draft)` is a reference solution from the inputs alone.
  """

  name: str
  summary: str
  report_rule: str
  report: str
  corruptions: tuple[Corruption, ...]
  world: Callable[[random.Random, int], Any]
  render: Callable[[Any], Files]
  parse: Callable[[Files], Any]
  solve: Callable[[Any], None]


def separator(path: str) -> str:
  return "," if path.endswith(".csv") else " "


def table(path: str, columns: str, rows: Iterable[Iterable[Any]]) -> str:
  """`columns` is the first line of a .csv, comma-separated; a .log has none."""
  lines = [separator(path).join(str(cell) for cell in row) for row in rows]
  return "".join(f"{line}\n" for line in ([columns] if path.endswith(".csv") else []) + lines)


def rows(path: str, text: str) -> list[list[str]]:
  """The cells of a table's records, without the column names."""
  lines = [line.split(separator(path)) for line in text.split("\n") if line]
  return lines[1:] if path.endswith(".csv") else lines


def record(value: dict[str, Any]) -> str:
  return json.dumps(value, indent=1) + "\n"


def keys(path: str) -> Callable[[Files], list[str]]:
  """Every record of the table may be hit."""
  return lambda files: [row[0] for row in rows(path, files[path])]


def change_cell(path: str, column: int, change: Callable[[str, random.Random], str]):
  """A damage that rewrites one cell of the record."""

  def damage(files: Files, key: str, rng: random.Random) -> Files:
    return _lines(files, path, lambda cells: [[*cells[:column], change(cells[column], rng), *cells[column + 1 :]]], key)

  return damage


def repeat_row(path: str):
  """A damage that writes the record twice."""
  return lambda files, key, rng: _lines(files, path, lambda cells: [cells, cells], key)


def drop_row(path: str):
  """A damage that loses the record."""
  return lambda files, key, rng: _lines(files, path, lambda cells: [], key)


def _lines(files: Files, path: str, change: Callable[[list[str]], list[list[str]]], key: str) -> Files:
  sep = separator(path)
  lines = []
  for line in files[path].split("\n")[:-1]:
    cells = line.split(sep)
    lines += [sep.join(new) for new in change(cells)] if cells[0] == key else [line]
  return {**files, path: "".join(f"{line}\n" for line in lines)}
