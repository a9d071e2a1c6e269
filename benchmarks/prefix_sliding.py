"""Prefix-sliding attention, decoding from its cache, and grouped products, against the usual ways: ratios on a CPU.

    python benchmarks/prefix_sliding.py --rounds 5 --json out.json --plot out.png
    python benchmarks/prefix_sliding.py --only decode
    python benchmarks/prefix_sliding.py --chip v5e:2x2      # memory of the compiled TPU program; needs libtpu, no TPU

What is compared runs in turn in one process; a ratio is the other's time over ours, the median over rounds, with the
lowest and the highest. float32, one row, 2 heads on 1 key head of width 64, a prefix of 128 and a window of 512.
`attention`: forward, and forward with gradients, against `jax.nn.dot_product_attention` with the dense mask; `exponent`
is the slope of log time over log length of ours. `decode`: one token from a cache of prefix + window slots, against one
that holds all tokens, and the bytes of both. `grouped`: 8 experts, top-2 of 2048 tokens, width 256, against a dense
product of all experts with a one-hot mask and against `lax.ragged_dot`.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.prefix_sliding import prefix_sliding_attention, prefix_sliding_decode
from pallas_kernels.prefix_sliding.mask import dense_mask

HEADS, KV_HEADS, WIDTH, PREFIX, WINDOW = 2, 1, 64, 128, 512
LENGTHS = (2048, 4096, 8192, 16384, 32768)
GENERATED = (8192, 32768)


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def gradients(function):
  """Forward and backward as one function of the inputs and the output's cotangent."""

  def run(g, *inputs):
    out, pullback = jax.vjp(function, *inputs)
    return out, pullback(g)

  return run


class Timed:
  """A compiled function of fixed arguments; a call gives the seconds of the second of two runs."""

  def __init__(self, function, *arguments):
    self.function, self.arguments = jax.jit(function), arguments
    jax.block_until_ready(self.function(*arguments))

  def __call__(self) -> float:
    jax.block_until_ready(self.function(*self.arguments))
    start = time.perf_counter()
    jax.block_until_ready(self.function(*self.arguments))
    return time.perf_counter() - start


