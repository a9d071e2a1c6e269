"""The progress scorer's reading of a workspace: each file as facts, so that a defect is a set of facts that differ.

It shares no code with the strict verifier or the reference solvers: a fault in one of the three shows in the others.
"""

import collections
import json
from collections.abc import Iterable, Mapping

Fact = tuple[str, ...]  # path first


def facts(files: Mapping[str, str], paths: Iterable[str]) -> dict[Fact, str]:
  """Everything that those of `paths` say that exist. Lines in another order say the same; nothing raises."""
  found: dict[Fact, str] = {}
  for path in sorted(set(paths) & set(files)):
    reader = {"json": _record, "csv": _csv, "log": _log}.get(path.rpartition(".")[2], _text)
    found |= {(path, *place): value for place, value in reader(files[path])}
  return found


def differing(one: Mapping[Fact, str], other: Mapping[Fact, str]) -> frozenset[Fact]:
  return frozenset(fact for fact in {*one, *other} if one.get(fact) != other.get(fact))


def _text(text: str):
  yield ("text",), text


def _csv(text: str):
  columns, *lines = [line for line in text.split("\n") if line] or [""]
  yield ("columns",), columns
  yield from _records(lines, ",", width=columns.count(",") + 1)


def _log(text: str):
  yield from _records([line for line in text.split("\n") if line], " ", width=None)


def _records(lines: list[str], sep: str, *, width: int | None):
  found = collections.defaultdict(list)
  for line in lines:
    cells = line.split(sep)
    if width is not None and len(cells) != width:
      yield ("unreadable", line), ""
    found[cells[0]].append(cells)
  for key, same in found.items():
    yield ("record", key, "count"), str(len(same))
    for i in range(1, max(map(len, same))):
      yield ("record", key, str(i)), sep.join(sorted({cells[i] if i < len(cells) else "" for cells in same}))


def _record(text: str):
  try:
    value = json.loads(text)
    fields = {key: json.dumps(item, sort_keys=True) for key, item in value.items()}
  except (ValueError, RecursionError, AttributeError):
    yield ("unreadable",), text
    return
  yield ("object",), str(len(fields))
  for key, item in fields.items():
    yield ("field", key), item
