import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxagent.config import Mesh
from jaxagent.models.sharding import param_shardings, shard_params
from jaxagent.training.sharding import check_rows, make_mesh


@pytest.mark.parametrize(
  "sizes, want",
  [
    (dict(), (8, 1, 1, 1)),
    (dict(data=2, fsdp=-1), (2, 4, 1, 1)),
    (dict(data=1, fsdp=2, tensor=2, expert=2), (1, 2, 2, 2)),
  ],
)
def test_sizes(sizes, want):
  mesh = make_mesh(Mesh(**sizes))
  assert tuple(mesh.shape.values()) == want and tuple(mesh.shape) == ("data", "fsdp", "tensor", "expert")
  assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
  "sizes, said",
  [
    (dict(data=3), "do not multiply to the 8 devices"),
    (dict(data=-1, fsdp=3), "do not multiply to the 8 devices"),
    (dict(data=-1, fsdp=-1), "at most one of them -1"),
    (dict(data=0), "at least 1"),
  ],
)
def test_sizes_that_do_not_fit(sizes, said):
  with pytest.raises(ValueError, match=said):
    make_mesh(Mesh(**sizes))


def spec(shape, names, mesh=None, **rules):
  mesh = make_mesh(mesh or Mesh(data=2, fsdp=2, tensor=2))
  tree = {"layer": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}}
  given = {"rules": rules} if rules else {}
  return param_shardings({"layer": {"w": names}}, tree, mesh=mesh, **given)["layer"]["w"].spec


def test_rules():
  assert spec((3, 4, 6), ("layers", "embed", "heads")) == PartitionSpec(None, ("fsdp",), ("tensor",))
  assert spec((4, 4), ("x", None), x=("fsdp", "tensor")) == PartitionSpec(("fsdp", "tensor"), None)
  assert spec((), ()) == PartitionSpec()


@pytest.mark.parametrize(
  "shape, names, rules, said",
  [
    ((3, 4), ("embed", "heads"), {}, r"\['layer'\]\['w'\]: dimension 'embed' of size 3 .* 'fsdp' of size 2"),
    ((4, 4), ("embed", "nonsense"), {}, "logical axis 'nonsense', which no rule places"),
    ((4, 4), ("embed", "embed"), {}, "would use a mesh axis twice"),
    ((4, 4), ("embed",), {}, "name every dimension"),
    ((4,), ("x",), {"x": "model"}, "names the mesh axis 'model'"),
  ],
)
def test_rules_that_cannot_apply(shape, names, rules, said):
  with pytest.raises(ValueError, match=said):
    spec(shape, names, **rules)


@pytest.mark.parametrize("devices, sizes", [(1, Mesh(data=1)), (8, Mesh(data=8)), (8, Mesh(data=2, fsdp=4))])
def test_parameters_are_copied_onto_the_mesh(devices, sizes):
  params = {"w": jnp.ones((4, 4))}
  mesh = make_mesh(sizes, devices=jax.devices()[:devices])
  placed = shard_params(params, {"w": ("embed", "heads")}, mesh=mesh)
  placed["w"].delete()
  assert (params["w"] == 1).all()


def test_rows_must_divide():
  mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
  check_rows(8, mesh)
  with pytest.raises(ValueError, match="microbatch_rows 6 does not divide over the 4 devices"):
    check_rows(6, mesh)
