"""Device calls, planned on the host: which rows a prefill or decode call works on, and with what arrays."""

import dataclasses
import functools

import numpy as np

from jaxagent.sampling import programs, rules
from jaxagent.sampling.session import Session, Turn

STEPS_PER_CALL, PREFILL_TOKENS = 16, 1024  # an engine's by default
CHUNKS = (16, 128)  # tokens of a row that one prefill call processes
FEW = 4  # rows of the small prefill call; twice as many in the small decode call
CALL_COST = 256  # what a prefill call costs beside its tokens, in tokens


@dataclasses.dataclass(frozen=True)
class Call:
  """One device call: the arrays of its program, and whose work it does."""

  prefills: bool
  arrays: tuple
  work: list[tuple[int, Turn, int, int]]  # index in the arrays, turn, first stream position, tokens to prefill


def prefill_shapes(slots: int, capacity: int, budget: int) -> list[tuple[int, int]]:
  """(rows, tokens a row) of the prefill calls: as many rows as `budget` tokens allow, and a few of the short chunk."""
  short, long = (min(chunk, capacity) for chunk in CHUNKS)
  return sorted({(min(FEW, slots), short), *((min(max(budget // chunk, 1), slots), chunk) for chunk in (short, long))})


def plan_prefill(pending: list[Session], shapes: list[tuple[int, int]], slots: int) -> Call:
  pending = sorted(pending, key=lambda s: (-s._pending, s._row))

  def use(shape):  # tokens that matter for each unit of cost
    rows, chunk = shape
    return sum(min(s._pending, chunk) for s in pending[:rows]) / (rows * chunk + CALL_COST)

  rows, chunk = max(shapes, key=use)
  place = _places(pending[:rows], rows, slots)
  tokens, position = np.zeros((rows, chunk), np.int32), np.full((rows, chunk), -1, np.int32)
  prefix_length = np.zeros(rows, np.int32)
  work = []
  for at, session in place.items():
    start = session._processed
    size = min(session._pending, chunk)
    tokens[at, :size] = session.tokens[start : start + size]
    position[at, :size] = np.arange(start, start + size)
    prefix_length[at] = session.prefix_length
    work.append((at, session._turn, start, size))
  return Call(True, (_row_index(place, rows, slots), tokens, position, prefix_length), work)


def plan_decode(ready: list[Session], slots: int, capacity: int) -> Call:
  few = min(2 * FEW, slots)
  size = few if len(ready) <= few else slots
  place = _places(ready, size, slots)
  rows = filler(size)
  for at, session in place.items():
    _fill(rows, at, session, capacity)
  work = [(at, session._turn, len(session.tokens) - 1, 0) for at, session in place.items()]
  return Call(False, (_row_index(place, size, slots), rows), work)


def _places(sessions: list[Session], size: int, slots: int) -> dict[int, Session]:
  """Where each session stands in a call of `size` rows: at its own row if all of them take part."""
  return {session._row if size == slots else i: session for i, session in enumerate(sessions)}


def _row_index(place: dict[int, Session], size: int, slots: int) -> np.ndarray | None:
  if size == slots:
    return None
  index = np.full(size, slots, np.int32)
  index[list(place)] = [session._row for session in place.values()]
  return index


def filler(size: int) -> programs.Decoding:
  """Rows that decode nothing."""
  whole, real = functools.partial(np.full, size, dtype=np.int32), functools.partial(np.full, size, dtype=np.float32)
  ids, added = np.full((size, rules.BIASES), rules.NO_ID, np.int32), np.zeros((size, rules.BIASES), np.float32)
  return programs.Decoding(
    token=whole(0), position=whole(-1), left=whole(0), prefix_length=whole(0), key=np.zeros((size, 2), np.uint32),
    stop=np.full((size, programs.STOP_IDS), -1, np.int32),
    rules=rules.Rules(real(1), whole(0), real(1), real(0), rules.Bias(ids, added, real(0))),
  )  # fmt: skip


def _fill(rows: programs.Decoding, at: int, session: Session, capacity: int) -> None:
  turn, length = session._turn, len(session.tokens)
  sampling = turn.sampling
  rows.token[at], rows.position[at] = session.tokens[-1], length - 1
  rows.prefix_length[at] = session.prefix_length
  rows.left[at] = min(sampling.max_tokens - (length - turn.start), capacity - length)
  rows.key[at] = session._key
  rows.stop[at, : len(sampling.stop_ids)] = sampling.stop_ids
  rows.rules.temperature[at], rows.rules.top_p[at] = sampling.temperature, sampling.top_p
  rows.rules.top_k[at], rows.rules.min_p[at] = min(sampling.top_k, np.iinfo(np.int32).max), sampling.min_p
  if sampling.biased:
    added = dict(sampling.logit_bias)
    ids = list(added) if sampling.allowed is None else list(sampling.allowed)
    rows.rules.bias.id[at, : len(ids)] = ids
    rows.rules.bias.added[at, : len(ids)] = [added.get(i, 0.0) for i in ids]
    rows.rules.bias.rest[at] = 0.0 if sampling.allowed is None else -np.inf
