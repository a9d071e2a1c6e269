"""An endpoint in a thread, and an engine that says what it is told."""

import asyncio
import itertools
import random
import threading
import types

import numpy as np
import openai
import uvicorn

from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.serve import server
from jaxagent.serve.app import Served, application
from jaxagent.types import Completion


class Live:
  """A server in a thread. `client()` is OpenAI's own."""

  def __init__(self, served: Served, api_key: str | None = None, grace: int | None = None):
    self.served, self.engine, self.chat = served, served.engine, served.chat
    self.sessions: list = []  # every one that was opened
    open_session = self.engine.open
    self.engine.open = lambda *args, **named: self.sessions.append(open_session(*args, **named)) or self.sessions[-1]
    self.bound = server.bind("127.0.0.1", 0)
    self.url = server.url(self.bound)
    app = application(served, api_key=api_key)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=grace)
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.bound]})

  def __enter__(self):
    self.bound.listen()
    self._thread.start()
    return self

  def stop(self):
    self._server.should_exit = True

  def __exit__(self, *_):
    self.stop()
    self._thread.join()
    self.bound.close()

  def client(self, kind=openai.OpenAI, api_key="none", **named):
    return kind(base_url=self.url, api_key=api_key, max_retries=0, timeout=60, **named)


class Teller:
  """An engine without a model: each session writes the next of the texts (or lists of ids), with the end of turn.

  Pieces have random sizes. After "bad" it fails. What is held back for a stop string comes with the completion.
  """

  def __init__(self, texts, *, seed=0, waits=False):
    self.texts, self.rng, self.waits = iter(texts), random.Random(seed), waits
    self.policy = types.SimpleNamespace(vocab_size=259, max_prefix=None)
    self.capacity, self.version, self.tokenizer = 1000, 0, byte_tokenizer()
    self.prompts: list[str] = []

  def open(self, ids, *, key=None):
    self.prompts.append(self.tokenizer.decode(ids))
    return Told(self, next(self.texts))


class Told:
  def __init__(self, engine, text):
    self.engine, self.text, self.closed, self.completion = engine, text, False, None

  async def sample(self, sampling):
    if self.engine.waits:
      await asyncio.Event().wait()
    if self.text == "bad":
      raise FloatingPointError("the logits are not finite")
    return told(self.engine.tokenizer, self.text, sampling)

  async def stream(self, sampling):
    whole = told(self.engine.tokenizer, self.text, sampling)
    most = len(whole.ids) if not sampling.stop else max(len(whole.ids) - max(map(len, sampling.stop)), 0)
    for start, end in cuts(self.engine.rng, most):
      yield types.SimpleNamespace(ids=whole.ids[start:end], logp_rollout=whole.logp_rollout[start:end])
      await asyncio.sleep(0)
    if self.text == "bad":
      raise FloatingPointError("the logits are not finite")
    if self.engine.waits:
      await asyncio.Event().wait()
    self.completion = whole

  def close(self):
    self.closed = True


def told(tokenizer, text, sampling):
  """The completion of a model that says `text`: up to the token that completes a stop string, if there is one."""
  ids = [*tokenizer.encode(text), tokenizer.eos_id] if isinstance(text, str) else list(text)
  stopped = [n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in sampling.stop)]
  ids = ids[: stopped[0]] if stopped else ids
  finish = "stop" if stopped or ids[-1] in sampling.stop_ids else "length"
  if len(ids) > sampling.max_tokens:
    ids, finish = ids[: sampling.max_tokens], "length"
  logp = -np.arange(1, len(ids) + 1, dtype=np.float32)
  return Completion(np.array(ids, np.int32), logp, logp, np.zeros(len(ids), np.int32), finish)


def cuts(rng, size):
  at = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, size)))})
  return list(itertools.pairwise(at))
