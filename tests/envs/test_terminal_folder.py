import os
import socket

import pytest

from jaxagent.envs.terminal.folder import Folder


@pytest.fixture
def folder(tmp_path):
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "secret").write_text("secret")
  root = tmp_path / "root"
  (root / "a" / "b").mkdir(parents=True)
  (root / "a" / "f").write_bytes(b"content")
  (root / "a" / "b" / "empty").touch()
  (root / "to a folder").symlink_to("a")
  (root / "to a file").symlink_to("a/f")
  (root / "out").symlink_to("../outside")
  (root / "out absolute").symlink_to(outside)
  (root / "to a secret").symlink_to(outside / "secret")
  (root / "loop").symlink_to("loop")
  (root / ("n" * 255)).write_text("long")
  (root / "line\nbreak \udcff".encode(errors="surrogateescape").decode(errors="surrogateescape")).write_text("odd")
  os.mkfifo(root / "fifo")
  with socket.socket(socket.AF_UNIX) as bound:
    at = os.getcwd()
    os.chdir(root)
    bound.bind("socket")
    os.chdir(at)
  with open(root / "sparse", "wb") as file:
    file.truncate(10**12)
  descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
  yield Folder(descriptor)
  os.close(descriptor)


@pytest.mark.parametrize(
  "path, content",
  [
    ("a/f", b"content"), ("a/b/empty", b""), ("n" * 255, b"long"), ("line\nbreak \udcff", b"odd"),
    ("missing", None), ("a/missing/f", None), ("a/f/x", None), ("a", None), ("a/b", None),
    ("to a folder/f", None), ("to a file", None), ("out/secret", None), ("out absolute/secret", None),
    ("to a secret", None), ("loop", None), ("loop/x", None), ("fifo", None), ("socket", None), ("sparse", None),
    ("n" * 256, None), ("fifo/x", None),
  ],
)  # fmt: skip
def test_reads_regular_files_below_the_folder_and_nothing_else(folder, path, content):
  assert folder.read(path, 100) == content
  if content is None and path not in ("sparse",):
    assert folder.mode(path) is None


def test_a_file_beyond_the_limit_is_not_read(folder):
  assert folder.read("a/f", 7) == b"content" and folder.read("a/f", 6) is None


def test_a_mode_and_a_link_itself(folder):
  assert folder.mode("a/f") == os.stat("a/f", dir_fd=folder.descriptor).st_mode & 0o7777
  assert folder.stat("loop") is not None and folder.stat("missing") is None and folder.stat("a/f/x") is None


@pytest.mark.parametrize("path", ["../outside/secret", "a/../../outside/secret", "/etc/passwd", "a//f", "", ".."])
def test_a_path_of_ours_that_is_not_below_the_folder_is_an_error(folder, path):
  with pytest.raises(ValueError, match="must be relative"):
    folder.read(path, 10)


def test_no_descriptor_is_left(folder):
  before = len(os.listdir("/proc/self/fd"))
  for path in ("a/f", "a/b/missing", "out/secret", "fifo", "a/missing/x/y", "sparse", "a"):
    folder.read(path, 100)
  assert len(os.listdir("/proc/self/fd")) == before
