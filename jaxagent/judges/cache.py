"""Replies on disk, by the exact request, so that a resumed run reads what the first one was told."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxagent.judges.base import Reply, digest


class Cache:
  """A file for each request, written whole or not at all. A file that is damaged, or of another request, is a miss.

  Several processes may share a folder: who writes last wins, and readers see one whole reply or the other.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = epath.Path(folder)

  def get(self, request: Mapping[str, Any]) -> Reply | None:
    try:
      entry = json.loads(self._path(request).read_text())
      text, tokens = entry["text"], entry["tokens"]
      whole = entry["sum"] == _checksum(text, tokens) and digest(entry["request"]) == digest(request)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
      return None
    return Reply(text, tokens) if whole else None

  def put(self, request: Mapping[str, Any], reply: Reply) -> None:
    path = self._path(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"request": request, "text": reply.text, "tokens": reply.tokens, "sum": _checksum(reply.text, reply.tokens)}
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(json.dumps(entry))  # ASCII: lone surrogates too
    beside.replace(path)

  def _path(self, request: Mapping[str, Any]) -> epath.Path:
    name = digest(request)
    return self.folder / name[:2] / f"{name}.json"


def _checksum(text: str, tokens: int) -> str:
  return hashlib.sha256(f"{tokens} {text}".encode("utf-8", "surrogatepass")).hexdigest()
