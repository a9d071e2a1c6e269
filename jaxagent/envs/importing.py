"""`my_package.module:name` in a config: how people extend the library without forking it."""

import importlib
import importlib.util
import os
import sys
from typing import Any


def attribute(spec: str, *, what: str) -> Any:
  """The object that `module:name` names; modules of the working directory are found too.

  ValueError: no such module or attribute. An error raised while the module is imported is the user's to see as it is.
  """
  module, _, name = spec.partition(":")
  if not module or not name:
    raise ValueError(f"{what}: expected my_package.module:name, got {spec!r}")
  found = getattr(_module(module, spec, what), name, None)
  if found is None:
    raise ValueError(f"{what}: module {module!r} has no attribute {name!r} (from {spec!r})")
  return found


def _module(module: str, spec: str, what: str):
  here = os.getcwd()
  if here not in sys.path and "" not in sys.path:
    sys.path.append(here)  # a console script, unlike `python -m`, does not search the working directory
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
      raise  # the module exists, something that it imports does not
    raise ValueError(f"{what}: no module {error.name!r} (from {spec!r}); looked in {here} and on sys.path") from error
