"""One check of shapes for functions of several arrays."""

from typing import Any

import numpy as np


def check_shapes(**arguments: tuple[Any, str]) -> None:
  """`check_shapes(logp=(logp, "*B T"), mask=(mask, "*B T"))`: axes of one name have one length.

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
