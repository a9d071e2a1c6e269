"""Imports point one way, and pure functions pull in nothing heavy."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "jaxagent"
LAYERS = [
  {"types", "checks"},
  {"advantages", "rewards", "losses", "metrics", "optim", "models", "envs", "scheduling"},
  {"methods", "sampling", "judges"},
  {"rollout"},
  {"training"},
  {"evaluation", "report", "serve", "plan"},
  {"run"},
  {"cli"},
]
ANYWHERE = {"config"}  # read by training and above only, see below
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path: pathlib.Path) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
  return {name.split(".")[1] for name in names if name.startswith("jaxagent.")}


def modules():
  return [p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0].removesuffix(".py") in LEVEL]


def test_every_module_has_a_level():
  known = {*LEVEL, *ANYWHERE, "__init__"}
  assert {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in ROOT.rglob("*.py")} <= known


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
  level = LEVEL[path.relative_to(ROOT).parts[0].removesuffix(".py")]
  above = {name for name in imported(path) if LEVEL.get(name, 0) > level}
  assert not above, f"{path} imports {above}"


@pytest.mark.parametrize("package", ["advantages", "rewards", "losses", "optim"])
def test_configuration_stays_out_of_the_mathematics(package):
  assert not any("config" in imported(p) for p in (ROOT / package).glob("*.py"))


@pytest.mark.parametrize("package", ["advantages", "rewards", "losses", "optim"])
def test_mathematics_imports_no_model_engine_or_tracker(package):
  code = f"import sys, jaxagent.{package}; print([m for m in sys.modules if m.split('.')[0] in {{'flax', 'orbax', 'tensorboardX', 'tokenizers'}} or m.startswith(('jaxagent.models', 'jaxagent.sampling', 'jaxagent.report'))])"  # noqa: E501
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"


def test_kernels_are_independent():
  for path in (ROOT.parent / "pallas_kernels").rglob("*.py"):
    assert not imported(path)


def test_every_test_file_has_a_name_of_its_own():
  """pytest imports them all into one namespace."""
  names = [path.name for path in (ROOT.parent / "tests").rglob("test_*.py")]
  assert sorted(set(names)) == sorted(names)
