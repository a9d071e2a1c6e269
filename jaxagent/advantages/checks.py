"""What every advantage asks of its rewards."""

from typing import Any

import numpy as np

from jaxagent.checks import concrete


def check_finite(name: str, x: Any, *, where: Any = None) -> None:
  """ValueError where concrete `x` is NaN or infinite at a place where `where` holds: it would spoil all the others."""
  if not concrete(x, where):
    return
  x = np.asarray(x)
  places = np.asarray(True if where is None else where)
  places = places if places.ndim in (0, x.ndim) else places.reshape(places.shape + (1,) * (x.ndim - places.ndim))
  bad = np.argwhere(~np.isfinite(x) & places)
  if len(bad):
    place = tuple(map(int, bad[0]))
    raise ValueError(
      f"{name} must be finite, got {x[place]} at index {', '.join(map(str, place))}; a rollout without one must have"
      " valid=False"
    )
