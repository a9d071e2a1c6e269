"""Schedule and inventory: stock movements with wrong signs and units, stale stock, and visits that collide."""

import random
from dataclasses import dataclass

from jaxagent.envs.workflow.draft import Draft, pieces
from jaxagent.envs.workflow.world import Corruption, Domain, Files, change_cell, keys, record, rows, table

LOW = 60  # an item with less is reordered


@dataclass(frozen=True)
class World:
  items: tuple[tuple[str, int], ...]  # item, opening stock
  moves: tuple[tuple[str, str, int], ...]  # id, item, change (a multiple of 12, not 0)
  first: int  # day of the first visit
  every: int  # days
  visits: int


def world(rng: random.Random, count: int) -> World:
  few = max(2, (count + 2) // 3)
  items = tuple((f"p{n}", rng.randint(20, 90)) for n in sorted(rng.sample(range(1, 10 * few), few)))
  moves = tuple(
    (f"m{n}", rng.choice(items)[0], 12 * rng.choice((-1, 1)) * rng.randint(1, 4)) for n in range(1, count + 1)
  )
  return World(items, moves, rng.randint(1, 9), rng.randint(2, 9), few)


def render(w: World) -> Files:
  days = [w.first + w.every * i for i in range(w.visits + 1)]
  closing = {item: opening + sum(n for _, of, n in w.moves if of == item) for item, opening in w.items}
  plan = {"reorder": sorted(item for item, n in closing.items() if n < LOW), "next_visit": days[-1]}
  kind = {True: "in", False: "out"}
  return {
    "items.csv": table("items.csv", "item,opening", w.items),
    "moves.csv": table("moves.csv", "move,item,kind,change", ((m, item, kind[n > 0], n) for m, item, n in w.moves)),
    "stock.csv": table("stock.csv", "item,closing", closing.items()),
    "calendar.json": record({"first": w.first, "every": w.every}),
    "visits.csv": table("visits.csv", "visit,day", ((f"v{i}", day) for i, day in enumerate(days[:-1], 1))),
    "plan.json": record({**plan, "total": sum(closing.values())}),
  }


def parse(files: Files) -> World:
  days = [int(day) for _, day in rows("visits.csv", files["visits.csv"])]
  return World(
    tuple((item, int(n)) for item, n in rows("items.csv", files["items.csv"])),
    tuple((move, item, int(n)) for move, item, _, n in rows("moves.csv", files["moves.csv"])),
    days[0],
    days[1] - days[0],
    len(days),
  )


def _other_number(cell: str, rng: random.Random) -> str:
  return str(int(cell) + rng.choice((-24, -12, 7, 12, 24)))


def _solve(draft: Draft) -> None:
  calendar = draft.record("calendar.json")
  draft.map_cells("moves.csv", lambda c: [*c[:3], _signed(c[2], c[3])])
  draft.map_cells("moves.csv", lambda c: [*c[:3], pieces(c[3])])
  stock = {item: int(opening) for item, opening in draft.records("items.csv")}
  for _, item, _, change in draft.records("moves.csv"):
    stock[item] += int(change)
  draft.map_cells("stock.csv", lambda c: [c[0], str(stock[c[0]])])
  day = lambda visit: calendar["first"] + calendar["every"] * (int(visit[1:]) - 1)  # noqa: E731
  draft.map_cells("visits.csv", lambda c: [c[0], str(day(c[0]))])
  low = sorted(item for item, n in stock.items() if n < LOW)
  following = day(f"v{len(draft.records('visits.csv')) + 1}")
  draft.write("plan.json", {"reorder": low, "next_visit": following, "total": sum(stock.values())})


def _signed(kind: str, change: str) -> str:
  return change.lstrip("-") if kind == "in" else f"-{change.lstrip('-')}"


INVENTORY = Domain(
  name="inventory",
  summary="Repair the inventory. items.csv and calendar.json are right.",
  report="plan.json",
  report_rule=(
    f'Then write plan.json: {{"reorder": sorted items whose closing is below {LOW}, "next_visit": day of the visit'
    ' after the last, "total": sum of closing}.'
  ),
  corruptions=(
    Corruption(
      "signs", "moves.csv", "In moves.csv a change is positive for kind in, negative for out.", keys("moves.csv"),
      change_cell("moves.csv", 3, lambda cell, rng: str(-int(cell))),
    ),
    Corruption(
      "units", "moves.csv", "In moves.csv a change counts pieces; -2dz is -2 dozen.", keys("moves.csv"),
      change_cell("moves.csv", 3, lambda cell, rng: f"{int(cell) // 12}dz"),
    ),
    Corruption(
      "stock", "stock.csv", "In stock.csv closing is the opening and all changes of the item.", keys("stock.csv"),
      change_cell("stock.csv", 1, _other_number), ("signs", "units"),
    ),
    Corruption(
      "visits", "visits.csv", "In visits.csv v1 is on day `first` of calendar.json, each next one `every` days later.",
      keys("visits.csv"), change_cell("visits.csv", 1, lambda cell, rng: str(int(cell) + rng.choice((-1, 1)))),
    ),
  ),
  world=world,
  render=render,
  parse=parse,
  solve=_solve,
)  # fmt: skip
