"""Pipeline repair: lanes of arithmetic steps over shards, with scrambled shards, wrong wiring and stale caches."""

import random
from dataclasses import dataclass

from jaxagent.envs.workflow.draft import Draft
from jaxagent.envs.workflow.world import Corruption, Domain, Files, change_cell, keys, record, rows, table

MODULUS = 1000
LANE = 4  # steps
SPELLINGS = {"add": ("plus", "sum", "ADD"), "mul": ("times", "prod", "MUL")}


@dataclass(frozen=True)
class World:
  shards: tuple[tuple[str, int, int], ...]  # name, first row, number of rows; in the order of their rows
  steps: tuple[tuple[str, str, int, int], ...]  # name (lane and place in it), operation, amount, version


def world(rng: random.Random, count: int) -> World:
  names = rng.sample(range(10, 100 + count), (count + 1) // 2 + 1)
  shards, start = [], 0
  for name in names:
    size = rng.randint(2, 40)
    shards.append((f"s{name}", start, size))
    start += size
  places = [(i // LANE, i % LANE + 1) for i in range(count)]
  steps = tuple(
    (f"{_lane(lane)}{place}", rng.choice(("add", "mul")), rng.randint(2, 99), rng.randint(2, 30))
    for lane, place in places
  )
  return World(tuple(shards), steps)


def render(w: World) -> Files:
  indexed = sorted((name, first, size, i) for i, (name, first, size) in enumerate(w.shards, 1))
  source = sum(i * size for _, _, size, i in indexed) % MODULUS
  values = {"source": source}
  for name, operation, amount, _ in w.steps:
    before = values[_reads(name)]
    values[name] = (before + amount if operation == "add" else before * amount) % MODULUS
  return {
    "shards.csv": table("shards.csv", "shard,start,rows,index", indexed),
    "steps.csv": table("steps.csv", "step,reads,op,amount,version", ((n, _reads(n), *rest) for n, *rest in w.steps)),
    "cache.csv": table("cache.csv", "step,version", ((n, v) for n, _, _, v in w.steps)),
    "result.json": record(values),
  }


def parse(files: Files) -> World:
  shards = sorted(rows("shards.csv", files["shards.csv"]), key=lambda row: int(row[3]))
  return World(
    tuple((name, int(first), int(size)) for name, first, size, _ in shards),
    tuple((n, op, int(amount), int(v)) for n, _, op, amount, v in rows("steps.csv", files["steps.csv"])),
  )


def _lane(number: int) -> str:
  letter = "abcdefghijklmnopqrstuvwxyz"
  return letter[number] if number < 26 else _lane(number // 26 - 1) + letter[number % 26]


def _reads(step: str) -> str:
  lane, place = step.rstrip("0123456789"), int(step.lstrip("abcdefghijklmnopqrstuvwxyz"))
  return "source" if place == 1 else f"{lane}{place - 1}"


def _other_input(cell: str, rng: random.Random) -> str:
  return rng.choice([name for name in ("source", "a1", "a2", "b1", "b2") if name != cell])


def _other_number(cell: str, rng: random.Random) -> str:
  return str(int(cell) + rng.choice((-1, 1, 2)))


def _solve(draft: Draft) -> None:
  starts = sorted(int(c[1]) for c in draft.records("shards.csv"))
  draft.map_cells("shards.csv", lambda c: [*c[:3], str(1 + starts.index(int(c[1])))])
  draft.map_cells("steps.csv", lambda c: [c[0], _input(c[0]), *c[2:]])
  drifted = {spelling: op for op, others in SPELLINGS.items() for spelling in others}
  draft.map_cells("steps.csv", lambda c: [*c[:2], drifted.get(c[2], c[2]), *c[3:]])
  version = {c[0]: c[4] for c in draft.records("steps.csv")}
  draft.map_cells("cache.csv", lambda c: [c[0], version[c[0]]])
  values = {"source": sum(int(c[2]) * int(c[3]) for c in draft.records("shards.csv")) % MODULUS}
  for step, reads, operation, amount, _ in draft.records("steps.csv"):
    value = values[reads]
    values[step] = (value + int(amount) if operation == "add" else value * int(amount)) % MODULUS
  draft.write("result.json", values)


def _input(step: str) -> str:
  letters = step.rstrip("0123456789")
  place = int(step[len(letters) :])
  return f"{letters}{place - 1}" if place > 1 else "source"


PIPELINE = Domain(
  name="pipeline",
  summary="Repair the pipeline of steps.csv, whose source is the shards of shards.csv.",
  report="result.json",
  report_rule=(
    f'Then write result.json: {{"source": sum of index * rows, "a1": ...}}, the value of each step (add or multiply'
    f" what it reads by its amount), all modulo {MODULUS}."
  ),
  corruptions=(
    Corruption(
      "shards", "shards.csv", "index numbers the shards from 1 in the order of start.", keys("shards.csv"),
      change_cell("shards.csv", 3, _other_number),
    ),
    Corruption(
      "wiring", "steps.csv", "A lane is a chain: a1 reads source, a2 reads a1, a3 reads a2; so in every lane.",
      keys("steps.csv"), change_cell("steps.csv", 1, _other_input),
    ),
    Corruption(
      "operations", "steps.csv", "op is add (also drifted to plus, sum) or mul (times, prod), in lower case.",
      keys("steps.csv"), change_cell("steps.csv", 2, lambda cell, rng: rng.choice(SPELLINGS[cell])), ("wiring",),
    ),
    Corruption(
      "cache", "cache.csv", "cache.csv holds each step's version; a lower one is stale.", keys("cache.csv"),
      change_cell("cache.csv", 1, lambda cell, rng: str(rng.randint(1, int(cell) - 1))), ("wiring", "operations"),
    ),
  ),
  world=world,
  render=render,
  parse=parse,
  solve=_solve,
)  # fmt: skip
