"""One Muon update against `optax.contrib.muon`: ratios of times on a CPU, then work and traffic on a mesh.

    python benchmarks/muon_update.py --rounds 7 --json out.json     # ratios, one device, float32
    python benchmarks/muon_update.py --mesh simulated               # 8 simulated devices
    python benchmarks/muon_update.py --mesh v5e:4x4                 # compiled ahead of time; needs libtpu, no TPU

The two are timed in turn in one process; a ratio is Optax's time over ours, the median over rounds, with the lowest and
the highest. What is timed is the whole transform (momentum, iteration, shape scale, decay, rate) on the same tree;
Optax is told which axes are a matrix's. `plain` is Newton-Schulz with Jordan's quintics, as in Optax; `gram` the same
polynomial in its Gram form. On a mesh: multiplications and additions of the products that one device does, over an even
share of those without a mesh, counted in the program that the compiler is given; and the bytes of the results of the
collectives in the program that it makes, per device, beside those of the parameters.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "simulated" in sys.argv:
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # only its compiler is used

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxagent import optim

LAYERS, WIDTH = 12, 512
KINDS = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}


def decoder(stacked: bool) -> dict:
  """12 layers of width 512: four squares and two of aspect 4 in each."""
  shapes = {name: (WIDTH * rows, WIDTH * columns) for name, (rows, columns) in KINDS.items()}
  if stacked:
    return {name: (LAYERS, *shape) for name, shape in shapes.items()}
  return {f"{name}_{i}": shape for name, shape in shapes.items() for i in range(LAYERS)}


CASES = {
  "square 512x512, 24 arrays": {f"w{i}": (512, 512) for i in range(24)},
  "square 512x512, stacked": {"w": (24, 512, 512)},
  "aspect 4 512x2048, 12 arrays": {f"w{i}": (512, 2048) for i in range(12)},
  "aspect 4 512x2048, stacked": {"w": (12, 512, 2048)},
  "64 experts 256x768": {"w": (64, 256, 768)},
  "decoder of 12 layers, 72 arrays": decoder(stacked=False),
  "decoder of 12 layers, stacked": decoder(stacked=True),
}
ITERATIONS = {"plain": optim.newton_schulz, "gram": optim.gram_newton_schulz}


def random(shapes: dict, seed: int) -> dict:
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}


def labels(params):
  return {name: "muon" for name in params}


def theirs() -> optax.GradientTransformation:
  def dimensions(params):
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), params)

  return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimensions)


def ours(iteration, **options) -> optax.GradientTransformation:
  return optim.muon(1e-2, iteration=iteration, labels=labels, **options)


class Timed:
  """One transform on one tree, compiled; a call is one update, in seconds."""

  def __init__(self, tx, params, gradient):
    self.update, self.arguments = jax.jit(tx.update), (gradient, jax.jit(tx.init)(params), params)
    self()

  def __call__(self) -> float:
    start = time.perf_counter()
    jax.block_until_ready(self.update(*self.arguments))
    return time.perf_counter() - start


def measure(shapes: dict, rounds: int) -> dict:
  params, gradient = random(shapes, 0), random(shapes, 1)
  timed = {"optax": Timed(theirs(), params, gradient)}
  timed |= {name: Timed(ours(iteration), params, gradient) for name, iteration in ITERATIONS.items()}
  seconds = {name: [] for name in timed}
  for _ in range(rounds):
    for name, run in timed.items():
      seconds[name].append(run())
  out = {"optax_ms": 1e3 * statistics.median(seconds["optax"])}
  for name in ITERATIONS:
    ratios = [a / b for a, b in zip(seconds["optax"], seconds[name])]
    out[name] = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
  return out


# Work and traffic on a mesh


def products(jaxpr, times: int = 1) -> int:
  """Operations of the products in a jaxpr, loops counted; in a shard_map those of one device."""
  total = 0
  for eqn in jaxpr.eqns:
    inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
    for value in eqn.params.values():
      if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        total += products(getattr(value, "jaxpr", value), inner)
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      total += 2 * times * eqn.outvars[0].aval.size * int(np.prod([eqn.invars[0].aval.shape[i] for i in contracted]))
  return total


SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("


def traffic(text: str) -> dict[str, int]:
  """Bytes of the results of an HLO module's collectives, by kind; one that is done in steps (a chain) counts once."""
  found, seen = {}, set()
  for line in text.splitlines():
    match, chain = re.search(COLLECTIVE, line), re.search(r"chain_id=\S+", line)
    if not match:
      continue
    result, kind, started = match.groups()
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
    if chain and (step := (chain[0], *shapes)) in seen:
      continue
    if chain:
      seen.add(step)
    size = sum(SIZES.get(t, 4) * int(np.prod([int(d) for d in dims.split(",") if d] or [1])) for t, dims in shapes)
    found[kind] = found.get(kind, 0) + (size // 2 if started else size)  # an asynchronous one lists its operands too
  return found


def in_loops(text: str) -> int:
  """Collectives in what the module's while loops call, but for steps of one that overlaps another shape's iteration."""
  bodies = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)}
  todo, seen = re.findall(r"body=%?([\w.\-]+)", text), set()
  while todo:
    name = todo.pop()
    if name in bodies and name not in seen:
      seen.add(name)
      todo += re.findall(r"=%?([\w.\-]+)", bodies[name])
  lines = [line for name in seen for line in bodies[name].splitlines() if re.search(COLLECTIVE, line)]
  return sum("chain_id=" not in line for line in lines)


