"""The strict verifier: the workspace holds exactly the untouched rendering of the world. It knows no stages.

It shares no code with the progress scorer or the reference solvers.
"""

import json
from collections.abc import Mapping


def verify(files: Mapping[str, str], truth: Mapping[str, str]) -> bool:
  """Every file of `truth` is there and says the same; scratch files beside them are the agent's own affair."""
  return all(path in files and _same(path, files[path], truth[path]) for path in truth)


def _same(path: str, got: str, want: str) -> bool:
  if path.endswith(".json"):
    return _canonical(got) == _canonical(want)
  if path.endswith((".csv", ".log")):
    return _lines(got, path.endswith(".csv")) == _lines(want, path.endswith(".csv"))
  return got == want


def _canonical(text: str) -> str | None:
  try:
    return json.dumps(json.loads(text), sort_keys=True)
  except (ValueError, RecursionError):
    return None


def _lines(text: str, header: bool) -> tuple[list[str], list[str]]:
  """The column names, where there are any, and the records in order of their text."""
  lines = [line for line in text.split("\n") if line]
  return lines[:header], sorted(lines[header:])
