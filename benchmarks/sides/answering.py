"""How a side of benchmarks/sampler.py is run: `PYTHON side.py WORK.json`, then a line of JSON for each line it reads.

A side that is ready says {}. A line that is read names one of its ways and has it do the work once; the answer says how
long it took. Nothing here needs more than the standard library, for a side runs in the interpreter of what it measures.
"""

import json
import os
import sys
import time
from collections.abc import Callable


def work() -> dict:
  """What is to be sampled.

  `model` (of `DecoderConfig`, or {"path": ...}), `dtype`, `prompts` (ids), `new` (tokens wanted of each sample of each
  prompt), `n` samples of each, `slots` rows at most at a time, `warm`: whether to run once before anything is timed.
  """
  with open(sys.argv[1]) as file:
    return json.load(file)


def batches(work: dict) -> list[tuple[list[list[int]], int]]:
  """Static batches of `slots` samples in their order, each with the tokens to sample: those of its longest."""
  rows = [(prompt, new) for prompt, new in zip(work["prompts"], work["new"]) for _ in range(work["n"])]
  parts = [rows[at : at + work["slots"]] for at in range(0, len(rows), work["slots"])]
  return [([prompt for prompt, _ in part], max(new for _, new in part)) for part in parts]


def answer(ways: dict[str, Callable[[], object]], **facts) -> None:
  """Says that the side is ready, and answers until the input ends. What the libraries print goes to stderr."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  print("{}", file=answers, flush=True)
  for line in sys.stdin:
    start = time.perf_counter()
    ways[line.strip()]()
    print(json.dumps({"seconds": time.perf_counter() - start, **facts}), file=answers, flush=True)
