"""Prefix-sliding attention on a GPU: first that it is right, then how near it comes to the machine's matrix products.

    python benchmarks/gpu/prefix_sliding.py                  # bfloat16, Hopper: the `gpu` forward, gradients by `xla`
    python benchmarks/gpu/prefix_sliding.py --implementation xla --lengths 2048   # anywhere, to try the script

Right: forward against the dense float32 definition at a short length, packed rows, a prefix of its own in each; it ends
with 1 if the error is above a hundredth of the largest value. Near: operations of the pairs that the mask lets through,
over the rate of one square bfloat16 product of this machine, measured in turn in the same run. Median of the rounds,
lowest and highest. The first line says on what it ran.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.prefix_sliding import prefix_sliding_attention

HEADS, KV_HEADS, WIDTH, PREFIX, WINDOW = 16, 4, 128, 128, 1024


def arrays(length: int, dtype):
  shapes = [(1, h, length, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]
  return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


def rows(length: int):
  """Two sequences in a row, each with its prefix."""
  first = length // 3
  segment = jnp.where(jnp.arange(length) < first, 0, 1)[None]
  return dict(segment=segment, prefix_end=jnp.where(segment == 0, PREFIX, first + PREFIX))


def attention(implementation, window, length):
  return partial(
    prefix_sliding_attention, window=window, scale=WIDTH**-0.5, implementation=implementation, **rows(length)
  )


def error(implementation: str, window: int | None, length: int = 1024) -> float:
  """Largest difference to the definition, over its largest value."""
  q, k, v = arrays(length, jnp.bfloat16)
  got = jax.jit(attention(implementation, window, length))(q, k, v).astype(jnp.float32)
  want = jax.jit(attention("reference", window, length))(*(x.astype(jnp.float32) for x in (q, k, v)))
  return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def pairs(window: int | None, length: int) -> int:
  """Queries and keys that see each other, in all heads."""
  count = 0
  for start, end in ((0, length // 3), (length // 3, length)):
    t = np.arange(end - start)
    seen = t + 1 if window is None else np.minimum(t + 1, window) + np.minimum(np.maximum(t + 1 - window, 0), PREFIX)
    count += int(seen.sum())
  return HEADS * count


def seconds(run, *arguments) -> float:
  start = time.perf_counter()
  jax.block_until_ready(run(*arguments))
  return time.perf_counter() - start


def measure(implementation: str, length: int, rounds: int) -> dict:
  q, k, v = arrays(length, jnp.bfloat16)
  square = jax.random.normal(jax.random.key(3), (8192, 8192), jnp.bfloat16)
  forward = attention(implementation, WINDOW, length)
  runs = {
    "product": (jax.jit(lambda x: x @ x), (square,), 2 * 8192**3),
    "forward": (jax.jit(forward), (q, k, v), 4 * WIDTH * pairs(WINDOW, length)),
    "forward and backward": (
      jax.jit(jax.grad(lambda *x: forward(*x).astype(jnp.float32).sum(), (0, 1, 2))), (q, k, v),
      14 * WIDTH * pairs(WINDOW, length),
    ),
  }  # fmt: skip
  rates: dict[str, list[float]] = {name: [] for name in runs}
  for round in range(rounds + 1):
    for name, (run, arguments, operations) in runs.items():
      rate = operations / seconds(run, *arguments)
      if round:  # the first one compiles
        rates[name].append(rate)
  out = {"product, Tflop/s": statistics.median(rates["product"]) / 1e12}
  for name in ("forward", "forward and backward"):
    share = [a / b for a, b in zip(rates[name], rates["product"])]
    out[f"{name}, of the product's rate"] = [statistics.median(share), min(share), max(share)]
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--implementation", default="gpu", help="gpu (default), or xla")
  parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
  parser.add_argument("--rounds", type=int, default=7)
  options = parser.parse_args()
  print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
  for window in (WINDOW, 100, None):
    off = error(options.implementation, window)
    print(f"window {window}: error {off:.2e} of the largest value", flush=True)
    if not off < 1e-2:
      sys.exit(1)
  for length in options.lengths:
    print(length, json.dumps(measure(options.implementation, length, options.rounds)), flush=True)


if __name__ == "__main__":
  main()
