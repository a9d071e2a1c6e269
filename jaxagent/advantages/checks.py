"""Checks of arguments. Shapes always; values only where every array is concrete: nothing raises inside jit."""

from typing import Any

import jax
import numpy as np


def check_shapes(**columns: tuple[Any, str]) -> dict[str, int]:
  """Sizes of the axes named as in `reward=(reward, "N")`; a column that is None is skipped.

  ValueError: a column whose rank or axes disagree with the columns before it.
  """
  sizes: dict[str, int] = {}
  for name, (x, axes) in columns.items():
    if x is None:
      continue
    shape, names = np.shape(x), axes.split()
    if len(shape) != len(names) or any(sizes.get(a, s) != s for a, s in zip(names, shape)):
      want = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in names)
      raise ValueError(f"{name} must have shape [{want}], got {list(shape)}")
    sizes.update(zip(names, shape))
  return sizes


def concrete(*arrays: Any) -> bool:
  return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_ids(name: str, ids: Any, count: int, *, where: Any = None) -> None:
  """ValueError: an id outside [0, count) at a place where `where` holds."""
  if not concrete(ids, where):
    return
  ids = np.asarray(ids)
  bad = np.argwhere(((ids < 0) | (ids >= count)) & _places(ids, where))
  if len(bad):
    raise ValueError(
      f"{name} must hold ids in [0, {count}), got {ids[tuple(bad[0])]} at {_index(bad[0])}; renumber them"
    )


def check_range(name: str, x: Any, low: float, high: float, *, where: Any = None) -> None:
  """ValueError: a number that is NaN or outside [low, high] at a place where `where` holds."""
  if not concrete(x, where):
    return
  x = np.asarray(x)
  bad = np.argwhere(~((x >= low) & (x <= high)) & _places(x, where))
  if len(bad):
    raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {x[tuple(bad[0])]} at {_index(bad[0])}")


def check_finite(name: str, x: Any, *, where: Any = None) -> None:
  """ValueError: a number that is NaN or infinite at a place where `where` holds: it would spoil every other one."""
  if not concrete(x, where):
    return
  x = np.asarray(x)
  bad = np.argwhere(~np.isfinite(x) & _places(x, where))
  if len(bad):
    raise ValueError(
      f"{name} must be finite, got {x[tuple(bad[0])]} at {_index(bad[0])}; a rollout without one must have valid=False"
    )


def _places(x, where):
  if where is None:
    return True
  where = np.asarray(where)
  return np.broadcast_to(where.reshape(where.shape + (1,) * (x.ndim - where.ndim)), x.shape)


def _index(place):
  return ", ".join(map(str, place)) or "the scalar"
