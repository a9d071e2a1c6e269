"""Named phases of a step: how long each took, and which knob to turn when one runs out of memory."""

import contextlib
import time
from collections.abc import Iterator

KNOBS = {
  "rollout": "rollout.slots or rollout.max_tokens",
  "eval": "rollout.slots or rollout.max_tokens",
  "validate": "rollout.slots or rollout.max_tokens",
  "score": "training.microbatch_rows or training.logprob_chunk",
  "update": "training.microbatch_rows or training.logprob_chunk, or set model.remat: true",
  "critic": "training.microbatch_rows, or set model.remat: true",
  "sft": "training.microbatch_rows or training.logprob_chunk, or set model.remat: true",
  "checkpoint": "run.checkpoint_keep",
}


class OutOfMemory(RuntimeError):
  """A phase did not fit; the message names it and the knob."""


class NonFinite(RuntimeError):
  """Loss or gradient was NaN or infinite: nothing was applied, and the batch is kept where the message says."""


class Phases:
  """Adds up wall seconds by phase: `with phases("update"): ...`; `phases.seconds` is a dict."""

  def __init__(self):
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      with out_of_memory_named(name):
        yield
    finally:
      self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

  def metrics(self) -> dict[str, float]:
    return {f"time/{name}": seconds for name, seconds in self.seconds.items()}


@contextlib.contextmanager
def out_of_memory_named(phase: str) -> Iterator[None]:
  try:
    yield
  except (MemoryError, RuntimeError) as error:  # XLA reports a failed allocation as a RuntimeError with its status code
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
      first = text.splitlines()[0] if text else type(error).__name__
      knob = KNOBS.get(phase, "the batch")
      raise OutOfMemory(f"out of memory in the {phase} phase; lower {knob} ({first})") from error
    raise
