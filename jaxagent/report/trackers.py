"""Where metrics records go: each is one flat mapping with `step`, `phase` (`sft`, `train` or `eval`) and numbers."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import tensorboardX
from etils import epath


class Writer(Protocol):
  def write(self, record: Mapping[str, Any]) -> None: ...

  def close(self) -> None: ...


class JsonlWriter:
  """One JSON object a line, on the disk when `write` returns.

  `after` is the step that a run goes on from: records of later steps are dropped, since they will be written again, and
  those of a warm start are kept. None begins the file anew. JSON has no NaN and no infinity: such a value is null, and
  `nan_or_inf` says which it was, by key. A remote file (`gs://`) cannot grow, so it is written whole each time.
  """

  def __init__(self, path: epath.PathLike, *, after: int | None = None):
    self._path = epath.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._text = _kept(self._path, after)
    temporary = self._path.parent / f"{self._path.name}.tmp"
    temporary.write_text(self._text)
    temporary.replace(self._path)
    self._file = None if is_remote(self._path) else self._path.open("a")

  def write(self, record: Mapping[str, Any]) -> None:
    line = to_json(record) + "\n"
    if self._file is None:
      self._text += line
      self._path.write_text(self._text)
    else:
      self._file.write(line)
      self._file.flush()

  def close(self) -> None:
    if self._file is not None:
      self._file.close()


class TensorboardWriter:
  """Scalars as TensorBoard events, under the tags of `scalars`."""

  def __init__(self, dir: epath.PathLike):
    try:
      self._events = tensorboardX.SummaryWriter(os.fspath(dir), flush_secs=10)
    except ImportError as error:
      raise ValueError(f"no TensorBoard events in {dir}: {error}; or set tracking.tensorboard: false") from None

  def write(self, record: Mapping[str, Any]) -> None:
    for tag, value in scalars(record).items():
      self._events.add_scalar(tag, value, int(record["step"]))

  def close(self) -> None:
    self._events.close()


class WandbWriter:
  """Scalars to Weights & Biases, also offline (`WANDB_MODE=offline`), against `step`, or `sft/step` in a warm start."""

  def __init__(self, project: str, dir: epath.PathLike, *, config: Mapping[str, Any] | None = None):
    try:
      import wandb
    except ImportError:
      raise ValueError("tracking.wandb needs an extra: pip install 'jaxagent[wandb]'; or set it to null") from None
    folder = epath.Path(dir)
    local = None if is_remote(folder) else os.fspath(folder)
    self._run = wandb.init(project=project, name=folder.name, dir=local, config=dict(config or {}))
    self._run.define_metric("*", step_metric="step")
    self._run.define_metric("sft/*", step_metric="sft/step")

  def write(self, record: Mapping[str, Any]) -> None:
    step = "sft/step" if record.get("phase") == "sft" else "step"
    self._run.log(scalars(record) | {step: int(record["step"])})

  def close(self) -> None:
    self._run.finish()


class _Combined:
  def __init__(self, *writers: Writer):
    self._writers = writers

  def write(self, record: Mapping[str, Any]) -> None:
    for writer in self._writers:
      writer.write(record)

  def close(self) -> None:
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close)


def combine(*writers: Writer) -> Writer:
  """Each record to each writer, in order. Closing closes all of them, even if one fails."""
  return _Combined(*writers)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
  """The numbers of a record except `step`, under tags that tell phases apart: `loss`, `sft/loss`, `eval/success`."""
  phase = record.get("phase", "train")
  head = "" if phase == "train" else f"{phase}/"
  numbers = {key: plain(value, key) for key, value in record.items() if key not in ("step", "phase")}
  tagged = {key if key.startswith(head) else head + key: value for key, value in numbers.items()}
  return {tag: float(value) for tag, value in tagged.items() if isinstance(value, bool | int | float)}


def to_json(record: Mapping[str, Any]) -> str:
  """A record as valid JSON on one line."""
  values = {key: plain(value, key) for key, value in record.items()}
  odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
  finite = values | dict.fromkeys(odd) | ({"nan_or_inf": odd} if odd else {})
  return json.dumps(finite, allow_nan=False)


def plain(value: Any, key: str) -> bool | int | float | str | None:
  """A number, an array that holds one, or a string -> the Python value."""
  if value is None or isinstance(value, bool | int | float | str):
    return value
  array = np.asarray(value)
  if array.size == 1 and np.can_cast(array.dtype, np.complex64, "same_kind"):
    return array.item()
  raise ValueError(f"a metrics record holds numbers and strings, but {key!r} is {value!r:.60}")


def is_remote(path: epath.PathLike) -> bool:
  return "://" in os.fspath(path)


def _kept(path: epath.Path, after: int | None) -> str:
  """The lines that a run which goes on after step `after` keeps; the last one of a killed run may be torn."""
  if after is None or not path.exists():
    return ""
  lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
  try:
    records = [json.loads(line) for line in lines]
    return "".join(line for line, r in zip(lines, records) if r["phase"] == "sft" or r["step"] <= after)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is not a file of metrics records ({error!r:.80}); move it away to go on") from None
