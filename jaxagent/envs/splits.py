"""Which split a task belongs to: "train" and "eval" share neither seeds nor problems."""

import hashlib

SPLITS = ("train", "eval")


def require_split(split: str) -> str:
  if split not in SPLITS:
    raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
  return split


def task_seed(split: str, index: int) -> int:
  """2 * index + [split is "eval"]: no two tasks, of the same split or of different ones, share a seed."""
  require_split(split)
  if index < 0:
    raise ValueError(f"a task's index must be at least 0, got {index}")
  return 2 * index + SPLITS.index(split)


def digest(text: str) -> float:
  """A hash of the text in [0, 1), the same on every machine."""
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def split_of(text: str, *, held_out: float) -> str:
  """The split that a problem belongs to, by its text alone: the share `held_out` of all problems is "eval"."""
  return "eval" if digest(text) < held_out else "train"
