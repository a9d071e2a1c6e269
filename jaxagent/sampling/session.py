"""Sessions: token streams that a caller extends and the engine samples from, turn by turn."""

import asyncio
import contextvars
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxagent.sampling.request import Sampling
from jaxagent.types import Completion

participants: contextvars.ContextVar = contextvars.ContextVar("participants", default={})  # noqa: B039 (never mutated)


class Busy(RuntimeError):
  """The engine has as many requests in flight as its `max_pending` allows; try again later."""


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens of a turn that goes on, with the log-probs of the policy (nats). No stop string can take them back."""

  ids: Int[np.ndarray, "n"]
  logp_rollout: Float[np.ndarray, "n"]


@dataclasses.dataclass(eq=False)
class Turn:
  """A request in flight and what it has sampled so far."""

  session: "Session"
  sampling: Sampling
  order: int
  start: int  # tokens of the stream before the turn
  first_routing: int  # the stream position whose routing is reported first
  closes: bool = False  # the session ends with this turn
  drawn: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)  # logps, entropy, version
  searched: int = 0  # tokens that complete no stop string
  streamed: int = 0  # tokens handed out as pieces
  pieces: asyncio.Queue | None = None
  future: asyncio.Future | None = None
  completion: Completion | None = None
  error: BaseException | None = None

  @property
  def done(self) -> bool:
    return self.completion is not None or self.error is not None

  def hand_out(self) -> None:
    """What was sampled since the last piece, to who reads them."""
    ids = self.session.tokens[self.start + self.streamed :]
    if self.pieces is not None and ids:
      logps = np.concatenate([logp for logp, *_ in self.drawn])
      self.pieces.put_nowait(Piece(np.array(ids, np.int32), logps[self.streamed : self.streamed + len(ids)]))
      self.streamed += len(ids)

  def settle(self, completion: Completion | None = None, error: BaseException | None = None) -> None:
    self.completion, self.error = completion, error
    if self.future is not None and not self.future.done():
      self.future.set_exception(error) if error else self.future.set_result(completion)
    if self.pieces is not None:
      self.pieces.put_nowait(None)


class Session:
  """One token stream: a prompt, then turns that the policy samples and tokens that are appended between them.

  It takes a cache row at its first `sample` and holds it until `close` (or the end of its participant), so that later
  turns process only new tokens. Where others wait for rows, one that is not sampling may lose its row: its keys move to
  host memory and come back at its next turn, or, beyond what the engine offloads, its tokens are processed again. So
  sessions never deadlock.
  """

  def __init__(self, engine: Any, tokens: list[int], key: np.ndarray, index: int, participant: "Participant | None"):
    self.tokens = tokens  # the stream so far; read it, change it by `append`
    self.prefix_length = len(tokens)  # of the first prompt, which a prefix-sliding policy keeps
    self.index = index
    self.completion: Completion | None = None  # of the last turn that ended
    self.closed = False
    self._engine = engine
    self._key = key
    self._participant = participant
    self._turn: Turn | None = None
    self._row: int | None = None
    self._processed = 0  # leading tokens whose keys the row holds
    self._written = 0  # the same before the stream was cut back
    self._epoch = -1  # of the weights that all of these keys come from
    self._host: Any = None  # keys that were moved to host memory
    self._reported = 0  # leading tokens whose routing a completion has reported
    self._routing: list[np.ndarray] = []
    self._routed = 0  # leading tokens whose routing is known

  @property
  def room(self) -> int:
    """Tokens that the stream can still take."""
    return self._engine.capacity - len(self.tokens)

  async def sample(self, sampling: Sampling | None = None, *, timeout: float | None = None) -> Completion:
    """The next turn. Cancelled, or after `timeout` seconds, it is taken back and the row freed; the session can go on.

    Errors: ValueError for a closed session, one that is already sampling, no room left, or a request that the engine
    cannot serve; Busy where the engine has `max_pending` requests; TimeoutError; FloatingPointError where the
    logits are not finite.
    """
    turn = self._submit(sampling)
    try:
      async with asyncio.timeout(timeout):
        return await turn.future
    except (asyncio.CancelledError, TimeoutError):
      self._engine._abort(turn)
      raise

  async def stream(self, sampling: Sampling | None = None) -> AsyncIterator[Piece]:
    """The next turn, handed out while it is sampled; then `completion` is the whole. Leaving early takes the turn back.

    Errors: those of `sample`.
    """
    turn = self._submit(sampling, pieces=asyncio.Queue())
    ended = False
    try:
      while (piece := await turn.pieces.get()) is not None:
        yield piece
      ended = True
      await turn.future
    finally:
      if not ended:
        self._engine._abort(turn)

  def _submit(self, sampling: Sampling | None, pieces: asyncio.Queue | None = None) -> Turn:
    turn = self._engine._submit(self, sampling or Sampling())
    turn.future, turn.pieces = asyncio.get_running_loop().create_future(), pieces
    self._engine._notify()
    return turn

  def append(self, ids: Sequence[int]) -> None:
    """Adds tokens that the policy did not sample. Errors: ValueError if they are not ids, or more than `room`."""
    self._check_idle("append to")
    ids = self._engine._ids(ids, "appended tokens")
    if len(ids) > self.room:
      raise ValueError(
        f"{len(ids)} tokens appended to a session of {len(self.tokens)} exceed the engine's capacity of"
        f" {self._engine.capacity}; shorten them, end the episode (Session.room says what fits), or raise the capacity"
      )
    self.tokens.extend(ids)

  def close(self) -> None:
    """Frees the row. A turn in flight ends with an error. Closing twice does nothing."""
    if not self.closed:
      self.closed = True
      self._engine._close(self)

  def __enter__(self) -> "Session":
    return self

  def __exit__(self, *error) -> None:
    self.close()

  @property
  def _rank(self) -> tuple[int, int]:
    return self._participant.number if self._participant else 0, self.index

  @property
  def _pending(self) -> int:
    """Tokens to process before the last one can be decoded from."""
    return max(len(self.tokens) - 1 - self._processed, 0)

  def _check_idle(self, action: str) -> None:
    if self.closed:
      raise ValueError(f"cannot {action} a closed session; open a new one")
    if self._turn is not None:
      raise ValueError(f"cannot {action} a session while it samples a turn; await that turn first")

  def _record_routing(self, at: int, rows: np.ndarray | None) -> None:
    """Keeps the rows, of stream positions from `at` on, that were not known before."""
    if rows is not None:
      new = rows[max(self._routed - at, 0) :]
      self._routing.append(new)
      self._routed += len(new)

  def _known_routing(self) -> np.ndarray | None:
    if len(self._routing) > 1:
      self._routing = [np.concatenate(self._routing)]
    return self._routing[0] if self._routing else None

  def _cut(self, length: int) -> None:
    """Drops the tokens past `length`; their keys are overwritten before anything can attend to them."""
    del self.tokens[length:]
    self._processed = min(self._processed, length - 1)
    if self._routed > length - 1:
      self._routing, self._routed = [self._known_routing()[: length - 1]], length - 1


class Participant:
  """An episode, as the engine counts them: `async with engine.participant(): ...`; sessions opened inside belong to it.

  In lockstep the engine makes a device call only when every participant has a request in flight, so what a call holds
  depends on the inputs and not on timing. At its end the participant's sessions are closed. Enter before the first
  `sample` of any; agents that sample at the same time enter one each, and one that waits for another is not entered.
  """

  def __init__(self, engine: Any):
    self._engine = engine
    self.number = -1
    self.sessions: list[Session] = []

  async def __aenter__(self) -> "Participant":
    self.number = self._engine._enter(self)
    self._outer = participants.get()
    participants.set({**self._outer, self._engine: self})
    return self

  async def __aexit__(self, *error) -> None:
    for session in self.sessions:
      session.close()
    participants.set(self._outer)
    self._engine._leave(self)
