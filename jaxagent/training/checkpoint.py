"""Checkpoints of a run: asynchronous, complete or not there, and verified when they are read.

A checkpoint of step 40 is a folder `00000040/` that holds `state/` (Orbax), `meta.json` (what the loop says of it, and
name, shape and dtype of every array) and `checksums.json`, which is written last: a folder without it is unfinished and
never read. Orbax itself restores a flipped bit in silence, so every file's SHA-256 is compared before restoring.
"""

import concurrent.futures
import errno
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

FORMAT_VERSION = 1


class CheckpointError(RuntimeError):
  """One line for the user: which checkpoint or folder, and what is wrong with it."""


class Restored(NamedTuple):
  step: int
  state: Any
  meta: dict[str, Any]


class Checkpointer:
  """Saves and restores a pytree and a JSON record per step, under one folder, local or remote (`gs://`).

    with Checkpointer(dir, keep=2) as checkpointer:
      checkpointer.save(40, {"params": params, "opt_state": opt_state, "key": key}, {"next_task": 320})
      step, state, meta = checkpointer.restore({"params": ..., ...})  # arrays or jax.ShapeDtypeStruct with shardings

  `save` returns when the state is on the host, so its buffers may be donated; the rest happens in the background and
  `wait` raises what went wrong there. Leave by `with` or `close`: a save that still runs when the interpreter ends is
  lost, since no thread can be started by then. A save at step s supersedes the checkpoints of later steps: they belong
  to a history that was abandoned. Of the others the newest `keep` stay. On several hosts, every one of them calls.
  Errors: CheckpointError for what is on the disk, ValueError for a state that does not fit it.
  """

  def __init__(self, dir: epath.PathLike, *, keep: int = 2, warn: Callable[[str], None] = warnings.warn):
    if keep < 1:
      raise ValueError(f"keep must be at least 1, got {keep}")
    self._dir, self._keep, self._warn = _absolute(dir), keep, warn
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._pending: concurrent.futures.Future | None = None
    self._corrupt: set[epath.Path] = set()  # found so by this object

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def steps(self) -> list[int]:
    """Steps with a complete checkpoint, in order; without reading files, so only known corrupt ones are left out."""
    return sorted(self._complete())

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def latest_intact(self) -> int | None:
    """The step that `restore` would return: reads and verifies files."""
    return next((step for step, folder, fault in self._newest_first() if fault is None), None)

  def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
    """Begins to save, once the save before it is done; a step that is saved again replaces its checkpoint when done."""
    self.wait()
    leaves = _named(state)
    tree = {name: _spec(leaf) for name, leaf in leaves.items()}
    record = json.dumps({"format_version": FORMAT_VERSION, "step": step, "meta": meta, "tree": tree}, allow_nan=False)
    folder = _new_folder(self._dir, step)
    self._corrupt.discard(folder)  # a name that is free again
    try:
      folder.mkdir(parents=True, exist_ok=True)
      arrays = {name: _to_save(leaf) for name, leaf in leaves.items() if np.size(leaf)}
      if arrays:
        self._orbax.save(folder / "state", args=ocp.args.PyTreeSave(arrays))
    except Exception as error:
      raise self._failed(step, folder, error) from error
    self._pending = self._background.submit(self._finish, step, folder, record)

  def wait(self) -> None:
    """Returns when the last save is complete; raises CheckpointError if it failed."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Waits, and frees the threads."""
    try:
      self.wait()
    finally:
      self._background.shutdown()
      self._orbax.close()

  def restore(self, target: Any, *, step: int | None = None, prefix: str = "") -> Restored:
    """The newest checkpoint that verifies, or that of `step`, with the structure, dtypes and shardings of `target`.

    A leaf of `target` is a `jax.ShapeDtypeStruct` (without sharding: the first device), an array, or a Python number.
    With `prefix="train/params"` the target is that part of the state alone. A corrupt checkpoint is passed over with a
    warning that names it and the one used; one that was asked for by `step` is an error.
    """
    passed = []
    for candidate, folder, fault in self._newest_first(step):
      if fault is None:
        for line in passed:
          self._warn(f"{line}; the checkpoint of step {candidate} in {folder} is used instead")
        return _read(folder, candidate, target, prefix)
      passed.append(f"checkpoint of step {candidate} in {folder} {fault}")
    missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError("; ".join(passed) or f"{missing} in {self._dir}; complete ones: {self.steps()}")

  def check(self, target: Any, step: int) -> None:
    """ValueError unless the intact checkpoint of `step` has `target`'s names, shapes and dtypes; no array is read."""
    folder = next(folder for _, folder, fault in self._newest_first(step) if fault is None)
    _checked_record(folder, step, _named(target), "")

  def _complete(self) -> dict[int, epath.Path]:
    found = [(step, folder) for (step, _), folder in _folders(self._dir).items() if folder not in self._corrupt]
    return {step: folder for step, folder in found if (folder / "checksums.json").exists()}

  def _newest_first(self, step: int | None = None) -> Iterator[tuple[int, epath.Path, str | None]]:
    """(step, folder, what is wrong with it) of every checkpoint, or of those of one step."""
    self.wait()
    for (found, _), folder in reversed(_folders(self._dir).items()):
      if step in (None, found):
        fault = _fault(folder)
        if fault is not None:
          self._corrupt.add(folder)
        yield found, folder, fault

  def _finish(self, step: int, folder: epath.Path, meta: str) -> None:
    try:
      self._orbax.wait_until_finished()
      if jax.process_index() == 0:
        _write(folder / "meta.json", meta)
        _write(folder / "checksums.json", json.dumps(_checksums(folder), indent=1))
    except Exception as error:
      raise self._failed(step, folder, error) from error
    if jax.process_index() == 0:
      self._discard(step)

  def _discard(self, step: int) -> None:
    """Deletes everything but the newest `keep` checkpoints up to `step`."""
    complete = self._complete()
    kept = [complete[s] for s in sorted(complete) if s <= step][-self._keep :]
    for folder in _folders(self._dir).values():
      if folder not in kept:
        try:
          folder.rmtree()
        except OSError as error:
          self._warn(f"old checkpoint {folder} could not be deleted: {error}")

  def _failed(self, step: int, folder: epath.Path, error: Exception) -> CheckpointError:
    if jax.process_index() == 0:
      folder.rmtree(missing_ok=True)
    what = "no space is left" if _no_space(error) else " ".join(str(error).split())[:300]
    earlier = f"the earlier ones are intact: {steps}" if (steps := self.steps()) else "there is no earlier one"
    return CheckpointError(f"checkpoint of step {step} could not be saved in {self._dir}: {what}; {earlier}")


