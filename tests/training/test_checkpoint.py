import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent.training import checkpoint
from jaxagent.training.checkpoint import Checkpointer, CheckpointError


class Cursor(NamedTuple):
  task: np.ndarray
  epoch: int


def state_of(seed: int) -> dict:
  params = {"w": jax.random.normal(jax.random.key(seed), (4, 8)), "layers": [{"b": jnp.full((3,), seed, jnp.bfloat16)}]}
  return {
    "params": params,
    "opt_state": optax.adamw(1e-3).init(params),
    "key": jax.random.key(seed),
    "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
    "method": ((), {"empty": jnp.zeros((0, 2)), "seen": np.arange(3, dtype=np.int64) + 2**40, "none": None}),
    "cursor": Cursor(np.array(seed, np.int16), seed),
    "rate": 0.1,
    "flag": True,
  }


def like(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state)


def raw(leaf):
  is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
    np.testing.assert_array_equal(raw(a), raw(b))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with complete checkpoints of steps 1 and 2."""
  folder = tmp_path_factory.mktemp("saved")
  with Checkpointer(folder, keep=5) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, state_of(step), {"next_task": 10 * step})
  return folder


@pytest.fixture
def copy(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "copy")


def restore(folder, **kwargs):
  said = []
  with Checkpointer(folder, warn=said.append) as checkpointer:
    return checkpointer.restore(like(state_of(0)), **kwargs), said


@pytest.mark.parametrize("step, want", [(None, 2), (1, 1), (2, 2)])
def test_every_kind_of_leaf_comes_back_exactly(saved, step, want):
  got, said = restore(saved, step=step)
  assert (got.step, got.meta, said) == (want, {"next_task": 10 * want}, [])
  assert_same(got.state, state_of(want))
  assert jax.random.key_impl(got.state["keys"]) == jax.random.key_impl(state_of(want)["keys"])
  assert jax.random.bits(got.state["key"]) == jax.random.bits(jax.random.key(want))


def test_a_part_of_the_state_by_prefix(saved):
  with Checkpointer(saved) as checkpointer:
    assert_same(checkpointer.restore(state_of(0)["params"], prefix="params").state, state_of(2)["params"])


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
  state = {"x": jnp.arange(4_000_000, dtype=jnp.float32), "host": np.arange(5)}
  overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state, {})
    x = overwrite(state["x"])
    for _ in range(3):
      x = overwrite(x)
    state["host"][:] = -1
    got = checkpointer.restore({"x": x, "host": np.zeros(5, int)}).state
  np.testing.assert_array_equal(got["x"], np.arange(4_000_000, dtype=np.float32))
  np.testing.assert_array_equal(got["host"], np.arange(5))


@pytest.mark.parametrize(
  "saves, keep, want",
  [((1, 2, 3), 2, [2, 3]), ((1, 2, 3), 1, [3]), ((2, 4, 3), 2, [2, 3]), ((1, 2, 2), 2, [1, 2]), ((1, 2), 5, [1, 2])],
)
def test_which_checkpoints_stay(tmp_path, saves, keep, want):
  with Checkpointer(tmp_path, keep=keep) as checkpointer:
    assert checkpointer.latest() is None
    for index, step in enumerate(saves):
      checkpointer.save(step, {"x": jnp.full(2, index)}, {"index": index})
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.latest()) == (want, want[-1])
    assert len(list(tmp_path.iterdir())) == len(want)
    step, state, meta = checkpointer.restore({"x": jnp.zeros(2, int)})
  assert (step, int(state["x"][0]), meta["index"]) == (saves[-1], len(saves) - 1, len(saves) - 1)


def test_a_relative_folder_means_the_one_below_the_current_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with Checkpointer("runs/one") as checkpointer:
    monkeypatch.chdir("/")
    checkpointer.save(1, {"x": jnp.zeros(2)}, {})
  assert (tmp_path / "runs" / "one" / "00000001" / "checksums.json").exists()
  assert os.fspath(checkpoint._absolute("gs://bucket/run")) == "gs://bucket/run"


# Faults on the disk


def flip(path):
  data = bytearray(path.read_bytes())
  data[data.index(b'": "') + 4 if path.name == "checksums.json" else len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


def files_of(folder):
  return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [flip, truncate, os.remove], ids=["flip", "truncate", "remove"])
def test_a_fault_in_any_file_means_the_previous_checkpoint_and_a_warning(copy, damage):
  pristine = copy.with_name("pristine")
  shutil.copytree(copy / "00000002", pristine)
  files = [f for f in files_of(pristine) if (pristine / f).stat().st_size or damage is os.remove]
  assert any("d" in f.parts for f in files) and len(files) > 5
  for file in files:
    damage(copy / "00000002" / file)
    got, said = restore(copy)
    assert got.step == 1 and len(said) == 1, file
    assert "checkpoint of step 2" in said[0] and "step 1" in said[0] and "\n" not in said[0]
    assert_same(got.state, state_of(1))
    shutil.rmtree(copy / "00000002")
    shutil.copytree(pristine, copy / "00000002")
  assert restore(copy)[0].step == 2


def test_a_flip_in_the_data_of_a_checkpoint_that_was_asked_for_is_an_error(copy):
  data = max((copy / "00000002").glob("state/d/*"), key=lambda path: path.stat().st_size)
  flip(data)
  with pytest.raises(CheckpointError, match=f"corrupt: the checksum of state/d/{data.name} differs"):
    restore(copy, step=2)


def test_no_checkpoint_that_can_be_used_is_an_error_that_names_all(copy, tmp_path):
  for step in (1, 2):
    flip(copy / f"0000000{step}" / "meta.json")
  with pytest.raises(CheckpointError, match=r"step 2 .* corrupt: .*meta.json.*; checkpoint of step 1 .* corrupt"):
    restore(copy)
  with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
    restore(copy, step=7)
  with pytest.raises(CheckpointError, match="no checkpoint in"):
    restore(tmp_path / "nowhere")


def test_saving_goes_on_after_a_corrupt_checkpoint_was_passed_over(copy):
  flip(copy / "00000002" / "meta.json")
  with Checkpointer(copy, keep=2, warn=lambda _: None) as checkpointer:
    assert (checkpointer.latest(), checkpointer.latest_intact()) == (2, 1)
    assert checkpointer.restore(like(state_of(0))).step == checkpointer.latest() == 1
    checkpointer.save(2, state_of(7), {})
  got, said = restore(copy)
  assert (got.step, said) == (2, [])
  assert_same(got.state, state_of(7))


def test_a_step_whose_corrupt_checkpoint_is_gone_is_saved_like_any_other(copy):
  for step in (1, 2):
    (copy / f"{step:08d}" / "meta.json").unlink()
  with Checkpointer(copy, warn=lambda line: None) as checkpointer:
    assert checkpointer.latest_intact() is None
    for step in (0, 1, 2):  # the first discards the corrupt ones, so that their names are free again
      checkpointer.save(step, state_of(step), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]


def test_check_compares_without_reading(saved):
  with Checkpointer(saved) as checkpointer:
    checkpointer.check(like(state_of(2)), 2)
    with pytest.raises(ValueError, match="lacks"):
      checkpointer.check({**like(state_of(2)), "more": 1}, 2)


def test_an_unfinished_second_save_of_a_step_leaves_the_first(copy):
  (copy / "00000002.1").mkdir()
  got, said = restore(copy)
  assert got.step == 2 and "00000002.1 is unfinished" in said[0]
  with Checkpointer(copy) as checkpointer:
    assert checkpointer.steps() == [1, 2]


def full_disk(path, text):
  raise OSError(errno.ENOSPC, "No space left on device")


def test_no_space_left_names_it_and_the_folder_and_spares_the_earlier_one(copy, monkeypatch):
  with Checkpointer(copy, keep=1) as checkpointer:
    with monkeypatch.context() as patch:
      patch.setattr(checkpoint, "_write", full_disk)
      checkpointer.save(3, state_of(3), {})
      with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    assert f"step 3 could not be saved in {copy}: no space is left" in str(caught.value)
    assert "the earlier ones are intact: [1, 2]" in str(caught.value)
    assert not (copy / "00000003").exists()
    assert checkpointer.restore(like(state_of(0))).step == 2
    checkpointer.save(3, state_of(3), {})
    checkpointer.wait()
    assert checkpointer.steps() == [3]


def test_a_file_system_that_is_really_full(tmp_path):
  """A tmpfs of 3 MB; mounting it takes root."""
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", tmp_path], capture_output=True).returncode:
    pytest.skip("cannot mount a tmpfs here")
  try:
    state = {"x": jax.random.normal(jax.random.key(0), (300_000,))}
    with Checkpointer(tmp_path / "run") as checkpointer:
      checkpointer.save(1, state, {})
      checkpointer.wait()
      (tmp_path / "filler").write_bytes(bytes(1_000_000))
      checkpointer.save(2, state, {})
      with pytest.raises(CheckpointError, match=r"no space is left; the earlier ones are intact: \[1\]"):
        checkpointer.wait()
      assert_same(checkpointer.restore(state).state, state)
      (tmp_path / "filler").unlink()
      checkpointer.save(2, state, {})
      checkpointer.wait()
      assert checkpointer.steps() == [1, 2]
  finally:
    subprocess.run(["umount", tmp_path], check=True)


def test_a_failed_save_is_not_forgotten_at_the_end(copy, monkeypatch):
  monkeypatch.setattr(checkpoint, "_write", full_disk)
  with pytest.raises(CheckpointError, match="no space is left"), Checkpointer(copy) as checkpointer:
    checkpointer.save(3, state_of(3), {})


# States that do not fit

MISMATCHES = [
  ({"w": jnp.zeros((4, 9))}, r"params/w has shape \[4, 8\] there and \[4, 9\] here"),
  ({"w": jnp.zeros((4, 8), jnp.bfloat16)}, "params/w has dtype float32 there and bfloat16 here"),
  ({"w": np.zeros((4, 8))}, "params/w has dtype float32 there and float64 here"),
  ({"v": jnp.zeros(3)}, "lacks params/v"),
  ({"layers": None}, r"has an unexpected params/layers/0/b"),
]


@pytest.mark.parametrize("change, says", MISMATCHES)
def test_a_mismatch_is_one_line_that_names_the_parameter_and_both_sides(saved, change, says):
  state = state_of(0)
  with Checkpointer(saved) as checkpointer, pytest.raises(ValueError, match=says) as caught:
    checkpointer.restore(state | {"params": state["params"] | change})
  assert "\n" not in str(caught.value) and "step 2" in str(caught.value)


def test_another_kind_of_key_is_a_mismatch(saved):
  with (
    Checkpointer(saved) as checkpointer,
    pytest.raises(ValueError, match="key has dtype key<fry> there and key<rbg"),
  ):
    checkpointer.restore(state_of(0) | {"key": jax.random.key(0, impl="rbg")})


def test_another_format_version_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 7)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"x": jnp.zeros(2)}, {})
    checkpointer.wait()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 7, this version of jaxagent reads 1"):
      checkpointer.restore({"x": jnp.zeros(2)})


def test_names_that_coincide_and_bad_arguments(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="same name"):
      checkpointer.save(1, {"a/b": 1, "a": {"b": 2}}, {})
    with pytest.raises(ValueError):
      checkpointer.save(1, {"a": 1}, {"loss": float("nan")})
  with pytest.raises(ValueError, match="keep must be at least 1"):
    Checkpointer(tmp_path, keep=0)


# Other processes


def run_python(code: str, *arguments, devices: int = 1) -> subprocess.CompletedProcess:
  flags = f"--xla_force_host_platform_device_count={devices}"
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
  return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


KILLED = """
  import os, signal, sys
  import jax.numpy as jnp
  from jaxagent.training import checkpoint
  folder, moment = sys.argv[1:]
  write = checkpoint._write
  def killing_write(path, text):
    os.kill(os.getpid(), signal.SIGKILL) if path.name == moment else write(path, text)
  checkpointer = checkpoint.Checkpointer(folder, keep=1)
  checkpointer.save(1, {"x": jnp.ones(10_000_000)}, {})
  checkpointer.wait()
  checkpoint._write = killing_write
  checkpointer.save(2, {"x": jnp.zeros(10_000_000)}, {})
  if moment == "arrays":
    os.kill(os.getpid(), signal.SIGKILL)
  checkpointer.wait()
