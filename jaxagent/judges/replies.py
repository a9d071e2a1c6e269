"""Reading a judge's reply: one JSON object of the form that was asked for, or `Unparsed`."""

import json
import math
import re
from typing import Any

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(?P<body>.*)\n?```", re.DOTALL)


class Unparsed(Exception):
  """The reply is not of the form that was asked for: what is wrong, in one line."""


def read_object(text: str, *keys: str) -> dict[str, Any]:
  """The JSON object that the reply is, with exactly these keys. Thoughts up to `</think>` and a code fence around it
  are no part of it.

  Unparsed: anything else before or after it, NaN or infinity, a key twice, missing or unknown.
  """
  body = text.rpartition("</think>")[2].strip()
  if fenced := _FENCE.fullmatch(body):
    body = fenced["body"]
  try:
    value = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant)
  except (ValueError, RecursionError) as error:
    raise Unparsed(f"not JSON: {error}") from None
  if not isinstance(value, dict) or set(value) != set(keys):
    got = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise Unparsed(f"an object with {', '.join(keys)} was asked for, got {got}")
  return value


def integer(value: Any, low: int, high: int, what: str) -> int:
  if type(value) is not int or not low <= value <= high:
    raise Unparsed(f"{what} must be a whole number in {low}..{high}, got {_shown(value)}")
  return value


def share(value: Any, what: str) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or math.isnan(value):
    raise Unparsed(f"{what} must be a number in [0, 1], got {_shown(value)}")
  return float(value)


def text(value: Any, what: str, *, most: int = 1000) -> str:
  if not isinstance(value, str) or not value.strip() or len(value) > most:
    raise Unparsed(f"{what} must be a text of 1 to {most} characters, got {_shown(value)}")
  return " ".join(value.split())


def entries(value: Any, what: str, *, most: int) -> list[Any]:
  if not isinstance(value, list) or len(value) > most:
    raise Unparsed(f"{what} must be a list of at most {most}, got {_shown(value)}")
  return value


def numbers(value: Any, high: int, what: str) -> list[int]:
  """Different numbers from 1 to `high`."""
  found = [integer(x, 1, high, f"an entry of {what}") for x in entries(value, what, most=high)]
  if len(set(found)) < len(found):
    raise Unparsed(f"{what} lists a number twice: {found}")
  return found


def fields(value: Any, keys: tuple[str, ...], what: str) -> tuple[Any, ...]:
  """The values of an object with exactly these keys."""
  if not isinstance(value, dict) or set(value) != set(keys):
    raise Unparsed(f"{what} must be an object with {', '.join(keys)}, got {_shown(value)}")
  return tuple(value[key] for key in keys)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    raise ValueError("a key is given twice")
  return found


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON number")


def _shown(value: Any) -> str:
  return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