def layout(shapes: dict, axes: dict) -> dict:
  """[L, in, out] over fsdp x tensor, experts over expert, as `models.sharding` places the decoder's."""

  def spec(name, shape):
    if "expert" in axes:
      return P("expert", *(None,) * (len(shape) - 1))
    inwards = ("fsdp" if "fsdp" in axes else None, "tensor" if "tensor" in axes else None)
    return P(*(None,) * (len(shape) - 2), *(inwards[::-1] if name in ("o", "down") else inwards))

  return {name: spec(name, shape) for name, shape in shapes.items()}


def on_mesh(sizes: dict, shapes: dict, iteration, make_mesh) -> dict:
  mesh = make_mesh(sizes)
  placed = {name: NamedSharding(mesh, spec) for name, spec in layout(shapes, sizes).items()}
  params = {n: jax.ShapeDtypeStruct(s, jnp.float32, sharding=placed[n]) for n, s in shapes.items()}
  tx, alone = (optim.scale_by_muon(iteration, **o) for o in (dict(mesh=mesh, layout=placed), {}))
  state = jax.eval_shape(alone.init, params)._replace(mu=params)
  total = products(jax.make_jaxpr(alone.update)(params, state).jaxpr)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    mine = products(jax.make_jaxpr(tx.update)(params, state).jaxpr)
  compiled = jax.jit(tx.update, out_shardings=(placed, None)).lower(params, state).compile()
  moved = traffic(compiled.as_text())
  return {
    "work over an even share": mine * mesh.size / total,
    "Gflop of a device": mine / 1e9,
    "collectives in loops": in_loops(compiled.as_text()),
    "MB moved of a device": {kind: size / 1e6 for kind, size in moved.items()},
    "MB of parameters": sum(4 * int(np.prod(s)) for s in shapes.values()) / 1e6,
    "MB of parameters of a device": sum(4 * int(np.prod(p.sharding.shard_shape(p.shape))) for p in params.values())
    / 1e6,
  }


def meshes(name: str):
  """(devices, a function that makes a mesh of them, the layouts to try)."""
  auto = jax.sharding.AxisType.Auto
  if name == "simulated":
    devices = jax.devices()
    count = len(devices)

    def make(sizes):
      return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(auto,) * len(sizes), devices=devices)
  else:
    from jax.experimental import topologies

    try:
      topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:
      print(f"skipped: no TPU compiler for {name} ({str(error).splitlines()[0]}); pip install 'jax[tpu]'")
      sys.exit(0)
    devices, count = topology.devices, len(topology.devices)

    def make(sizes):
      return topologies.make_mesh(topology, tuple(sizes.values()), tuple(sizes))  # Auto

  half = 2 if count == 8 else 4
  return devices, make, [{"data": count}, {"fsdp": count}, {"fsdp": count // half, "tensor": half}]


def analyse(name: str, only: str) -> dict:
  devices, make, layouts = meshes(name)
  models = {"12 layers": decoder(stacked=True)}
  models["16 layers"] = {kind: (16, *shape[1:]) for kind, shape in models["12 layers"].items()}
  experts = {"up": (64, 256, 768), "down": (64, 768, 256)}
  cases = [(what, sizes, shapes) for what, shapes in models.items() for sizes in layouts]
  cases.append(("64 experts", {"expert": len(devices)}, experts))
  out = {}
  for what, sizes, shapes in cases:
    for iteration in ITERATIONS:
      title = f"{what} {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} {iteration}"
      if only in title:
        out[title] = on_mesh(sizes, shapes, ITERATIONS[iteration], make)
        print(title, json.dumps(out[title]), file=sys.stderr, flush=True)
  return out


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--only", default="", help="cases whose name contains this")
  parser.add_argument("--mesh", help="simulated, or a TPU topology: analysis in place of times")
  parser.add_argument("--json")
  return parser.parse_args()


def main() -> None:
  args, out = arguments(), {"jax": jax.__version__, "optax": optax.__version__}
  if args.mesh:
    out |= analyse(args.mesh, args.only)
  else:
    for name, shapes in CASES.items():
      if args.only in name:
        out[name] = measure(shapes, args.rounds)
        print(name, json.dumps(out[name]), file=sys.stderr, flush=True)
  print(json.dumps(out, indent=1))
  if args.json:
    with open(args.json, "w") as file:
      json.dump(out, file, indent=1)


if __name__ == "__main__":
  main()
