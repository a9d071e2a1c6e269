"""Documents and questions, as files: `documents.jsonl`, `questions.jsonl` and `corpus.json`, about them."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxagent.envs.dataset import read_jsonl


@dataclasses.dataclass(frozen=True)
class Document:
  title: str
  text: str

  def chunk(self, limit: int) -> str:
    """What the policy reads: the title, a line break, and the text, at most `limit` characters."""
    return f"{self.title}\n{self.text}"[:limit]


@dataclasses.dataclass(frozen=True)
class Question:
  """`answers`: all that are accepted, the usual one first. `queries`: a search for each hop, in order."""

  text: str
  answers: tuple[str, ...]
  queries: tuple[str, ...]

  @property
  def hops(self) -> int:
    return len(self.queries)


@dataclasses.dataclass(frozen=True)
class Corpus:
  documents: tuple[Document, ...]
  questions: tuple[Question, ...]
  sources: dict[str, str] = dataclasses.field(default_factory=dict)  # name and version: licence

  def __post_init__(self):
    if not self.documents or not self.questions:
      raise ValueError(
        f"a corpus needs documents and questions, got {len(self.documents)} and {len(self.questions)}"
      )


FILES = {"documents.jsonl": Document, "questions.jsonl": Question}


def write(corpus: Corpus, folder: str | Path) -> None:
  """ValueError: the folder exists and is not empty."""
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"{folder} exists; choose another folder, or remove it")
  folder.mkdir(parents=True, exist_ok=True)
  for name, rows in zip(FILES, (corpus.documents, corpus.questions)):
    _write_jsonl(folder / name, map(dataclasses.asdict, rows))
  counts = {"documents": len(corpus.documents), "questions": len(corpus.questions), "sources": corpus.sources}
  (folder / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


def read(folder: str | Path) -> Corpus:
  """ValueError: a missing file, a line that is not such a row."""
  documents, questions = (tuple(_rows(os.path.join(folder, name), kind)) for name, kind in FILES.items())
  return Corpus(documents, questions)


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
  with open(path, "w", encoding="utf-8") as file:
    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows(path: str, kind: type):
  if not os.path.isfile(path):
    raise ValueError(f"search: no file {path!r}; build a corpus with: python -m jaxagent.envs.search build FOLDER")
  for where, row in read_jsonl(path):
    try:
      yield kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
    except TypeError as error:
      raise ValueError(f"search: {where}: not a {kind.__name__.lower()}: {error}") from None
