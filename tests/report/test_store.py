import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxagent.report import store
from jaxagent.types import Rollouts, Trajectory, check


def rollouts_of(n=3, t=5, s=2, seed=0, **changes) -> Rollouts:
  r = np.random.default_rng(seed)

  def ints(*shape):
    return r.integers(0, n, shape).astype(np.int32)

  def floats(*shape):
    return r.standard_normal(shape).astype(np.float32)

  base = Rollouts(
    tokens=ints(n, t), position=ints(n, t), mask=r.random((n, t)) < 0.5, turn=ints(n, t),
    length=np.full(n, t, np.int32), prefix_length=ints(n),
    rollout=ints(n), agent=ints(n), group=ints(n), env=ints(n), task=ints(n),
    outcome=floats(n),
    reward=floats(n), turn_reward=floats(n, s), valid=np.ones(n, bool), truncated=np.zeros(n, bool),
    temperature=np.ones(n, np.float32), logp_rollout=floats(n, t),
  )  # fmt: skip
  return dataclasses.replace(base, **changes)


def trajectory(row: int) -> Trajectory:
  return Trajectory(
    task=10 + row, group=row, rollout=row, tokens=[72, 105, 33, 34, 63], action=[False, False, True, True, False],
    turn=[-1, -1, 0, 0, -1], logp_rollout=[0.0, 0.0, -0.5, -1.5, 0.0], logp_sampled=[0.0, 0.0, -0.5, -1.5, 0.0],
    turn_reward=[0.25], outcome=1.0, status="done", transcript=[{"role": "user", "content": "Hi"}],
  )  # fmt: skip


def decode(ids) -> str:
  return bytes(ids).decode()


def assert_identical(got: Rollouts, want: Rollouts):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    b = np.asarray(b)
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


