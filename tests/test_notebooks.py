"""Every notebook runs as it is, on the interpreter of the tests, and stays small enough to read."""

import ast
import json
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_CELLS, MAX_LINES, MAX_BYTES = 12, 30, 300_000


def execute(notebook, *, timeout: int = 120):
  """Runs the notebook's cells in a kernel of this interpreter, whatever kernels are installed; raises if one fails."""
  nbclient = pytest.importorskip("nbclient")
  pytest.importorskip("matplotlib")
  from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
  from jupyter_client.manager import AsyncKernelManager

  class ThisInterpreter(KernelSpecManager):
    def get_kernel_spec(self, kernel_name):
      argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
      return KernelSpec(argv=argv, display_name=kernel_name, language="python")

  manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter())
  client = nbclient.NotebookClient(notebook, km=manager, timeout=timeout, record_timing=False)
  return client.execute()


def code_cells(path):
  return ["".join(c["source"]) for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def outputs(path):
  return [o for c in json.loads(path.read_text("utf-8"))["cells"] for o in c.get("outputs", [])]


def definitions(path):
  """(name, lines) of every function and class."""
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  nodes = [node for source in code_cells(path) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
  return [(node.name, node.end_lineno - node.lineno + 1) for node in nodes]


def test_there_are_notebooks():
  names = {path.name for path in NOTEBOOKS}
  wanted = {"01_credit", "02_objectives", "03_muon", "04_prefix_sliding", "05_agents", "06_team"}
  assert {f"{name}.ipynb" for name in wanted} <= names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_asserts_a_number_and_shows_a_picture(path):
  assert len(json.loads(path.read_text("utf-8"))["cells"]) <= MAX_CELLS
  assert path.stat().st_size < MAX_BYTES
  assert [name for name, lines in definitions(path) if lines > MAX_LINES] == []
  nodes = [node for source in code_cells(path) for node in ast.walk(ast.parse(source))]
  assert any(isinstance(node, ast.Assert) for node in nodes)
  assert any("image/png" in output.get("data", {}) for output in outputs(path))
  assert not any(output["output_type"] == "error" for output in outputs(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
  nbformat = pytest.importorskip("nbformat")
  executed = execute(nbformat.read(path, as_version=4))
  figures = [o for cell in executed.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
  assert figures


@pytest.mark.slow
def test_a_failing_cell_fails_the_run():
  nbformat = pytest.importorskip("nbformat")
  nbclient = pytest.importorskip("nbclient")
  notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
  with pytest.raises(nbclient.exceptions.CellExecutionError):
    execute(notebook)
