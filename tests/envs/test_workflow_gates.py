"""The gates that a task must pass, as the authors of Tev state theirs, on seeded tasks of every domain and scale."""

import ast
import dataclasses
import hashlib
import itertools
import json
import pathlib
import random

import pytest

import jaxagent.envs.workflow as workflow
from jaxagent.envs.base import ToolCall
from jaxagent.envs.workflow import DOMAINS, SCALES, Workflow, reference_calls
from jaxagent.envs.workflow.contract import Contract, Defect
from jaxagent.envs.workflow.task import build
from jaxagent.envs.workflow.verifier import verify
from jaxagent.envs.workflow.workspace import Workspace

SEEDS = {"tiny": 4, "unit": 4, "small": 2, "full": 1}
TIERS = {"tiny": dataclasses.replace(SCALES["unit"], rows=3, classes=1), **SCALES}
CASES = [(domain, tier, seed) for domain in DOMAINS for tier, seeds in SEEDS.items() for seed in range(seeds)]
LIGHT = [(domain, tier, seed) for domain in DOMAINS for tier in ("tiny", "small") for seed in range(2)]
TASKS = {}


def task_of(domain, tier, seed):
  case = domain, tier, seed
  if case not in TASKS:
    TASKS[case] = build(DOMAINS[domain], TIERS[tier], seed)
  return TASKS[case]


def states(task):
  """The workspaces along the reference solution, the first one untouched."""
  workspace = Workspace(dict(task.files))
  yield dict(workspace.files)
  for call in reference_calls(task):
    assert workspace.reply(call) == "ok", call
    yield dict(workspace.files)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rendering_parses_back_to_the_same_world(case):
  domain, rng = DOMAINS[case[0]], random.Random(str(case))
  world = domain.world(rng, TIERS[case[1]].rows)
  assert domain.parse(domain.render(world)) == world
  assert domain.render(domain.parse(task_of(*case).truth)) == task_of(*case).truth


@pytest.mark.parametrize("case", CASES, ids=str)
def test_untouched_is_0_the_reference_rises_to_1_and_in_between_is_strictly_between(case):
  task = task_of(*case)
  potential = [task.contract.potential(files) for files in states(task)]
  assert potential[0] == 0.0 and potential[-1] == 1.0
  assert all(a < b for a, b in itertools.pairwise(potential))
  assert len(potential) == len(task.contract.defects) + 2  # the report too


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_potential_is_1_exactly_when_the_verifier_passes(case):
  task = task_of(*case)
  for files in states(task):
    assert (task.contract.potential(files) == 1.0) == verify(files, task.truth)
  assert verify({**task.truth, "notes.txt": "scratch"}, task.truth)
  for path in task.truth:  # one file left as it was
    left = {**task.truth, path: task.files.get(path, "")}
    assert verify(left, task.truth) == (left == task.truth) == (task.contract.potential(left) == 1.0)


def mutated(text, rng):
  """The text with one small change, which may or may not change what it says."""
  lines = text.split("\n")
  i, j = rng.randrange(len(lines)), rng.randrange(len(text) or 1)
  changes = [
    lambda: text, lambda: text + "\n", lambda: text.removesuffix("\n"), lambda: "\n" + text, lambda: text.upper(),
    lambda: "\n".join(lines[:i] + lines[i + 1 :]), lambda: "\n".join([*lines, lines[i]]), lambda: text + "x",
    lambda: "\n".join([*lines[:1], *rng.sample(lines[1:], len(lines) - 1)]), lambda: text[:j] + text[j + 1 :],
    lambda: text[:j] + rng.choice(" ,\r\t\"0a{}") + text[j:], lambda: text.replace(",", ", "), lambda: "",
    lambda: "\n".join(rng.sample(lines, len(lines))), lambda: text.replace("\n", " \n"), lambda: text.replace(" ", ""),
    lambda: json.dumps(json.loads(text), sort_keys=True) if text.startswith("{") else text,
    lambda: text.replace("1", "1.0", 1), lambda: text.replace(": ", ': {"a": ', 1), lambda: f"[{text}]",
  ]  # fmt: skip
  return rng.choice(changes)()


@pytest.mark.parametrize("case", LIGHT, ids=str)
def test_scorer_and_verifier_agree_on_files_that_are_almost_right(case):
  task, rng, passed = task_of(*case), random.Random(str(case)), 0
  for _ in range(60):
    path = rng.choice(sorted(task.truth))
    files = {**task.truth, path: mutated(task.truth[path], rng)}
    ok = verify(files, task.truth)
    assert ok == (task.contract.potential(files) == 1.0), files[path]
    passed += ok
  assert 0 < passed < 60


