"""docs/methods.md says of every public function what the code says, docs/systems.md names what there is."""

import asyncio
import importlib
import inspect
import re
from pathlib import Path

import pytest
from test_recipes import TABLE as RECIPES

from jaxagent import methods

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
PACKAGES = ("methods", "advantages", "rewards", "losses", "metrics", "scheduling")
TASKS = {"spo_plus_plus": 4, "spo_muon": 4}


def rows(package):
  """{name: {header: cell}} of the tables in the section of one package."""
  section = re.split(r"^## jaxagent\.", TEXT, flags=re.MULTILINE)[1 + PACKAGES.index(package)]
  assert section.startswith(package)
  found, head = {}, []
  for line in section.splitlines():
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    if not cells or set(cells[0]) == {"-"}:
      head = head if cells else []
    elif not head:
      head = cells
    else:
      assert len(cells) == len(head), f"a row of {len(cells)} cells under {len(head)} headers: {line}"
      name = cells[0].strip("`")
      assert name not in found, f"{name} stands twice in docs/methods.md"
      found[name] = dict(zip(head, cells))
  return found


def quoted(cell):
  return re.findall(r"`([^`]+)`", cell)


def constants(function):
  """Hyper-parameters of a function: keyword-only ones, but for columns that may be left out."""
  for name, p in inspect.signature(function).parameters.items():
    if p.kind is p.KEYWORD_ONLY and p.default is not None:
      yield name if p.default is p.empty else f"{name}={getattr(p.default, '__name__', p.default)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_tables_and_no_other(package):
  assert set(rows(package)) == set(importlib.import_module(f"jaxagent.{package}").__all__)


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_constants_are_those_of_the_code(package):
  module = importlib.import_module(f"jaxagent.{package}")
  for name, row in rows(package).items():
    if inspect.isfunction(getattr(module, name)):
      assert quoted(row["defaults"]) == list(constants(getattr(module, name))), name


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_every_function_has_a_formula_and_a_source(package):
  for name, row in rows(package).items():
    assert len(row["formula"]) > 3 and len(row["source"]) > 3, name


@pytest.mark.parametrize("name", methods.PRESETS)
def test_presets_are_as_in_the_code(name):
  row, preset = rows("methods")[name], methods.PRESETS[name]
  made = preset
  if not isinstance(preset, methods.Method):
    made = preset(**({"tasks": TASKS[name]} if name in TASKS else {}))
    numbers = [(k, p.default) for k, p in inspect.signature(preset).parameters.items()]
    numbers = [f"{k}={x}" for k, x in numbers if isinstance(x, int | float) or isinstance(x, tuple)]
    assert [x for x in quoted(row["defaults"]) if "=" in x and x.split("=")[1][:1] in "-(0123456789"] == numbers
  assert set(quoted(row["reads"])) == {*made.columns, *(made.needs - {"bootstrap"})}
  assert set(quoted(row["differs from"])) <= set(methods.PRESETS)


def systems():
  lines = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8").splitlines()
  head, _, *body = ([c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("|"))
  return [dict(zip(head, cells, strict=True)) for cells in body]


def test_every_system_has_a_recipe_and_names_what_exists():
  recipes = {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")}
  assert sorted(Path(quoted(row["config"])[0]).stem for row in systems()) == sorted(recipes) and len(recipes) == 17
  for row in systems():
    for path in (*quoted(row["config"]), *quoted(row["notebook"])):
      assert (ROOT / path).is_file(), path
    text = (ROOT / quoted(row["config"])[0]).read_text(encoding="utf-8")
    for name in quoted(row["preset"]):
      assert name in methods.PRESETS and re.search(rf"^  name: (.*[:.])?{name}\b", text, re.MULTILINE), name
    assert re.search(r"arXiv \d{4}\.\d{5}", row["paper"]) or "id not known" in row["paper"]


def test_the_metrics_of_the_systems_are_those_that_the_recipes_are_tested_by():
  said = {Path(quoted(row["config"])[0]).stem: row["metric"] for row in systems()}
  assert said == {name: f"`{r.metric}` {'rises' if r.sign > 0 else 'falls'}" for name, r in RECIPES.items()}


def test_the_snippets_of_the_engine_run(capsys):
  text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
  names = {}
  for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
    exec(block, names)
  groups = names["groups"]
  assert [len(group) for group in groups] == [4, 4] and len(groups[0][2].ids) == len(groups[0][2].logp_rollout)
  turn, last = asyncio.run(names["episode"](names["engine"]))
  assert len(turn.ids) <= 8 and len(last.ids) == 8 and capsys.readouterr().out