def in_turn(runs: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
  seconds = {name: [] for name in runs}
  for _ in range(rounds):
    for name, run in runs.items():
      seconds[name].append(run())
  return seconds


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
  ratios = [a / b for a, b in zip(theirs, ours)]
  return {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


# Attention


def attention_arrays(length: int):
  q, k, v, g = (random(1, h, length, WIDTH, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)))
  return q, k, v, g, jnp.zeros((1, length), jnp.int32), jnp.full((1, length), PREFIX, jnp.int32)


def our_runs(length: int) -> dict[str, Timed]:
  q, k, v, g, segment, end = attention_arrays(length)

  def ours(q, k, v):
    return prefix_sliding_attention(q, k, v, segment=segment, prefix_end=end, window=WINDOW, scale=WIDTH**-0.5)

  return {"forward": Timed(ours, q, k, v), "forward+backward": Timed(gradients(ours), g, q, k, v)}


def dense_runs(length: int) -> dict[str, Timed]:
  q, k, v, g, segment, end = attention_arrays(length)
  mask = dense_mask(segment, end, WINDOW)[:, None]

  def dense(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=mask)

  q, k, v, g = (x.swapaxes(1, 2) for x in (q, k, v, g))
  return {"dense forward": Timed(dense, q, k, v), "dense forward+backward": Timed(gradients(dense), g, q, k, v)}


def exponent(lengths, seconds) -> float:
  return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def measure_scaling(rounds: int) -> dict:
  """Ours alone, all lengths in turn."""
  out = {}
  for what in ("forward", "forward+backward"):
    seconds = in_turn({length: our_runs(length)[what] for length in LENGTHS}, rounds)
    ms = {length: 1e3 * statistics.median(s) for length, s in seconds.items()}
    out[what] = {"ms": ms, "exponent": exponent(list(ms), list(ms.values()))}
  return out


def measure_attention(rounds: int, dense_up_to: int = 16384) -> dict:
  out = {"scaling": measure_scaling(rounds), "against dense": {"forward": {}, "forward+backward": {}}}
  for length in LENGTHS:
    if length <= dense_up_to:
      seconds = in_turn(our_runs(length) | dense_runs(length), rounds)
      for what, ratios in out["against dense"].items():
        ratios[length] = ratio(seconds[f"dense {what}"], seconds[what])
      print(f"attention at {length} done", file=sys.stderr, flush=True)
  return out


# Decoding


def decode_run(slots: int, position: int, window: int | None) -> Timed:
  cache = [random(1, KV_HEADS, slots, WIDTH, seed=i) for i in range(2)]
  held = np.arange(slots) if window is None else np.append(np.arange(PREFIX), position - np.arange(window))
  ids = (jnp.asarray(x, jnp.int32) for x in (held[None], [[position]], [PREFIX]))
  decode = functools.partial(prefix_sliding_decode, window=window, scale=WIDTH**-0.5)
  return Timed(decode, random(1, HEADS, 1, WIDTH), *cache, *ids)


def measure_decode(rounds: int) -> dict:
  out = {}
  for generated in GENERATED:
    total = PREFIX + generated
    runs = {"fixed": decode_run(PREFIX + WINDOW, total - 1, WINDOW), "full": decode_run(total, total - 1, None)}
    seconds = in_turn(runs, 20 * rounds)
    size = {name: sum(x.nbytes for x in run.arguments[1:3]) for name, run in runs.items()}
    out[generated] = ratio(seconds["full"], seconds["fixed"]) | {"bytes of the caches": size}
    out[generated]["us"] = {name: 1e6 * statistics.median(s) for name, s in seconds.items()}
  return out


# Grouped products


def grouped_runs(tokens=2048, experts=8, chosen=2, width=256) -> dict[str, Timed]:
  rng = np.random.default_rng(0)
  expert = np.sort(np.concatenate([rng.permutation(experts)[:chosen] for _ in range(tokens)]))
  sizes, member = np.bincount(expert, minlength=experts), jax.nn.one_hot(expert, experts)
  x, g = (random(expert.size, width, seed=i) for i in range(2))
  weights = random(experts, width, width, seed=2)
  ways = {
    "ours": functools.partial(grouped_matmul, group_sizes=jnp.asarray(sizes)),
    "one-hot": lambda x, w: jnp.einsum("me,mef->mf", member, jnp.einsum("md,edf->mef", x, w)),
    "ragged_dot": lambda x, w: jax.lax.ragged_dot(x, w, jnp.asarray(sizes, jnp.int32)),
  }
  forward = {f"{name} forward": Timed(way, x, weights) for name, way in ways.items()}
  return forward | {f"{name} forward+backward": Timed(gradients(way), g, x, weights) for name, way in ways.items()}


def measure_grouped(rounds: int) -> dict:
  seconds = in_turn(grouped_runs(), rounds)
  out = {"ms": {name: 1e3 * statistics.median(s) for name, s in seconds.items()}}
  for what in ("forward", "forward+backward"):
    for other in ("one-hot", "ragged_dot"):
      out[f"{other} {what}"] = ratio(seconds[f"{other} {what}"], seconds[f"ours {what}"])
  return out


# Memory of the compiled TPU program


def tpu_memory(topology: str) -> dict:
  from jax.experimental import topologies

  try:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
  except Exception as error:
    sys.exit(f"skipped: no TPU compiler for {topology} ({str(error).splitlines()[0]}); pip install 'jax[tpu]'")
  sharding, out = jax.sharding.SingleDeviceSharding(device), {}

  def total(q, k, v, segment, prefix_end):
    options = dict(segment=segment, prefix_end=prefix_end, window=1024, scale=0.1)
    return prefix_sliding_attention(q, k, v, **options).astype(jnp.float32).sum()

  for length in (2**n for n in range(12, 18)):
    q, k = (jax.ShapeDtypeStruct((1, h, length, 128), jnp.bfloat16, sharding=sharding) for h in (4, 2))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("x",)).abstract_mesh):
      lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k, ids, ids)
    out[length] = lowered.compile().memory_analysis().temp_size_in_bytes / 2**20
  return {"MiB of temporaries, forward and gradients, bfloat16, 4 heads on 2, width 128, window 1024": out}


def plot(found: dict, path: str) -> None:
  import matplotlib.pyplot as plt

  found, (axes, against) = found["attention"], plt.subplots(1, 2, figsize=(9, 3.5))[1]
  for what, scaling in found["scaling"].items():
    axes.loglog(*zip(*scaling["ms"].items()), "o-", label=f"{what}, exponent {scaling['exponent']:.2f}")
    ratios = found["against dense"][what]
    against.loglog(list(ratios), [r["ratio"] for r in ratios.values()], "o-", label=what)
  axes.set(xlabel="tokens", ylabel="ms", title="Prefix sliding")
  against.set(xlabel="tokens", ylabel="times faster", title="Against the dense mask")
  for one in (axes, against):
    one.legend(frameon=False)
    one.spines[["top", "right"]].set_visible(False)
  plt.tight_layout()
  plt.savefig(path, dpi=150)


MEASURES = {"attention": measure_attention, "decode": measure_decode, "grouped": measure_grouped}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--only", choices=MEASURES, help="one of the three")
  parser.add_argument("--dense-up-to", type=int, default=16384, help="tokens; the dense way takes 10 GB at 16384")
  parser.add_argument("--chip", help="a TPU topology: memory of the compiled program in place of times")
  parser.add_argument("--json")
  parser.add_argument("--plot", help="a picture of the lengths; needs matplotlib")
  args, out = parser.parse_args(), {"jax": jax.__version__}
  if args.chip:
    out |= tpu_memory(args.chip)
  else:
    measures = MEASURES | {"attention": functools.partial(measure_attention, dense_up_to=args.dense_up_to)}
    out |= {name: run(args.rounds) for name, run in measures.items() if args.only in (None, name)}
  print(json.dumps(out, indent=1))
  if args.json:
    with open(args.json, "w") as file:
      json.dump(out, file, indent=1)
  if args.plot:
    plot(out, args.plot)


if __name__ == "__main__":
  main()
