"""Which device holds what: the mesh, and rules from the logical axes of parameters to mesh axes.

All mesh axes are of type Auto: shardings are pinned at the borders of the jitted functions and the compiler fills in
the rest.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxagent import config

AXES = ("data", "fsdp", "tensor", "expert")
BATCH_AXES = ("data", "fsdp")  # rows of a batch are split over both

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
  "layers": None,
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "experts": "expert",
}


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


def param_shardings(axes: Any, shapes: Any, *, mesh: jax.sharding.Mesh, rules: Rules = RULES) -> Any:
  """A NamedSharding for each parameter, from its logical axes (`Policy.axes`) and its shape.

  A ValueError names the parameter where a rule is missing, does not fit its dimension or takes one mesh axis twice.
  """

  def place(path, leaf, names):
    return NamedSharding(mesh, _spec(jax.tree_util.keystr(path), leaf.shape, names, mesh, rules))

  return jax.tree_util.tree_map_with_path(place, shapes, axes)


def shard_params(params: Any, axes: Any, *, mesh: jax.sharding.Mesh, rules: Rules = RULES) -> Any:
  """A copy of `params` on the mesh by the rules; it shares no buffer with them, so it may be donated."""
  shardings = param_shardings(axes, params, mesh=mesh, rules=rules)

  def copy(x, sharding):  # may_alias alone does not do it: a replicated array keeps the shard it came from
    return jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else x, sharding, may_alias=False)

  return jax.tree.map(copy, params, shardings)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


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


def _spec(path: str, shape, names, mesh, rules) -> PartitionSpec:
  if len(names) != len(shape):
    raise ValueError(f"parameter {path} has shape {tuple(shape)} but logical axes {tuple(names)}; name every dimension")
  spec = []
  for size, name in zip(shape, names):
    if name is not None and name not in rules:
      raise ValueError(
        f"parameter {path} has the logical axis {name!r}, which no rule places; rules are {sorted(rules)}"
      )
    axis = rules[name] if name is not None else None
    over = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    unknown = [a for a in over if a not in mesh.shape]
    if unknown:
      raise ValueError(f"the rule for {name!r} names the mesh axis {unknown[0]!r}; the mesh has {tuple(mesh.shape)}")
    ways = int(np.prod([mesh.shape[a] for a in over], dtype=int))
    if size % ways:
      raise ValueError(
        f"parameter {path}: dimension {name!r} of size {size} does not divide over mesh axis {axis!r} of size {ways};"
        f" change the mesh or the rule"
      )
    spec.append(over if ways > 1 else None)
  used = [a for over in spec if over for a in over]
  if len(used) != len(set(used)):
    raise ValueError(
      f"parameter {path} with logical axes {tuple(names)} would use a mesh axis twice: {used}; change a rule"
    )
  return PartitionSpec(*spec)
