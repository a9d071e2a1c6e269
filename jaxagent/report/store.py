"""The rollouts of a run, kept to be looked at and replayed.

A step is a Zarr 3 group `00000012/`: one compressed array for every column of `Rollouts`, those a method added under
`columns/`, and `rollouts.jsonl`, a line for every row: who wrote what, in words. Any Zarr reader opens it.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import tensorstore as ts
from etils import epath

from jaxagent.report.trackers import is_remote
from jaxagent.types import Rollouts, Trajectory

FORMAT_VERSION = 1
Decode = Callable[[list[int]], str]


def write(
  dir: epath.PathLike,
  step: int,
  rollouts: Rollouts,
  trajectories: Sequence[Trajectory],
  *,
  decode: Decode | None = None,
) -> epath.Path:
  """Keeps one batch, row n being `trajectories[n]` (rows past them are filler), and returns its folder.

  With `decode` (ids -> text) the texts are those of the tokens, span by span. A step that is there is replaced. On a
  local disk the folder appears whole or not at all; on remote storage its `zarr.json` is written last.
  """
  final = epath.Path(dir) / f"{step:08d}"
  folder = final if is_remote(final) else final.parent / f"{final.name}.tmp"
  folder.rmtree(missing_ok=True)
  folder.mkdir(parents=True)
  _write_arrays(folder, _columns(rollouts))
  records = [to_record(t, rollouts, row, decode=decode) for row, t in enumerate(trajectories)]
  (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  attributes = {"jaxagent": {"format_version": FORMAT_VERSION, "step": step}}
  group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
  (folder / "zarr.json").write_text(json.dumps(group))
  if folder != final:
    final.rmtree(missing_ok=True)
    folder.rename(final)
  return final


def read(dir: epath.PathLike, step: int) -> tuple[Rollouts, list[dict[str, Any]]]:
  """The batch of `step`, exactly as it was, in host arrays, and a record for every row that is not filler.

  Errors: ValueError for a step that is not there or cannot be read, with the steps that are there.
  """
  if step not in (stored := steps(dir)):
    raise ValueError(f"no rollouts of step {step} in {dir}; stored are {_ranges(stored) or 'none'}")
  folder = epath.Path(dir) / f"{step:08d}"
  try:
    version = json.loads((folder / "zarr.json").read_text())["attributes"]["jaxagent"]["format_version"]
    if version != FORMAT_VERSION:
      raise ValueError(f"format version {version}, this version of jaxagent reads {FORMAT_VERSION}")
    names = [path.name for path in folder.iterdir() if path.is_dir() and path.name != "columns"]
    extra = [path.name for path in (folder / "columns").iterdir()] if (folder / "columns").exists() else []
    arrays = _read_arrays(folder, [*names, *(f"columns/{name}" for name in extra)])
    columns = {unquote(name): arrays[f"columns/{name}"] for name in extra}
    rollouts = Rollouts(**{name: arrays[name] for name in names}, columns=columns)
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"rollouts of step {step} in {folder} cannot be read: {' '.join(str(error).split())}") from None
  return rollouts, records


def steps(dir: epath.PathLike) -> list[int]:
  """Steps that are stored, in order."""
  root = epath.Path(dir)
  found = [path for path in (root.iterdir() if root.exists() else ()) if re.fullmatch(r"\d{8,}", path.name)]
  return sorted(int(path.name) for path in found if (path / "zarr.json").exists())


def to_record(
  trajectory: Trajectory, rollouts: Rollouts | None = None, row: int | None = None, *, decode: Decode | None = None
) -> dict[str, Any]:
  """A trajectory in words, as JSON: what is kept of it beside the arrays, and what is shown.

  `spans`, with `decode`, are unbroken runs of tokens by one author: `{"turn", "tokens", "text"}`, turn -1 for what the
  policy read. With `rollouts` the reward that is trained on is added.
  """
  t = trajectory
  names = ("rollout", "task", "group", "agent", "env", "temperature", "status", "cause", "outcome", "turn_reward")
  record = {"row": row} | {name: _json(getattr(t, name)) for name in names}
  record |= {"turns": t.turns, "tokens": len(t.tokens), "actions": sum(t.action), "transcript": _json(t.transcript)}
  if rollouts is not None:
    record |= {"reward": float(rollouts.reward[row]), "valid": bool(rollouts.valid[row])}
  if t.columns:
    record["columns"] = _json(t.columns)
  if t.logp_sampled != t.logp_rollout:
    record["logp_sampled"] = _json(t.logp_sampled)
  if decode is not None:
    record["spans"] = spans(t, decode)
  return record


def spans(trajectory: Trajectory, decode: Decode) -> list[dict[str, Any]]:
  turn = np.asarray(trajectory.turn, np.int64)
  starts = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist()] if len(turn) else []
  ends = [*starts[1:], len(turn)]
  return [{"turn": int(turn[a]), "tokens": b - a, "text": decode(trajectory.tokens[a:b])} for a, b in zip(starts, ends)]


def _columns(rollouts: Rollouts) -> dict[str, np.ndarray]:
  own = {f.name: getattr(rollouts, f.name) for f in dataclasses.fields(Rollouts) if f.name != "columns"}
  added = {f"columns/{_file_name(name)}": column for name, column in rollouts.columns.items()}
  return {name: np.asarray(value) for name, value in (own | added).items() if value is not None}


def _file_name(column: str) -> str:
  return quote(column, safe="").replace(".", "%2E")


def _write_arrays(folder: epath.Path, arrays: dict[str, np.ndarray]) -> None:
  opened = {
    name: ts.open(_spec(folder / name) | {"metadata": _metadata(array)}, create=True) for name, array in arrays.items()
  }
  for written in [opened[name].result().write(array) for name, array in arrays.items()]:
    written.result()


def _read_arrays(folder: epath.Path, names: list[str]) -> dict[str, np.ndarray]:
  opened = {name: ts.open(_spec(folder / name)) for name in names}
  reads = {name: array.result().read() for name, array in opened.items()}
  return {name: read.result() for name, read in reads.items()}


def _spec(path: epath.Path) -> dict[str, Any]:
  where = f"{os.fspath(path)}/"
  return {"driver": "zarr3", "kvstore": where if is_remote(path) else {"driver": "file", "path": where}}


def _metadata(array: np.ndarray) -> dict[str, Any]:
  compression = {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"}
  return {
    "shape": array.shape,
    "data_type": array.dtype.name,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(n, 1) for n in array.shape]}},
    "codecs": [{"name": "blosc", "configuration": compression}],
  }


def _json(value: Any) -> Any:
  """What JSON can hold of a host value; NaN, infinity and objects of other kinds are kept as their text."""
  if isinstance(value, dict):
    return {str(key): _json(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_json(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return _json(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _ranges(numbers: list[int]) -> str:
  return f"{numbers[0]}..{numbers[-1]} ({len(numbers)} steps)" if len(numbers) > 3 else ", ".join(map(str, numbers))
