import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxagent.report import trackers
from jaxagent.report.trackers import JsonlWriter, TensorboardWriter, WandbWriter, combine, scalars, to_json


def strict(line: str) -> dict:
  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  return json.loads(line, parse_constant=refuse)


def lines_of(path) -> list[dict]:
  return [strict(line) for line in path.read_text().splitlines()]


def train(step: int, **metrics) -> dict:
  return {"step": step, "phase": "train", **metrics}


@pytest.mark.parametrize(
  "value, want",
  [
    (1.5, 1.5),
    (3, 3),
    (True, True),
    ("a\n\u2028b é\ud800", "a\n\u2028b é\ud800"),
    (None, None),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.int64(2**40), 2**40),
    (np.bool_(True), True),
    (jnp.float32(2), 2.0),
    (jnp.bfloat16(0.5), 0.5),
    (np.array([[7]]), 7),
  ],
)
def test_values_become_json(value, want):
  got = strict(to_json({"x": value}))
  assert got == {"x": want} and type(got["x"]) is type(want)


def test_nan_and_infinity_are_null_and_are_named():
  got = strict(to_json({"step": 1, "a": float("nan"), "b": np.float32("inf"), "c": -math.inf, "nonfinite": 1.0}))
  want = {"step": 1, "a": None, "b": None, "c": None, "nonfinite": 1.0}
  assert got == want | {"nan_or_inf": {"a": "nan", "b": "inf", "c": "-inf"}}


@pytest.mark.parametrize("value", [np.arange(2), [1, 2], {"a": 1}, object(), np.zeros(0)])
def test_what_a_record_cannot_hold_is_an_error_that_names_the_key(value):
  with pytest.raises(ValueError, match="'odd/key'"):
    to_json({"odd/key": value})


def test_each_line_is_on_the_disk_when_write_returns(tmp_path):
  path = tmp_path / "run" / "metrics.jsonl"
  writer = JsonlWriter(path)
  for step in (1, 2):
    writer.write(train(step, loss=0.5))
    assert lines_of(path)[-1] == train(step, loss=0.5) and len(lines_of(path)) == step
  writer.close()


OLD = [
  {"step": 300, "phase": "sft", "loss": 2.0},
  {"step": 0, "phase": "eval", "eval/success": 0.3},
  *(train(step) for step in (1, 2)),
  {"step": 2, "phase": "eval", "eval/success": 0.4},
  *(train(step) for step in (3, 4)),
  {"step": 4, "phase": "eval", "eval/success": 0.5},
]


@pytest.mark.parametrize("after, kept", [(None, []), (0, OLD[:2]), (2, OLD[:5]), (3, OLD[:6]), (9, OLD)])
@pytest.mark.parametrize("torn", ["", '{"step": 5, "pha'])
def test_resuming_drops_the_records_that_will_be_written_again(tmp_path, after, kept, torn):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in OLD) + torn)
  writer = JsonlWriter(path, after=after)
  assert lines_of(path) == kept
  writer.write(train(5))
  writer.close()
  assert lines_of(path) == [*kept, train(5)]
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"loss": 1}\n'])
def test_another_file_in_its_place_is_an_error_and_stays(tmp_path, text):
  path = tmp_path / "metrics.jsonl"
  path.write_text(text)
  with pytest.raises(ValueError, match="not a file of metrics records") as caught:
    JsonlWriter(path, after=3)
  assert path.read_text() == text and "\n" not in str(caught.value)


def test_a_remote_file_is_written_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(trackers, "is_remote", lambda path: True)
  path = tmp_path / "metrics.jsonl"
  path.write_text(json.dumps(train(1)) + "\n" + json.dumps(train(2)) + "\n")
  writer = JsonlWriter(path, after=1)
  for step in (2, 3):
    writer.write(train(step, again=True))
  writer.close()
  assert lines_of(path) == [train(1), train(2, again=True), train(3, again=True)]


@pytest.mark.parametrize(
  "record, want",
  [
    (train(1, loss=1, note="x", gone=None, flag=True), {"loss": 1.0, "flag": 1.0}),
    ({"step": 1, "phase": "sft", "loss": 2.0, "eval/success": 0.1}, {"sft/loss": 2.0, "sft/eval/success": 0.1}),
    ({"step": 1, "phase": "eval", "eval/success": 0.5, "time/eval": 3}, {"eval/success": 0.5, "eval/time/eval": 3.0}),
  ],
)
def test_tags_tell_phases_apart(record, want):
  assert scalars(record) == want


def events_of(folder) -> list[tuple[str, int, float]]:
  """Reads the record format itself: length, its checksum, an event, its checksum."""
  data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
  found = []
  while data:
    size = int.from_bytes(data[:8], "little")
    event = Event.FromString(data[12 : 12 + size])
    found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    data = data[16 + size :]
  return found


def test_tensorboard_events(tmp_path):
  writer = TensorboardWriter(tmp_path / "tensorboard")
  writer.write({"step": 7, "phase": "sft", "loss": 2.5})
  writer.write(train(1, loss=0.25, **{"reward/mean": jnp.float32(0.5)}))
  writer.close()
  want = [("sft/loss", 7, 2.5), ("loss", 1, 0.25), ("reward/mean", 1, 0.5)]
  assert events_of(tmp_path / "tensorboard") == want


def test_tensorboard_where_the_library_cannot(monkeypatch):
  def refuse(*_, **__):
    raise ImportError("`google-cloud-storage` must be installed")

  monkeypatch.setattr(trackers.tensorboardX, "SummaryWriter", refuse)
  with pytest.raises(ValueError, match=r"gs://bucket/run.*google-cloud-storage.*tracking\.tensorboard: false"):
    TensorboardWriter("gs://bucket/run")


class FakeRun:
  def __init__(self):
    self.metrics, self.logged, self.finished = {}, [], False

  def define_metric(self, name, step_metric):
    self.metrics[name] = step_metric

  def log(self, values):
    self.logged.append(values)

  def finish(self):
    self.finished = True


def test_wandb(tmp_path, monkeypatch):
  run, seen = FakeRun(), {}
  fake = types.SimpleNamespace(init=lambda **kwargs: seen.update(kwargs) or run)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  writer = WandbWriter("project", tmp_path / "run-1", config={"seed": 3})
  writer.write({"step": 30, "phase": "sft", "loss": 2.0})
  writer.write(train(1, loss=0.5))
  writer.close()
  assert seen == {"project": "project", "name": "run-1", "dir": str(tmp_path / "run-1"), "config": {"seed": 3}}
  assert run.logged == [{"sft/loss": 2.0, "sft/step": 30}, {"loss": 0.5, "step": 1}] and run.finished


def test_without_wandb_the_error_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ValueError, match=r"jaxagent\[wandb\]"):
    WandbWriter("project", tmp_path)


class Recording:
  def __init__(self, log, name, fails=False):
    self.log, self.name, self.fails = log, name, fails

  def write(self, record):
    self.log.append((self.name, record["step"]))

  def close(self):
    self.log.append((self.name, "close"))
    if self.fails:
      raise OSError("disk")


def test_combined_writers_are_all_written_and_all_closed():
  log = []
  writer = combine(Recording(log, "a", fails=True), Recording(log, "b"))
  writer.write(train(1))
  with pytest.raises(OSError, match="disk"):
    writer.close()
  assert log == [("a", 1), ("b", 1), ("a", "close"), ("b", "close")]
