"""The quickstart over several seeds: held-out success before and after RL, and wall seconds, compile included.

    python benchmarks/quickstart.py --seeds 0 1 2 --json out.json

Each seed is a fresh process with an empty compilation cache. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="quickstart.yaml", help="a file in configs/")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  parser.add_argument("--json")
  args, overrides = parser.parse_known_args()
  results = [one(args.config, seed, overrides) for seed in args.seeds]
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(results, indent=1))


def one(config: str, seed: int, overrides: list[str]) -> dict[str, float]:
  with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / "run"
    command = [sys.executable, "-m", "jaxagent.cli", "train", str(CONFIGS / config)]
    command += ["--run.dir", str(run), f"--seed={seed}", "--tracking.show", "0", "--run.compilation_cache", "null"]
    start = time.perf_counter()
    subprocess.run([*command, *overrides], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=sys.stderr)
    seconds = time.perf_counter() - start
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  success = [record["eval/success"] for record in records if record["phase"] == "eval"]
  steps = [record["time/step"] for record in records if record["phase"] == "train"]
  result = {
    "seed": seed,
    "before": success[0],
    "after": success[-1],
    "gain": success[-1] - success[0],
    "seconds": seconds,
    "rl_seconds": sum(steps),
  }
  print(json.dumps(result), flush=True)
  return result


if __name__ == "__main__":
  main()
