"""An engine without a model: it writes what a function of the conversation so far says."""

import asyncio
import contextlib
import random

import jax
import numpy as np

from jaxagent.types import Completion


class ScriptedEngine:
  """`write(text so far, rng) -> text or ids` of the next turn; `eot` is added to texts. `delay` sleeps at random.

  `session.stream` is what a real engine would hold in its cache.
  """

  def __init__(self, tokenizer, eot, write, *, delay=0.0, experts=None, capacity=1000):
    self.tokenizer, self.eot, self.write, self.delay, self.experts = tokenizer, eot, write, delay, experts
    self.capacity = capacity
    self.sessions, self.participants, self.most = [], 0, 0

  def open(self, ids, *, key, index):
    session = Session(self, list(ids), np.asarray(jax.random.key_data(jax.random.fold_in(key, index))).tolist())
    self.sessions.append(session)
    return session

  @contextlib.asynccontextmanager
  async def participant(self):
    self.participants += 1
    self.most = max(self.most, self.participants)
    try:
      yield
    finally:
      self.participants -= 1


class Session:
  def __init__(self, engine, stream, key):
    self.engine, self.stream, self.key, self.turn, self.processed, self.closed = engine, stream, key, 0, 0, False
    self.asked = []

  async def sample(self, sampling):
    assert not self.closed
    self.asked.append(sampling)
    rng = random.Random(f"{self.key}:{self.turn}")
    self.turn += 1
    await asyncio.sleep(self.engine.delay * random.random())
    said = self.engine.write(self.engine.tokenizer.decode(self.stream), rng)
    said = said if sampling.allowed is None else sampling.allowed[:1]
    ids = [*self.engine.tokenizer.encode(said), self.engine.eot] if isinstance(said, str) else list(said)
    stopped = len(ids) <= sampling.max_tokens and (ids[-1] in sampling.stop_ids or not isinstance(said, str))
    ids = ids[: sampling.max_tokens]
    self.stream += ids
    logp = np.array([-rng.random() for _ in ids])
    routing = None
    if self.engine.experts:
      new = len(self.stream) - 1 - self.processed
      routing, self.processed = np.full((new, *self.engine.experts), self.turn, np.int16), len(self.stream) - 1
    sampled = logp / 2 if sampling.truncates else logp
    return Completion(
      np.array(ids), logp, sampled, np.zeros(len(ids), int), "stop" if stopped else "length", -2 * logp, routing
    )

  def append(self, ids):
    assert not self.closed
    self.stream += list(ids)

  def close(self):
    self.closed = True
