"""A sandbox's folder, read from outside: links are never followed, only regular files are opened, nothing blocks."""

import contextlib
import os
import stat
from collections.abc import Iterator


class Folder:
  """Reads below an open directory. Whoever filled it may have put anything there: links, fifos, devices, any name.

  Paths are relative, with "/" between names. What is missing, a link on the way, or not to be read, is None.
  """

  def __init__(self, descriptor: int):
    self.descriptor = descriptor

  def stat(self, path: str) -> os.stat_result | None:
    with self._parent(path) as (parent, name):
      return None if parent is None else _lstat(parent, name)

  def mode(self, path: str) -> int | None:
    """Permission bits of a regular file."""
    found = self.stat(path)
    return stat.S_IMODE(found.st_mode) if found and stat.S_ISREG(found.st_mode) else None

  def read(self, path: str, most: int) -> bytes | None:
    """Content of a regular file of at most `most` bytes."""
    with self._parent(path) as (parent, name):
      found = None if parent is None else _lstat(parent, name)
      if found is None or not stat.S_ISREG(found.st_mode) or found.st_size > most:
        return None
      try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
      except OSError:
        return None
      with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    return content if content is not None and len(content) <= most else None

  def inodes(self) -> int:
    """Files and folders in use on its file system."""
    found = os.fstatvfs(self.descriptor)
    return found.f_files - found.f_ffree

  @contextlib.contextmanager
  def _parent(self, path: str) -> Iterator[tuple[int | None, str]]:
    """An open directory and a name in it; (None, "") where a folder on the way is missing or a link."""
    *way, name = path.split("/")
    if ".." in (*way, name) or "" in (*way, name):
      raise ValueError(f"a path in a sandbox's folder must be relative, without '..' or empty names, got {path!r}")
    descriptor = os.dup(self.descriptor)
    try:
      for step in way:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
          below = os.open(step, flags, dir_fd=descriptor)
        except OSError:
          yield None, ""
          return
        os.close(descriptor)
        descriptor = below
      yield descriptor, name
    finally:
      os.close(descriptor)


def _lstat(parent: int, name: str) -> os.stat_result | None:
  try:
    return os.stat(name, dir_fd=parent, follow_symlinks=False)
  except OSError:
    return None
