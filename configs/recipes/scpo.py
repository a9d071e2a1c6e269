"""The encoder of `configs/recipes/scpo.yaml`: counts of words, for words that are arithmetic and not language."""

import re
import zlib

import numpy as np


def encode(texts: list[str]) -> np.ndarray:
  """Unit vectors [n, 256]: each word and sign is counted at the place of its hash."""
  out = np.zeros((len(texts), 256), np.float32)
  for row, text in zip(out, texts):
    for word in re.findall(r"\w+|[^\w\s]", text):
      row[zlib.crc32(word.encode()) % 256] += 1
  return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-9)
