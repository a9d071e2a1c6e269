"""Ctrl-C and SIGTERM (preemption) as a clean stop: at once while nothing can be lost, else at the next safe place."""

import contextlib
import signal
import threading


class Interrupted(KeyboardInterrupt):
  """A signal asked the run to stop; the state of the last finished step is intact."""


class Interrupt:
  """Context manager that turns SIGINT and SIGTERM into `Interrupted`, raised only inside `allowed()` or by `check()`.

  A second signal raises at once. Outside the main thread signals cannot be caught: then it does nothing.
  """

  def __init__(self):
    self.requested: str | None = None
    self._allowed = False
    self._previous: dict[int, object] = {}

  def __enter__(self) -> "Interrupt":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exc) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame) -> None:
    again, self.requested = self.requested is not None, signal.Signals(number).name
    if self._allowed or again:
      raise Interrupted(self.requested)

  @contextlib.contextmanager
  def allowed(self):
    """Work that may be thrown away: sampling, evaluation."""
    self.check()
    self._allowed = True
    try:
      yield
    finally:
      self._allowed = False

  def check(self) -> None:
    if self.requested:
      raise Interrupted(self.requested)
