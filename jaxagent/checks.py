"""Checks of arguments. Shapes always; values only where every array is concrete: nothing raises inside jit."""

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.core import Tracer


def check_shapes(**arguments: tuple[Any, str]) -> dict[str, Any]:
  """`check_shapes(logp=(logp, "*B T"), rollout=(rollout, "N"))`: axes of one name have one length; returns the sizes.

  A first axis `*name` stands for any number of leading axes. Arguments that are None are skipped. A ValueError names
  the first argument that disagrees. Works on tracers.
  """
  sizes: dict[str, Any] = {}
  for name, (x, axes) in arguments.items():
    if x is None:
      continue
    shape, letters = np.shape(x), axes.split()
    if letters and letters[0].startswith("*"):
      lead = len(shape) - len(letters) + 1
      shape = (shape[:lead], *shape[lead:]) if lead >= 0 else None
    if shape is None or len(shape) != len(letters) or any(sizes.setdefault(a, s) != s for a, s in zip(letters, shape)):
      known = ", ".join(f"{a}={sizes[a]}" for a in letters if a in sizes)
      raise ValueError(f"{name} must have shape [{axes}]{' with ' + known if known else ''}, got {np.shape(x)}")
  return sizes


def check_options(prefix: str, *rules: tuple[Any, str, Any, str]) -> None:
  """`check_options("search: ", (top_k >= 1, "top_k", top_k, "at least 1"), ...)`: (holds, name, got, must be).

  A ValueError names the first one that does not hold.
  """
  for holds, name, got, want in rules:
    if not holds:
      raise ValueError(f"{prefix}{name} must be {want}, got {got!r}")


def nearest(name: str, names: Iterable[str]) -> str:
  """", did you mean 'x'?", for the end of a sentence about an unknown name; "" where none is close."""
  near = difflib.get_close_matches(name, list(names), n=1)
  return f", did you mean {near[0]!r}?" if near else ""


def concrete(*arrays: Any) -> bool:
  return not any(isinstance(x, Tracer) for x in arrays)


def check_ids(name: str, ids: Any, count: int, *, where: Any = None) -> None:
  """ValueError where concrete `ids` leave [0, count) at a place where `where` holds; None is skipped."""
  if ids is None or not concrete(ids, where):
    return
  ids = np.asarray(ids)
  place = _first(((ids < 0) | (ids >= count)) & _places(ids, where))
  if place is not None:
    raise ValueError(f"{name} must hold ids in [0, {count}), got {ids[place]} at {_index(place)}; renumber them")


def check_range(name: str, x: Any, low: float, high: float, *, where: Any = None) -> None:
  """ValueError where concrete `x` is NaN or leaves [low, high] at a place where `where` holds."""
  if not concrete(x, where):
    return
  x = np.asarray(x)
  place = _first(~((x >= low) & (x <= high)) & _places(x, where))
  if place is not None:
    raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {x[place]} at {_index(place)}")


def _places(x, where):
  """`where` with trailing axes to broadcast against x."""
  if where is None:
    return True
  where = np.asarray(where)
  return where.reshape(where.shape + (1,) * (x.ndim - where.ndim))


def _first(bad):
  places = np.argwhere(bad)
  return tuple(map(int, places[0])) if len(places) else None


def _index(place):
  return f"index {', '.join(map(str, place))}" if place else "the scalar"
