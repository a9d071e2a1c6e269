"""Data cleaning: a table of orders whose columns, spellings and units have drifted, with repeated and lost rows."""

import random
from dataclasses import dataclass

from jaxagent.envs.workflow.draft import Draft, pieces
from jaxagent.envs.workflow.world import (
  Corruption,
  Domain,
  Files,
  change_cell,
  drop_row,
  keys,
  record,
  repeat_row,
  rows,
  table,
)

REGIONS = ("north", "south", "east", "west")
ITEMS = ("bolt", "cable", "lamp", "motor", "panel", "valve")
COLUMNS = "id,item,region,quantity"
DRIFTED = {1: "product", 2: "area", 3: "qty"}  # column -> the name it drifts to


@dataclass(frozen=True)
class World:
  orders: tuple[tuple[str, str, str, int], ...]  # id, item, region, quantity (a multiple of 12)
  archived: tuple[str, ...]  # ids


def world(rng: random.Random, count: int) -> World:
  ids = [f"r{n}" for n in sorted(rng.sample(range(1, 10 * count), count))]
  orders = tuple((i, rng.choice(ITEMS), rng.choice(REGIONS), 12 * rng.randint(1, 9)) for i in ids)
  return World(orders, tuple(sorted(rng.sample(ids, (count + 1) // 2))))


def render(w: World) -> Files:
  totals = {region: sum(order[3] for order in w.orders if order[2] == region) for region in REGIONS}
  return {
    "orders.csv": table("orders.csv", COLUMNS, w.orders),
    "archive.csv": table("archive.csv", COLUMNS, (order for order in w.orders if order[0] in w.archived)),
    "report.json": record({"orders": len(w.orders), **totals}),
  }


def parse(files: Files) -> World:
  orders = tuple((i, item, region, int(n)) for i, item, region, n in rows("orders.csv", files["orders.csv"]))
  return World(orders, tuple(sorted(keys("archive.csv")(files))))


def _rename(files: Files, key: str, rng: random.Random) -> Files:
  column = rng.choice(sorted(DRIFTED))
  return change_cell("orders.csv", column, lambda cell, rng: DRIFTED[column])(files, key, rng)


def _solve(draft: Draft) -> None:
  draft.name_columns("orders.csv", COLUMNS)
  draft.map_cells("orders.csv", lambda c: [*c[:2], _region(c[2]), c[3]])
  draft.map_cells("orders.csv", lambda c: [*c[:3], pieces(c[3])])
  draft.drop_repeats("orders.csv")
  draft.restore("orders.csv", "archive.csv")
  orders = draft.records("orders.csv")
  totals = {region: sum(int(c[3]) for c in orders if c[2] == region) for region in REGIONS}
  draft.write("report.json", {"orders": len(orders), **totals})


def _region(cell: str) -> str:
  return next(region for region in REGIONS if region[0] == cell[0].lower())


CLEANING = Domain(
  name="cleaning",
  summary="Clean orders.csv. archive.csv is right, but holds only some orders.",
  report="report.json",
  report_rule='Then write report.json: {"orders": number, "north": sum of quantity, and so for south, east, west}.',
  corruptions=(
    Corruption(
      "columns", "orders.csv", f"Its columns are {COLUMNS}.", lambda files: ["id"], _rename,
    ),
    Corruption(
      "regions", "orders.csv", "A region is north, south, east or west; drifted spellings kept its first letter.",
      keys("orders.csv"),
      change_cell("orders.csv", 2, lambda cell, rng: rng.choice((cell[0].upper(), cell.upper(), f"{cell[0]}-region"))),
      ("columns",),
    ),
    Corruption(
      "units", "orders.csv", "A quantity counts pieces; 3dz is 3 dozen.", keys("orders.csv"),
      change_cell("orders.csv", 3, lambda cell, rng: f"{int(cell) // 12}dz"), ("columns",),
    ),
    Corruption(
      "repeats", "orders.csv", "An order is listed once.", keys("orders.csv"), repeat_row("orders.csv"), ("columns",),
    ),
    Corruption(
      "lost", "orders.csv", "Orders of archive.csv that are not in orders.csv were lost: add them.",
      keys("archive.csv"), drop_row("orders.csv"), ("repeats",),
    ),
  ),
  world=world,
  render=render,
  parse=parse,
  solve=_solve,
)  # fmt: skip
