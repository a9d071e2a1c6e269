"""Documents by a query: BM25, or sentence vectors in an inverted file of 8-bit codes."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from jaxagent.envs.search.corpus import Document

Encode = Callable[[list[str]], Float[np.ndarray, "n d"]]
POINTS_PER_LIST = 39  # that FAISS wants for training each centroid
BATCH = 256  # texts that are encoded at once


class Retriever(Protocol):
  def search(self, query: str, top_k: int) -> list[Document]: ...


class Bm25:
  """Okapi BM25 over title and text, by bm25s; stop words are left out, words are not stemmed.

  Documents that share no word with the query are not found. ValueError: bm25s is not installed.
  """

  def __init__(self, documents: Sequence[Document]):
    self._documents = list(documents)
    self._bm25s = _bm25s()
    self._index = self._bm25s.BM25()
    self._index.index(self._words([f"{d.title} {d.text}" for d in documents]), show_progress=False)

  def search(self, query: str, top_k: int) -> list[Document]:
    words = self._words([query])
    words = [[word for word in words[0] if word in self._index.vocab_dict]]
    if not words[0]:
      return []
    found, scores = self._index.retrieve(words, k=min(top_k, len(self._documents)), show_progress=False)
    return [self._documents[i] for i, score in zip(found[0], scores[0]) if score > 0]

  def _words(self, texts: list[str]) -> list[list[str]]:
    return self._bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


class Dense:
  """Inner product of unit vectors in `IVF{lists},SQ8` (FAISS), `probes` lists a query; flat where documents are few.

  `encode` gives a vector per text; it is called with title and text of each document, and with queries. `vectors`
  spares encoding the documents again: row i is of document i. Measure what the index loses with `recall`.
  ValueError: faiss is not installed; vectors of another number.
  """

  def __init__(
    self,
    documents: Sequence[Document],
    encode: Encode,
    *,
    vectors: Float[np.ndarray, "n d"] | None = None,
    lists: int | None = None,
    probes: int = 8,
  ):
    self._documents, self._encode = list(documents), encode
    self.vectors = encoded(documents, encode) if vectors is None else _unit(vectors)
    if len(self.vectors) != len(self._documents):
      raise ValueError(
        f"search: {len(self.vectors)} vectors for {len(self._documents)} documents; build the vectors again"
      )
    n, width = self.vectors.shape
    self.lists = min(lists or 4 * math.isqrt(n), n // POINTS_PER_LIST)
    faiss = _faiss()
    if self.lists < 2:
      self.index = faiss.IndexFlatIP(width)
    else:
      self._coarse = faiss.IndexFlatIP(width)  # the index refers to it
      kind = faiss.ScalarQuantizer.QT_8bit
      self.index = faiss.IndexIVFScalarQuantizer(self._coarse, width, self.lists, kind, faiss.METRIC_INNER_PRODUCT)
      self.index.train(self.vectors)
      self.index.nprobe = probes
    self.index.add(self.vectors)

  def search(self, query: str, top_k: int) -> list[Document]:
    _, found = self.index.search(_unit(self._encode([query])), top_k)
    return [self._documents[i] for i in found[0] if i >= 0]


def recall(dense: Dense, queries: Sequence[str], *, top_k: int = 5, probes: int | None = None) -> float:
  """Share of the `top_k` nearest documents, by exact search, that the index finds; the mean over the queries."""
  vectors = _in_batches(queries, dense._encode)
  flat = _faiss().IndexFlatIP(vectors.shape[1])
  flat.add(dense.vectors)
  top_k = min(top_k, len(dense.vectors))
  _, exact = flat.search(vectors, top_k)
  inverted = probes is not None and hasattr(dense.index, "nprobe")
  _, found = dense.index.search(
    vectors, top_k, params=_faiss().SearchParametersIVF(nprobe=probes) if inverted else None
  )
  return float(np.mean([len(set(e) & set(f)) / top_k for e, f in zip(exact, found)]))


def encoded(documents: Sequence[Document], encode: Encode) -> Float[np.ndarray, "n d"]:
  return _in_batches([f"{d.title}\n{d.text}" for d in documents], encode)


def as_encode(found: Any, *, what: str) -> Encode:
  """A function of texts, or the `encode` of an object; a class or function without parameters is called for one."""
  if hasattr(found, "encode") and not isinstance(found, type):
    return found.encode
  if isinstance(found, type):
    return as_encode(found(), what=what)
  if not callable(found):
    raise ValueError(f"{what}: expected a function of a list of texts, or an object with `encode`, got {found!r}")
  return found


def load_vectors(folder: str | None) -> Float[np.ndarray, "n d"] | None:
  path = Path(folder or "", "vectors.npy")
  return np.load(path) if folder is not None and path.is_file() else None


def _in_batches(texts: Sequence[str], encode: Encode) -> Float[np.ndarray, "n d"]:
  return _unit(np.concatenate([encode(list(texts[i : i + BATCH])) for i in range(0, len(texts), BATCH)]))


def _unit(vectors: Any) -> Float[np.ndarray, "n d"]:
  vectors = np.ascontiguousarray(vectors, np.float32)
  return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


@functools.cache
def _bm25s():
  try:
    import bm25s
  except ImportError as error:
    raise ValueError(f"the search environment needs bm25s ({error}): pip install 'jaxagent[search]'") from None
  return bm25s


@functools.cache
def _faiss():
  try:
    import faiss
  except ImportError as error:
    raise ValueError(f"dense retrieval needs faiss-cpu ({error}): pip install 'jaxagent[search]'") from None
  return faiss