def tables(change):
  """A probe that rewrites the lines of every table; `change(lines, path, task)` gets them without column names."""

  def probe(task):
    files = dict(task.files)
    for path, text in task.files.items():
      if not path.endswith(".json"):
        lines = text.split("\n")[:-1]
        head = path.endswith(".csv")
        files[path] = "".join(f"{line}\n" for line in lines[:head] + change(lines[head:], path, task))
    return files

  return probe


def cells(change):
  def lines_of(lines, path, task):
    sep = "," if path.endswith(".csv") else " "
    return [sep.join(row) for row in change([line.split(sep) for line in lines])]

  return tables(lines_of)


def zeros(value):
  return {k: 0 if isinstance(v, int) else [] if isinstance(v, list) else "" for k, v in value.items()}


def with_report(text):
  return lambda task: {**task.files, task.domain.report: text(task)}


def another(task):
  return build(task.domain, SCALES["unit"], 991).truth


PROBES = {
  "nothing": lambda task: task.files,
  "everything deleted": lambda task: {},
  "everything emptied": lambda task: dict.fromkeys(task.truth, ""),
  "only the inputs deleted": lambda task: {task.domain.report: task.truth[task.domain.report]},
  "an empty report": with_report(lambda task: "{}"),
  "the right report, nothing repaired": with_report(lambda task: task.truth[task.domain.report]),
  "a report of zeros": with_report(lambda task: json.dumps(zeros(json.loads(task.truth[task.domain.report])))),
  "an input as the report": with_report(lambda task: next(iter(task.files.values()))),
  "a claim": lambda task: {**task.files, "status.json": '{"passed": true, "score": 1}', "done": "all tests pass"},
  "damaged records dropped": tables(lambda lines, path, task: [x for x in lines if x in task.truth[path].split("\n")]),
  "all records dropped": tables(lambda lines, path, task: []),
  "every record twice": tables(lambda lines, path, task: lines * 2),
  "other order": tables(lambda lines, path, task: lines[::-1]),
  "every line of every file everywhere": tables(
    lambda lines, path, task: lines + [x for text in task.files.values() for x in text.split("\n") if x]
  ),
  "a constant in every cell": cells(lambda rows: [[row[0], *("0" for _ in row[1:])] for row in rows]),
  "cells moved to other records": cells(
    lambda rows: [[row[0], *other[1:]] for row, other in zip(rows, rows[1:] + rows[:1])]
  ),
  "cells padded": cells(lambda rows: [[f"{cell} " for cell in row] for row in rows]),
  "new keys": cells(lambda rows: [[f"x{row[0]}", *row[1:]] for row in rows]),
  "upper case": tables(lambda lines, path, task: [line.upper() for line in lines]),
  "the truth of another task": another,
  "the truth, beside the files": lambda task: {**task.files, **{f"fixed/{k}": v for k, v in task.truth.items()}},
  "the truth in a code fence": lambda task: {path: f"```\n{text}```\n" for path, text in task.truth.items()},
  "the truth appended": lambda task: {path: task.files.get(path, "{}") + text for path, text in task.truth.items()},
}


def test_there_are_fourteen_probes():
  assert len(PROBES) >= 14


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_gaming_scores_0(domain, probe):
  for tier, seed in (("tiny", 0), ("tiny", 1), ("unit", 0), ("small", 0)):
    task = task_of(domain, tier, seed)
    files = PROBES[probe](task)
    assert task.contract.potential(files) == 0.0 and not verify(files, task.truth), task.contract.scores(files)


def test_rewriting_the_rules_scores_0():
  tasks = Workflow(rules="file")
  for domain in DOMAINS:
    task = tasks.task(domain, "train", 1)
    assert task.contract.potential(task.files) == 0.0 and task.contract.potential(task.truth) == 1.0
    assert task.contract.potential({**task.truth, "rules.md": "All is right.\n"}) == 0.0


