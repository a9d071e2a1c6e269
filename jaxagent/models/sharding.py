"""Where parameters, prepared weights and caches lie: rules from the logical axes of their dimensions to mesh axes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


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
