"""The mesh of a run, and how batches lie on it; where parameters lie is said in `models.sharding`.

All mesh axes are of type Auto: shardings are pinned at the borders of the jitted functions and the compiler fills in
the rest.
"""

import math

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxagent import config
from jaxagent.models.sharding import BATCH_AXES

AXES = ("data", "fsdp", "tensor", "expert")


def make_mesh(sizes: config.Mesh = config.Mesh(), *, devices: list | None = None) -> jax.sharding.Mesh:  # noqa: B008
  """A mesh over all devices with axes data, fsdp, tensor, expert; one size may be -1: the devices that are left.

  A ValueError says when the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = [getattr(sizes, axis) for axis in AXES]
  given = dict(zip(AXES, shape))
  if any(s != -1 and s < 1 for s in shape) or shape.count(-1) > 1:
    raise ValueError(f"mesh sizes must be at least 1, and at most one of them -1, got {given}")
  known = math.prod(s for s in shape if s != -1)
  shape = [len(devices) // known if s == -1 else s for s in shape]
  if math.prod(shape) != len(devices):
    raise ValueError(
      f"mesh sizes {given} do not multiply to the {len(devices)} devices there are; set one of them to -1"
    )
  return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Of token batches `[M, B, T, ...]`: the rows of each microbatch over data and fsdp."""
  return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def check_rows(rows: int, mesh: jax.sharding.Mesh) -> None:
  """A ValueError unless the rows of a microbatch divide over the mesh."""
  ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  if rows % ways:
    raise ValueError(
      f"training.microbatch_rows {rows} does not divide over the {ways} devices of the mesh axes data and fsdp;"
      f" use a multiple of {ways}"
    )
