"""Which implementation of an operation runs: by name, or by what is compiled for."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax


class Implementation(NamedTuple):
  """A forward and the backward that takes what it gave, and the platforms that have it; None: every one."""

  forward: Callable
  backward: Callable | None = None
  platforms: tuple[str, ...] | None = None


def platform() -> str:
  """What is compiled for: the device of the mesh in use, which need not be here, else the default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def choose(name: str | None, known: Mapping[str, Implementation]) -> Implementation:
  """The implementation of that name; for None the first of `known` that the platform has.

  ValueError for a name that is unknown, or that cannot run on the platform.
  """
  here = platform()
  if name is None:
    return next(one for one in known.values() if one.platforms is None or here in one.platforms)
  if name not in known:
    raise ValueError(f"implementation must be one of {', '.join(known)} or None, got {name!r}")
  platforms = known[name].platforms
  if platforms is not None and here not in platforms:
    raise ValueError(
      f"implementation {name!r} runs on {' or '.join(platforms)} and the backend is {here}; "
      "leave it None for the backend's own"
    )
  return known[name]