FULL = {
  "version": np.array([[0, 1, -1, 2**30, 3]] * 3, np.int32),
  "routing": np.arange(3 * 5 * 2 * 4, dtype=np.int16).reshape(3, 5, 2, 4) - 1,
  "entropy": np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45]] * 3, np.float32),
  "columns": {
    "rewards": np.ones((3, 4), np.float64),
    "judge/score of a step": np.zeros((3, 5), ml_dtypes.bfloat16),
    "empty": np.zeros((3, 0), np.float16),
    "flags": np.array([True, False, True]),
    "ids": np.array([1, 2**63, 3], np.uint64),
    "..": np.zeros((3,), np.int8),
  },
}
CASES = {
  "plain": rollouts_of(),
  "every kind of column": rollouts_of(**FULL),
  "on a device": jax.tree.map(jnp.asarray, rollouts_of(version=FULL["version"])),
  "no turns": rollouts_of(s=0),
  "no rows": rollouts_of(n=0),
  "minus zero": rollouts_of(reward=-np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_comes_back_bit_for_bit(tmp_path, name):
  store.write(tmp_path, 7, CASES[name], [])
  got, records = store.read(tmp_path, 7)
  assert_identical(got, CASES[name])
  assert records == []


def test_what_comes_back_is_a_valid_batch(tmp_path):
  batch = rollouts_of(group=np.zeros(3, np.int32), rollout=np.arange(3, dtype=np.int32))
  store.write(tmp_path, 1, batch, [])
  check(store.read(tmp_path, 1)[0])


def test_records_say_who_wrote_what_and_with_which_reward(tmp_path):
  batch = rollouts_of(reward=np.array([0.5, 1.0, 0.0], np.float32), valid=np.array([True, False, False]))
  folder = store.write(tmp_path, 1, batch, [trajectory(0), trajectory(1)], decode=decode)
  _, records = store.read(tmp_path, 1)
  assert [(r["row"], r["task"], r["reward"], r["valid"]) for r in records] == [(0, 10, 0.5, True), (1, 11, 1.0, False)]
  spans = [(-1, 2, "Hi"), (0, 2, '!"'), (-1, 1, "?")]
  assert [(s["turn"], s["tokens"], s["text"]) for s in records[0]["spans"]] == spans
  want = {"turns": 1, "tokens": 5, "actions": 2, "status": "done", "turn_reward": [0.25], "temperature": 1.0}
  assert want.items() <= records[0].items() and "logp_sampled" not in records[0]
  assert records[0]["transcript"] == [{"role": "user", "content": "Hi"}]
  assert len((folder / "rollouts.jsonl").read_text().splitlines()) == 2


def test_odd_values_of_the_host_are_kept_as_valid_json(tmp_path):
  odd = trajectory(0)
  odd.columns = {"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": {1: (None, {3})}, "e": "\u2028\ud800"}
  odd.logp_sampled = [0.0, 0.0, -0.25, float("-inf"), 0.0]
  store.write(tmp_path, 1, rollouts_of(), [odd])
  record = store.read(tmp_path, 1)[1][0]
  want = {"a": 0.5, "b": [0, 1], "c": "nan", "d": {"1": [None, "{3}"]}, "e": "\u2028\ud800"}
  assert record["columns"] == want and record["logp_sampled"] == [0.0, 0.0, -0.25, "-inf", 0.0]


def test_steps_are_listed_in_order_and_a_step_is_replaced_whole(tmp_path):
  assert store.steps(tmp_path / "nowhere") == []
  for step in (10, 2, 123456789):
    store.write(tmp_path, step, rollouts_of(seed=step), [])
  store.write(tmp_path, 2, rollouts_of(seed=5, **FULL), [])
  store.write(tmp_path, 2, rollouts_of(seed=6), [])
  assert store.steps(tmp_path) == [2, 10, 123456789]
  assert_identical(store.read(tmp_path, 2)[0], rollouts_of(seed=6))


def test_a_write_that_fails_leaves_the_step_as_it_was(tmp_path):
  store.write(tmp_path, 1, rollouts_of(seed=1), [])

  def fails(ids):
    raise RuntimeError("in the middle")

  for step in (1, 2):
    with pytest.raises(RuntimeError, match="in the middle"):
      store.write(tmp_path, step, rollouts_of(seed=2), [trajectory(0)], decode=fails)
  assert store.steps(tmp_path) == [1]
  assert_identical(store.read(tmp_path, 1)[0], rollouts_of(seed=1))
  store.write(tmp_path, 2, rollouts_of(seed=3), [])
  assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001", "00000001.tmp", "00000002"]


def test_any_zarr_reader_finds_a_group_of_compressed_arrays(tmp_path):
  routing = np.zeros((3, 500, 8, 4), np.int16)
  folder = store.write(tmp_path, 3, rollouts_of(t=500, routing=routing), [])
  group = json.loads((folder / "zarr.json").read_text())
  assert (group["zarr_format"], group["node_type"]) == (3, "group")
  assert group["attributes"] == {"jaxagent": {"format_version": 1, "step": 3}}
  array = json.loads((folder / "routing" / "zarr.json").read_text())
  assert (array["zarr_format"], array["node_type"], array["data_type"]) == (3, "array", "int16")
  assert array["shape"] == [3, 500, 8, 4]
  stored = sum(path.stat().st_size for path in pathlib.Path(folder / "tokens").rglob("*") if path.is_file())
  assert stored < 3 * 500 * 4 / 2


def test_a_step_that_is_not_there_says_which_are(tmp_path):
  with pytest.raises(ValueError, match=r"no rollouts of step 3 in .*stored are none"):
    store.read(tmp_path, 3)
  for step in (1, 2, 4, 5):
    store.write(tmp_path, step, rollouts_of(), [])
  with pytest.raises(ValueError, match=r"stored are 1\.\.5 \(4 steps\)"):
    store.read(tmp_path, 3)


def remove_array(folder):
  (folder / "tokens" / "zarr.json").unlink()


def break_chunk(folder):
  (folder / "tokens" / "c" / "0" / "0").write_bytes(b"x")


def break_records(folder):
  (folder / "rollouts.jsonl").write_text("{")


def other_version(folder):
  group = (folder / "zarr.json").read_text()
  (folder / "zarr.json").write_text(group.replace('"format_version": 1', '"format_version": 7'))


@pytest.mark.parametrize("damage", [remove_array, break_chunk, break_records, other_version])
def test_a_damaged_step_is_one_line_that_names_it(tmp_path, damage):
  damage(store.write(tmp_path, 3, rollouts_of(), []))
  with pytest.raises(ValueError, match=r"rollouts of step 3 in .*00000003 cannot be read") as caught:
    store.read(tmp_path, 3)
  assert "\n" not in str(caught.value)