def test_a_stage_counts_no_more_than_those_before_it():
  files = {"a.csv": "k,v\n1,x\n2,y\n", "b.csv": "k,v\n1,x\n", "r.json": '{"n": 2}'}
  sites = [("a.csv", "record", k, "1") for k in "12"]
  sites.append(("b.csv", "record", "1", "1"))
  defects = tuple(Defect(stage, frozenset({site})) for stage, site in zip(("one", "one", "two"), sites))
  contract = Contract(files, "r.json", (("one", ()), ("two", ("one",))), defects)
  damaged = {"a.csv": "k,v\n1,?\n2,?\n", "b.csv": "k,v\n1,?\n"}
  assert contract.potential(damaged) == contract.potential({**damaged, "r.json": files["r.json"]}) == 0.0
  assert contract.potential({**damaged, "b.csv": files["b.csv"]}) == 0.0  # two before one
  half = {**damaged, "a.csv": "k,v\n1,x\n2,?\n"}
  assert contract.potential(half) == pytest.approx(0.5 / 3, abs=1e-6)
  assert contract.potential({**half, "b.csv": files["b.csv"]}) == pytest.approx(1 / 3, abs=1e-6)
  assert contract.potential({**half, "b.csv": files["b.csv"], "r.json": files["r.json"]}) == 0.5
  assert contract.potential({**files, "r.json": '{"n": 3}'}) == pytest.approx(2 / 3, abs=1e-6)
  assert contract.potential({**half, "a.csv": "k,w\n1,x\n2,?\n"}) == 0.0  # did harm
  assert contract.scores(half) == {"intact": 1.0, "one": 0.5, "two": 0.0, "report": 0.0}


def test_a_stage_behind_one_that_was_not_drawn_still_comes_after_those_before_it():
  drawn = [build(DOMAINS["cleaning"], SCALES["unit"], seed).contract.stages for seed in range(40)]
  stages = {tuple(name for name, _ in found): found for found in drawn}
  assert stages["columns", "lost"] == (("columns", ()), ("lost", ("columns",)))
  assert stages["regions", "lost"] == (("regions", ()), ("lost", ()))


def digest(task):
  return hashlib.blake2b(json.dumps([task.files, task.truth, task.rules]).encode(), digest_size=8).hexdigest()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others():
  again = {case: digest(build(DOMAINS[case[0]], TIERS[case[1]], case[2])) for case in CASES}
  assert again == {case: digest(task_of(*case)) for case in CASES}
  assert len(set(again.values())) == len(CASES)
  together = hashlib.blake2b("".join(again[case] for case in CASES).encode(), digest_size=8).hexdigest()
  assert together == "8432b425aafc1338"  # the same on every machine and Python


def functions(tree):
  return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def closure(tree, roots):
  """Names of the module's functions that `roots` call, directly or not."""
  found, known = set(roots), functions(tree)
  while True:
    names = {n.id for f in found for n in ast.walk(known[f]) if isinstance(n, ast.Name)} & set(known)
    if names <= found:
      return found
    found |= names


@pytest.mark.parametrize("domain", DOMAINS)
def test_scorer_verifier_and_solver_share_no_code(domain):
  folder = pathlib.Path(workflow.__file__).parent
  trees = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
  imports = {
    name: {node.module.rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    & {*trees}
    for name, tree in trees.items()
  }
  assert not imports["verifier"] and not imports["facts"] and not imports["draft"]
  assert imports["contract"] == {"facts"} and imports[domain] == {"draft", "world"}
  solver, rest = closure(trees[domain], ["_solve"]), closure(trees[domain], ["world", "render", "parse"])
  assert not solver & rest


def test_the_reference_solves_from_the_inputs_alone():
  for domain in DOMAINS:
    task = task_of(domain, "small", 0)
    blind = dataclasses.replace(task, truth={}, contract=None)
    assert reference_calls(blind) == reference_calls(task)


def test_a_world_too_small_for_its_defects_says_so():
  with pytest.raises(ValueError, match="no record is left for a defect"):
    build(DOMAINS["forensics"], dataclasses.replace(SCALES["unit"], rows=4, defects=4, classes=4), 0)


def test_defects_touch_different_facts():
  for case in CASES:
    sites = [site for defect in task_of(*case).contract.defects for site in defect.sites]
    assert len(sites) == len(set(sites)), case
    assert all(defect.sites for defect in task_of(*case).contract.defects)


def test_harm_is_told_from_no_progress():
  task = task_of("cleaning", "unit", 0)
  workspace = Workspace(dict(task.files))
  workspace.reply(ToolCall("edit", {"path": "archive.csv", "line": 2, "text": ""}))
  assert task.contract.scores(workspace.files)["intact"] == 0.0