# Folders


def _absolute(dir: epath.PathLike) -> epath.Path:
  path = epath.Path(dir)
  return path if "://" in os.fspath(path) else path.resolve()


def _folders(dir: epath.Path) -> dict[tuple[int, int], epath.Path]:
  """{(step, attempt): folder}, complete or not, in order: a step that is saved again gets a new folder."""
  if not dir.exists():
    return {}
  named = ((re.fullmatch(r"(\d{8,})(?:\.(\d+))?", folder.name), folder) for folder in dir.iterdir())
  return dict(sorted(((int(m[1]), int(m[2] or 0)), folder) for m, folder in named if m))


def _new_folder(dir: epath.Path, step: int) -> epath.Path:
  attempt = max((a for s, a in _folders(dir) if s == step), default=-1) + 1
  return dir / (f"{step:08d}.{attempt}" if attempt else f"{step:08d}")


def _write(path: epath.Path, text: str) -> None:
  """All of the file or nothing."""
  temporary = path.parent / f"{path.name}.tmp"
  temporary.write_text(text)
  temporary.replace(path)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
  for path in folder.iterdir():
    yield from _files(path) if path.is_dir() else [path]


def _checksum(path: epath.Path) -> str:
  with path.open("rb") as file:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()


def _checksums(folder: epath.Path) -> dict[str, str]:
  return {path.relative_to(folder).as_posix(): _checksum(path) for path in sorted(_files(folder))}


def _fault(folder: epath.Path) -> str | None:
  """What is wrong with a checkpoint; None if every file is as it was written."""
  if not (folder / "checksums.json").exists():
    return "is unfinished"
  try:
    for name, checksum in json.loads((folder / "checksums.json").read_bytes()).items():
      if not (folder / name).exists():
        return f"is corrupt: {name} is missing"
      if _checksum(folder / name) != checksum:
        return f"is corrupt: the checksum of {name} differs"
  except (OSError, ValueError) as error:
    return f"is corrupt: {' '.join(str(error).split())}"
  return None


