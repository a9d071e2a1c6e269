"""A run's folder: a new one, one that is there already, and its lock."""

import contextlib
import fcntl
import re

from etils import epath

from jaxagent.config import Config

LOCK = "lock"


def fresh(config: Config, name: str) -> epath.Path:
  """A folder for a new run; ValueError if the one asked for holds a run, or anything else."""
  if config.run.dir is not None:
    folder = epath.Path(config.run.dir)
    if folder.exists() and begun(folder):
      raise ValueError(f"run.dir {folder} exists; choose another, or continue it with --resume {folder}")
    return folder
  taken = [n for n, _ in numbered(name)]
  return epath.Path("runs") / f"{name}-{max(taken, default=0) + 1}"


def begun(folder: epath.Path) -> bool:
  """Whether it holds more than what a run that failed before its first record has left."""
  if not (folder / "config.yaml").exists():
    return any(path.name != LOCK for path in folder.iterdir())
  metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
  return (metrics.exists() and metrics.stat().length > 0) or (checkpoints.exists() and any(checkpoints.iterdir()))


def claim(config: Config, name: str) -> epath.Path:
  """`fresh`, made: of two runs that begin at once each gets a number of its own."""
  while True:
    folder = fresh(config, name)
    try:
      folder.mkdir(parents=True, exist_ok=config.run.dir is not None)
      return folder
    except FileExistsError:
      continue


@contextlib.contextmanager
def alone(folder: epath.Path):
  """Keeps other processes of this machine out of a run's folder; a remote one is not locked."""
  if "://" in str(folder):
    yield
    return
  with open(folder / LOCK, "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"another run is in {folder}; wait for its end, or choose another run.dir") from None
    yield


def existing(config: Config, name: str) -> epath.Path:
  """The folder of `run.dir`, or the newest run of this name."""
  if config.run.dir is not None:
    folder = epath.Path(config.run.dir)
    if not (folder / "config.yaml").exists():
      raise ValueError(f"there is no run to resume in {folder} (no config.yaml)")
    return folder
  if not (runs := numbered(name)):
    raise ValueError(f"there is no run to resume: no runs/{name}-<n>; start one without --resume")
  return runs[-1][1]


def numbered(name: str) -> list[tuple[int, epath.Path]]:
  root = epath.Path("runs")
  found = [(re.fullmatch(re.escape(name) + r"-(\d+)", p.name), p) for p in (root.iterdir() if root.exists() else ())]
  return sorted(((int(m[1]), p) for m, p in found if m), key=lambda run: run[0])


def run_folder(path: str) -> epath.Path:
  folder = epath.Path(path)
  if not (folder / "config.yaml").exists():
    raise ValueError(f"{path} is not a run's folder: it has no config.yaml")
  return folder


def write_whole(path: epath.Path, text: str) -> None:
  """The old content or the new, whatever happens in between."""
  beside = path.with_name(f"{path.name}.new")
  beside.write_text(text)
  beside.replace(path)