"""


@pytest.mark.parametrize("moment", ["arrays", "meta.json", "checksums.json"])
def test_killed_in_the_middle_of_a_save(tmp_path, moment):
  done = run_python(KILLED, tmp_path, moment)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert (tmp_path / "00000002").exists()
  said = []
  with Checkpointer(tmp_path, keep=1, warn=said.append) as checkpointer:
    assert checkpointer.latest() == 1
    step, state, _ = checkpointer.restore({"x": jnp.zeros(10_000_000)})
    assert step == 1 and bool((state["x"] == 1).all())
    assert len(said) == 1 and "step 2" in said[0] and "unfinished" in said[0] and "step 1" in said[0]
    checkpointer.save(2, {"x": jnp.zeros(2)}, {})
  assert [p.name for p in tmp_path.iterdir()] == ["00000002.1"]


LEFT = """
  import sys
  import jax.numpy as jnp
  from jaxagent.training.checkpoint import Checkpointer
  with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": jnp.ones(10_000_000)}, {})
    sys.exit(3)
"""


def test_a_save_under_way_is_completed_when_the_program_ends(tmp_path):
  done = run_python(LEFT, tmp_path)
  assert done.returncode == 3 and not done.stderr, done.stderr
  assert restore_ones(tmp_path)


def restore_ones(folder):
  with Checkpointer(folder) as checkpointer:
    return bool((checkpointer.restore({"x": jnp.zeros(10_000_000)}).state["x"] == 1).all())


SHARDED = """
  import sys
  import jax, jax.numpy as jnp, numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
  from jaxagent.training.checkpoint import Checkpointer
  assert jax.device_count() == 8
  devices = np.array(jax.devices())
  value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
  one, two = Mesh(devices, ("fsdp",)), Mesh(devices.reshape(4, 2), ("data", "fsdp"))
  keys = jax.device_put(jax.random.split(jax.random.key(3), 8), NamedSharding(one, P("fsdp")))
  state = {"w": jax.device_put(value, NamedSharding(one, P("fsdp"))), "keys": keys}
  with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, state, {})
    sharding = NamedSharding(two, P("fsdp", "data"))
    target = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding), "keys": keys}
    got = checkpointer.restore(target).state
  assert got["w"].sharding == sharding and (np.asarray(got["w"]) == value).all()
  assert got["keys"].sharding.is_equivalent_to(keys.sharding, 1)
"""


def test_eight_devices_to_other_shardings_and_to_one_device(tmp_path):
  done = run_python(SHARDED, tmp_path, devices=8)
  assert done.returncode == 0, done.stderr
  keys = jax.random.split(jax.random.key(3), 8)
  with Checkpointer(tmp_path) as checkpointer:
    got = checkpointer.restore(like({"w": jnp.zeros((16, 8)), "keys": keys})).state
  np.testing.assert_array_equal(got["w"], np.arange(16 * 8, dtype=np.float32).reshape(16, 8))
  assert len(got["w"].devices()) == 1
  np.testing.assert_array_equal(raw(got["keys"]), raw(keys))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
  mean: jax.Array


def test_registered_dataclasses_keep_their_type(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"tracker": Record(jnp.float32(2))}, {})
    got = checkpointer.restore({"tracker": Record(jax.ShapeDtypeStruct((), jnp.float32))}).state
  assert isinstance(got["tracker"], Record) and float(got["tracker"].mean) == 2