def _no_space(error: BaseException | None) -> bool:
  if error is None:
    return False
  full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
  return full or _no_space(error.__cause__ or error.__context__)


# Trees: saved as one flat mapping of names, so that no container type matters


def _named(tree: Any) -> dict[str, Any]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
  if len(named) < len(leaves):
    raise ValueError("two leaves of the state have the same name; rename a key that has a slash in it")
  return named


def _is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_host(leaf: Any) -> bool:
  return not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _spec(leaf: Any) -> dict[str, Any]:
  leaf = np.asarray(leaf) if _is_host(leaf) else leaf
  spec = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
  return spec | {"impl": str(jax.random.key_impl(leaf))} if isinstance(leaf, jax.Array) and _is_key(leaf) else spec


def _to_save(leaf: Any) -> Any:
  if _is_host(leaf):
    return np.array(leaf)
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _to_restore(leaf: Any) -> Any:
  if _is_host(leaf):
    return np.asarray(leaf)
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _read(folder: epath.Path, step: int, target: Any, prefix: str) -> Restored:
  head = f"{prefix}/" if prefix else ""
  named = {f"{head}{name}": leaf for name, leaf in _named(target).items()}
  record = _checked_record(folder, step, named, head)
  wanted = {name: _to_restore(leaf) for name, leaf in named.items()}
  arrays = _restore_arrays(folder / "state", {name: leaf for name, leaf in wanted.items() if leaf.size})
  empty = {name: _empty(leaf) for name, leaf in wanted.items() if not leaf.size}
  leaves = [_restored(leaf, (arrays | empty)[name], record["tree"][name]) for name, leaf in named.items()]
  return Restored(step, jax.tree.unflatten(jax.tree.structure(target), leaves), record["meta"])


def _checked_record(folder: epath.Path, step: int, named: dict[str, Any], head: str) -> dict[str, Any]:
  """What meta.json holds; ValueError unless its leaves whose names begin with `head` are those of `named`."""
  record = json.loads((folder / "meta.json").read_text())
  if record["format_version"] != FORMAT_VERSION:
    raise ValueError(
      f"checkpoint of step {step} in {folder} has format version {record['format_version']}, this version of jaxagent"
      f" reads {FORMAT_VERSION}; use the version that wrote it"
    )
  saved = {name: spec for name, spec in record["tree"].items() if name.startswith(head)}
  _check_same(saved, {name: _spec(leaf) for name, leaf in named.items()}, f"checkpoint of step {step} in {folder}")
  return record


def _parts(names) -> set[str]:
  return {name.split("/")[0] for name in names if "/" in name}


def _check_same(saved: dict[str, dict], wanted: dict[str, dict], where: str) -> None:
  for parts, what in ((_parts(wanted) - _parts(saved), "no"), (_parts(saved) - _parts(wanted), "a")):
    if parts:
      other = "which this config asks for" if what == "no" else "for which this config has no use"
      way = "resume with the run's own config, or begin a new run"
      raise ValueError(f"{where} has {what} {min(parts)}, {other}; {way}")
  for names, what in ((wanted.keys() - saved.keys(), "lacks"), (saved.keys() - wanted.keys(), "has an unexpected")):
    if names:
      more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
      raise ValueError(f"{where} {what} {min(names)}{more}: the model, the optimizer or the method is another one")
  for name, spec in wanted.items():
    for part in ("shape", "dtype"):
      if saved[name][part] != spec[part]:
        raise ValueError(f"{where}: {name} has {part} {saved[name][part]} there and {spec[part]} here")


def _restore_arrays(path: epath.Path, target: dict[str, Any]) -> dict[str, Any]:
  if not target:
    return {}
  restore_args = ocp.checkpoint_utils.construct_restore_args(target)
  args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    return reader.restore(path, args=args)


def _empty(leaf: Any) -> Any:
  zeros = np.zeros(leaf.shape, leaf.dtype)
  return zeros if _is_host(leaf) else jax.device_put(zeros, leaf.sharding)


def _restored(target: Any, array: Any, spec: dict[str, Any]) -> Any:
  if "impl" in spec:
    return jax.random.wrap_key_data(array, impl=spec["impl"])
  if isinstance(target, bool | int | float | complex):
    return array.item()
  return array
