"""A cgroup (version 2) for one sandbox, where a part of the tree is delegated to us."""

import contextlib
import itertools
import os
from pathlib import Path

from jaxagent.envs.terminal.confinement import SandboxLimits

CONTROLLERS = ("memory", "pids")
SPARE_PROCESSES = 8  # pids.max above RLIMIT_NPROC, which then is what a fork meets first
_numbers = itertools.count()


class Group:
  """Bounds memory and processes of a process and of all that it starts."""

  def __init__(self, path: Path):
    self.path = path

  @classmethod
  def create(cls, limits: SandboxLimits, pid: int, bases: tuple[Path, ...] | None = None) -> "Group | None":
    """Puts a process into a new group below the first of `bases` (default: `delegated()`) that allows it; else None."""
    for base in delegated() if bases is None else bases:
      path = base / f"jaxagent-{os.getpid()}-{next(_numbers)}"
      try:
        _hand_on(base)
        path.mkdir()
        (path / "pids.max").write_text(str(limits.processes + SPARE_PROCESSES))
        (path / "memory.max").write_text(str(limits.total_memory))
        (path / "cgroup.procs").write_text(str(pid))
      except OSError:
        with contextlib.suppress(OSError):
          path.rmdir()
        continue
      with contextlib.suppress(OSError):  # where the kernel counts swap
        (path / "memory.swap.max").write_text("0")
      return cls(path)
    return None

  def killed(self) -> int:
    """How many processes were killed for want of memory so far."""
    events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
    return int(events.get("oom_kill", 0))

  def remove(self) -> None:
    """Once its processes are gone."""
    self.path.rmdir()


def delegated(proc: Path = Path("/proc/self")) -> tuple[Path, ...]:
  """Our own cgroup and the one above it, where version 2 is mounted: the second is ours to divide when a service
  manager has put us into a group of our own below what it delegated."""
  root = next((line.split()[4] for line in _lines(proc / "mountinfo") if " - cgroup2 " in line), None)
  name = next((line[3:] for line in _lines(proc / "cgroup") if line.startswith("0::")), None)
  if root is None or name is None or ".." in name:
    return ()
  own = Path(root + name)
  return tuple(path for path in (own, own.parent) if path.is_relative_to(root))


def _hand_on(base: Path) -> None:
  control = base / "cgroup.subtree_control"
  missing = set(CONTROLLERS) - set(control.read_text().split())
  if missing:
    control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _lines(path: Path) -> list[str]:
  try:
    return path.read_text().splitlines()
  except OSError:
    return []
