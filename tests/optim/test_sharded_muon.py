"""Muon on a mesh: the same update, whole matrices to each device, nothing moved inside the iteration."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from thinned import thinned

from jaxagent import config
from jaxagent.optim import gram_newton_schulz, muon, muon_metrics, scale_by_muon, stacks
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.sharding import make_mesh

SHAPES = {
  "embed": (32, 16), "norm": (3, 16), "q": (6, 16, 16), "o": (6, 16, 16), "up": (6, 16, 32), "down": (6, 32, 16),
  "experts": (2, 4, 16, 32), "odd": (9, 5),
}  # fmt: skip
LABELS = {name: "adam" if name in ("embed", "norm") else "muon" for name in SHAPES}
COLLECTIVES = r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("


def specs(fsdp=None, tensor=None, expert=None):
  inwards, outwards = P(None, fsdp, tensor), P(None, tensor, fsdp)
  return {
    "embed": P(tensor, fsdp), "norm": P(None, fsdp), "q": inwards, "o": outwards, "up": inwards, "down": outwards,
    "experts": P(None, expert, fsdp, tensor), "odd": P(),
  }  # fmt: skip


LAYOUTS = {
  "data": (dict(data=8), specs()),
  "fsdp": (dict(data=1, fsdp=8), specs("fsdp")),
  "fsdp x tensor": (dict(data=2, fsdp=2, tensor=2), specs("fsdp", "tensor")),
  "expert": (dict(data=2, expert=4), specs(expert="expert")),
}


def tree(seed):
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def optimizer(**options):
  return muon(0.02, adam=optax.adamw(1e-3), labels=LABELS, **options)


@functools.cache
def on_one_device():
  tx, params = optimizer(), tree(0)
  state, update = tx.init(params), jax.jit(tx.update)
  for i in range(2):
    updates, state = update(tree(1 + i), state, params)
  return jax.tree.map(np.asarray, (updates, muon_metrics(state)))


@functools.cache
def compiled(layout, known=True, spread=True, alone=False, **options):
  """The update on the mesh, its shardings, and the transform; with `alone`, one matrix at a time."""
  sizes, spec = LAYOUTS[layout]
  mesh = make_mesh(config.Mesh(**sizes))
  placed = {name: NamedSharding(mesh, x) for name, x in spec.items()}
  where = dict(mesh=mesh, layout=placed if known else None) if spread else {}
  tx, shapes = optimizer(**where, **options), jax.eval_shape(lambda: tree(0))
  state = jax.eval_shape(tx.init, shapes)
  state_placed = optax.tree.map_params(
    tx, lambda x, s: x if isinstance(x, optax.MaskedNode) else s, state, placed,
    transform_non_params=lambda _: NamedSharding(mesh, P()), is_leaf=lambda x: isinstance(x, optax.MaskedNode),
  )  # fmt: skip
  step = jax.jit(tx.update, in_shardings=(placed, state_placed, placed), out_shardings=(placed, state_placed))
  with mock.patch.object(stacks, "CACHED", 1 if alone else stacks.CACHED):
    return step.lower(shapes, state, shapes).compile(), placed, state_placed, tx


def relative(x, y):
  return max(float(np.linalg.norm(np.asarray(x[k]) - y[k]) / np.linalg.norm(y[k])) for k in y)


@thinned("layout, known", LAYOUTS, [True, False], every=3)
def test_the_same_update_on_eight_devices(layout, known):
  step, placed, state_placed, tx = compiled(layout, known)
  params = jax.device_put(tree(0), placed)
  state = jax.device_put(tx.init(tree(0)), state_placed)
  for i in range(2):
    updates, state = step(jax.device_put(tree(1 + i), placed), state, params)
  want, metrics = on_one_device()
  assert relative(updates, want) < 1e-5
  assert jax.tree.map(lambda x: x.sharding, updates) == placed
  np.testing.assert_allclose(list(muon_metrics(state).values()), list(metrics.values()), rtol=0.05)  # estimates


def computations(text):
  """{name: lines} of an HLO module."""
  found, name = {}, None
  for line in text.splitlines():
    if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
      name = match[1]
      found[name] = []
    elif name:
      found[name].append(line)
  return found


def inside_loops(text):
  """Lines of everything that a while loop calls, however deep."""
  bodies, seen, lines = computations(text), set(), []
  todo = [body for part in bodies.values() for line in part for body in re.findall(r"body=%?([\w.\-]+)", line)]
  while todo:
    name = todo.pop()
    if name in seen or name not in bodies:
      continue
    seen.add(name)
    lines += bodies[name]
    todo += [callee for line in bodies[name] for callee in re.findall(r"=%([\w.\-]+)", line)]
  return lines


@thinned("layout", LAYOUTS, every=2)
def test_no_collective_in_the_iteration(layout):
  text = compiled(layout, alone=True)[0].as_text()
  lines = inside_loops(text)
  assert sum("dot(" in line or "custom-call" in line for line in lines) >= 15
  assert not [line for line in lines if re.search(COLLECTIVES, line)]
  assert re.search(COLLECTIVES, text)  # they are outside


def test_left_to_the_compiler_there_are_collectives_in_the_iteration():
  """What `mesh` is for, and that the test before would see them."""
  assert [x for x in inside_loops(compiled("fsdp", spread=False, alone=True)[0].as_text()) if re.search(COLLECTIVES, x)]


def products(jaxpr, times=1):
  """Multiplications of the products in a jaxpr; in a shard_map those of one device."""
  total = 0
  for eqn in jaxpr.eqns:
    inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
    for value in eqn.params.values():
      if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        total += products(getattr(value, "jaxpr", value), inner)
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      total += times * eqn.outvars[0].aval.size * np.prod([eqn.invars[0].aval.shape[i] for i in contracted])
  return total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_work_is_done_twice(layout):
  """16 squares and 16 wide matrices on 8 devices: each does an eighth."""
  sizes, spec = LAYOUTS[layout]
  mesh = make_mesh(config.Mesh(**sizes))
  shapes = {"q": (8, 16, 16), "o": (8, 16, 16), "up": (8, 16, 32), "experts": (2, 4, 16, 32)}
  params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  work = []
  for where in ({}, dict(mesh=mesh, layout={name: spec[name] for name in shapes})):
    tx = scale_by_muon(**where)
    work.append(products(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params)).jaxpr))
  assert work[1] * 8 == work[0]


def test_one_exchange_in_and_one_out_for_each_sharded_axis():
  """Of a batch in one layout: all-to-alls of what a device holds, and no gathering."""
  mesh = make_mesh(config.Mesh(data=1, fsdp=4, tensor=2))
  where = {"w": NamedSharding(mesh, P(None, "fsdp", "tensor"))}
  params = {"w": jax.ShapeDtypeStruct((8, 16, 32), jnp.float32, sharding=where["w"])}
  tx = scale_by_muon(mesh=mesh, layout=where)
  state = jax.eval_shape(tx.init, params)
  state = state._replace(mu=params)
  text = jax.jit(tx.update, out_shardings=(where, None)).lower(params, state).compile().as_text()
  assert len(re.findall(r" all-to-all\(", text)) == 4 and not re.search(r"all-gather|collective-permute", text)


def test_a_transposed_array_among_as_many_as_the_axis_has_devices():
  """XLA takes the arrays themselves for the parts of the exchange, and refuses parts of different memory layouts."""
  mesh = make_mesh(config.Mesh(data=1, fsdp=4, tensor=2))
  where = {name: P(None, "fsdp", "tensor") for name in "qkv"} | {"o": P(None, "tensor", "fsdp")}
  where = {name: NamedSharding(mesh, spec) for name, spec in where.items()}
  gradients = {name: jnp.asarray(np.random.default_rng(i).normal(size=(2, 16, 16)), jnp.float32)
               for i, name in enumerate(where)}  # fmt: skip
  alone, tx = scale_by_muon(), scale_by_muon(mesh=mesh, layout=where)
  want, _ = alone.update(gradients, alone.init(gradients))
  got, _ = jax.jit(tx.update)(jax.device_put(gradients, where), tx.init(gradients))
  assert relative(got, want) < 1e-5


@pytest.mark.slow
def test_axes_choose_the_devices():
  sizes, spec = LAYOUTS["fsdp x tensor"]
  mesh = make_mesh(config.Mesh(**sizes))
  gradients = {name: tree(1)[name] for name in ("q", "up")}
  want, _ = scale_by_muon().update(gradients, scale_by_muon().init(gradients))
  tx = scale_by_muon(mesh=mesh, axes=("fsdp",), layout={name: spec[name] for name in gradients})
  got, _ = jax.jit(tx.update)(gradients, tx.init(gradients))
  assert relative(got, want) < 1e-5
  with pytest.raises(ValueError, match="axes names 'model'; the mesh has data, fsdp, tensor, expert"):
    scale_by_muon(mesh=mesh, axes=("model",)).update(gradients, tx.init(gradients))


@pytest.mark.slow
def test_the_gram_form_on_a_mesh():
  step, placed, state_placed, tx = compiled("fsdp", iteration=gram_newton_schulz)
  got, _ = step(jax.device_put(tree(1), placed), jax.device_put(tx.init(tree(0)), state_placed),
                jax.device_put(tree(0), placed))  # fmt: skip
  alone = optimizer(iteration=gram_newton_schulz)
  want, _ = jax.jit(alone.update)(tree(1), alone.init(tree(0)), tree(0))
  assert relative(got, jax.tree.map(np.asarray, want)) < 1e-5


def test_a_checkpoint_restores_on_another_mesh(tmp_path):
  """Two steps on one layout, saved, restored on another, and a third: equal to three on the first."""
  step, placed, state_placed, tx = compiled("fsdp")
  params = jax.device_put(tree(0), placed)
  state = jax.device_put(tx.init(tree(0)), state_placed)
  for i in range(2):
    _, state = step(jax.device_put(tree(i), placed), state, params)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, {"opt_state": state}, {})
  want, _ = step(jax.device_put(tree(2), placed), state, params)
  other, placed, state_placed, _ = compiled("fsdp x tensor")
  target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, state_placed)
  with Checkpointer(tmp_path) as checkpointer:
    restored = checkpointer.restore({"opt_state": target}).state["opt_state"]
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == state_placed
  got, _ = other(jax.device_put(tree(2), placed), restored, jax.device_put(tree(0), placed))
  assert relative(got, jax.tree.map(np.asarray, want)) < 1e-5
