"""Where parameters, prepared weights and caches lie: rules from the logical axes of their dimensions to mesh axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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
# what decoding reads in every step: split over fsdp it would be gathered in every step, for a few rows
DECODING_RULES: Rules = {**RULES, "embed": None, "rows": BATCH_AXES}


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


def transfer(params: Any, shardings: Any) -> Any:
  """`params` on the devices of `shardings`, from device to device where one number of devices divides the other.

  Arrays that lie there already, or come from as many devices or fewer, keep how they are split, so that one copy of
  each part is moved; the next computation splits them as it wants. `jax.device_put` alone would go through the host
  for every array whose parts differ.
  """

  def move(x, sharding):
    source = x.sharding if isinstance(x, jax.Array) else None
    if not isinstance(source, NamedSharding):
      return jax.device_put(x, sharding)
    there, here = source.mesh.devices, sharding.mesh.devices
    if [*there.flat] == [*here.flat]:
      return x
    if here.size % there.size == 0:
      return jax.device_put(x, _copies(source, here))
    if there.size % here.size == 0:
      x = jax.jit(_same, out_shardings=_copies(sharding, there))(x)
    return jax.device_put(x, sharding)

  return jax.tree.map(move, params, shardings)


def _same(x):
  return x


def _copies(sharding: NamedSharding, devices: np.ndarray) -> NamedSharding:
  """The same parts on other devices, as many copies of each as there are devices more."""
  mesh = sharding.mesh
  return NamedSharding(Mesh(devices.reshape(-1, *mesh.devices.shape), ("copy", *mesh.axis_names)), sharding.spec)


def rules_on(mesh: Mesh, rules: Rules) -> Rules:
  """The rules without the axes that the mesh does not have."""

  def known(axis):
    axes = tuple(a for a in _axes(axis) if a in mesh.shape)
    return axis if axes == _axes(axis) else axes

  return {name: known(axis) for name, axis in rules.items()}


def where_they_divide(axes: Any, shapes: Any, *, mesh: Mesh, rules: Rules) -> Any:
  """A NamedSharding for each array by the rules; a dimension that does not divide over its mesh axes stays whole."""

  def place(leaf, names):
    over = [_axes(rules[name]) if name is not None else () for name in names]
    return NamedSharding(mesh, PartitionSpec(*(dividing(mesh, n, axes) for n, axes in zip(leaf.shape, over))))

  return jax.tree.map(place, shapes, axes)


def mesh_in_use() -> AbstractMesh | None:
  """The mesh that `policy.on_mesh` has a policy compiled for; None where there is none, or one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if math.prod(free_axes(mesh).values()) > 1 else None


def free_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
  """Sizes of the axes over which the compiler may split."""
  return {name: mesh.shape[name] for name, of in zip(mesh.axis_names, mesh.axis_types) if of == AxisType.Auto}


def dividing(mesh: Mesh | AbstractMesh, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
  """Those of `axes` that are free, if together they divide `size`, else none."""
  free = free_axes(mesh)
  axes = tuple(axis for axis in axes if axis in free)
  return axes if size % math.prod(free[axis] for axis in axes) == 0 else ()


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def _axes(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


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
    over = _axes(axis)
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
