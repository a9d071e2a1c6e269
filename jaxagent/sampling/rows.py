"""Who holds each row of the cache, and what it holds: keys of a stream's leading tokens.

A row keeps its keys when its session has gone, until another's are written there. A stream that begins as another one
does copies a row instead of processing the tokens again: the samples of one prompt, prompts with one system message.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxagent.models.policy import Policy
from jaxagent.sampling.session import Session

SHARE = 16  # tokens that are worth the copy of a row


@dataclasses.dataclass(frozen=True)
class Held:
  """Keys of the first `count` of `tokens`; the row has been written up to `written`."""

  tokens: list[int]
  count: int
  written: int
  prefix_length: int
  routing: np.ndarray | None


@dataclasses.dataclass
class Offloaded:
  """A row in host memory: `part` of a cache, once the device has sent it."""

  count: int
  written: int
  epoch: int
  generation: int
  part: Any = None


class Rows:
  def __init__(self, policy: Policy, slots: int):
    self.sessions: list[Session | None] = [None] * slots
    self.epoch = 0  # of the weights: keys of an older one are not shared
    self._left: list[Held | None] = [None] * slots  # by sessions that have gone
    self._rewind = policy.rewind
    self._keeps_prefix = policy.max_prefix is not None

  def free(self) -> list[int]:
    """Those that hold nothing first."""
    rows = [row for row, session in enumerate(self.sessions) if session is None]
    return sorted(rows, key=lambda row: self._left[row] is not None)

  def give(self, row: int, session: Session) -> None:
    self.sessions[row], session._row = session, row

  def release(self, session: Session, *, keep: bool = True) -> None:
    """Takes the session's row away; with `keep` its keys can still be copied."""
    row = session._row
    if row is not None:
      if session._processed:
        whole = keep and session._epoch == self.epoch
        self._left[row] = self._held(row) if whole else None
      self.sessions[row] = None
    session._row, session._processed, session._written = None, 0, 0

  def forget(self, row: int | None = None) -> None:
    """What sessions that have gone left in a row, or in all."""
    for at in range(len(self._left)) if row is None else [row]:
      self._left[at] = None

  def shared(self, session: Session) -> tuple[int, int, np.ndarray | None]:
    """(row, tokens, routing) of what holds the most of the session's tokens; 0 tokens where nothing is worth a copy."""
    best = (-1, 0, None)
    for row in sorted(range(len(self.sessions)), key=lambda row: row != session._row):  # its own needs no copy
      held = self._held(row, apart_from=session)
      if held is not None and (count := self._common(session, held)) > max(best[1], SHARE - 1):
        best = (row, count, None if held.routing is None else held.routing[:count])
    return best

  def promised(self, session: Session, others: list[Session]) -> int:
    """Tokens of the session that one of `others`, which are being processed, will hold."""
    plans = (Held(s.tokens, len(s.tokens) - 1, len(s.tokens) - 1, s.prefix_length, None) for s in others)
    return max((self._common(session, plan) for plan in plans), default=0)

  def _held(self, row: int, apart_from: Session | None = None) -> Held | None:
    session = self.sessions[row]
    if session is None or session is apart_from or not session._processed:
      return self._left[row]
    if session._epoch != self.epoch:
      return None
    count, routing = session._processed, session._known_routing()
    return Held(session.tokens[:count], count, session._written, session.prefix_length, routing)

  def _common(self, session: Session, held: Held) -> int:
    count = _common_prefix(session.tokens, held.tokens, min(len(session.tokens) - 1, held.count))
    if held.routing is not None:
      count = min(count, len(held.routing))
    if self._rewind is None:
      return count
    same_layout = not self._keeps_prefix or (
      count <= min(session.prefix_length, held.prefix_length) or session.prefix_length == held.prefix_length
    )
    return count if same_layout and held.written - count <= self._rewind else 0


def _common_prefix(a: list[int], b: list[int], most: int) -> int:
  if a[:most] == b[:most]:
    return most
  low, high = 0, most  # the first `low` are equal, the first `high` are not
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
  return low
