"""An engine in which a hand guides a tiny policy's pen, so that its rollouts are like those of one that has learned.

Each rollout keeps to a demonstration, departs from it, or is the policy's own. Guided words are sampled token by token
with one id allowed, so their log-probs, versions and routing are the policy's, as the trainer will see them.
"""

import dataclasses
import functools
import random
import re

import jax
import numpy as np

from jaxagent.rollout import episode
from jaxagent.types import Completion

HABITS = ("right", "right", "late", "early", "clumsy", "own")  # of a rollout: what it makes of the demonstration


@dataclasses.dataclass(frozen=True)
class Spoken:
  """What a demonstration says, turn by turn, and what it hears after the first."""

  texts: tuple[str, ...]
  heard: str


class Guided:
  """`known`: conversations by their first prompt. Whatever else is asked of the engine goes to it."""

  def __init__(self, engine, chat, known: dict[str, list[Spoken]]):
    self._engine, self._chat, self._known = engine, chat, known

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def open(self, ids, *, key=None, index=None):
    session = self._engine.open(ids, key=key, index=index)
    found = self._known.get(self._chat.tokenizer.decode(list(ids)), [])
    rng = random.Random(str([np.asarray(jax.random.key_data(key)).tolist(), index, self._engine.version]))
    habit = rng.choice(HABITS)
    return session if habit == "own" or not found else GuidedSession(session, self._chat, found, habit)


class GuidedSession:
  def __init__(self, session, chat, found: list[Spoken], habit: str):
    self._session, self._chat, self._found, self._habit = session, chat, found, habit
    self._turn, self._opening = 0, ()

  def __getattr__(self, name):
    return getattr(self._session, name)

  async def sample(self, sampling):
    if sampling.allowed is not None:
      self._opening = sampling.allowed
      return await self._session.sample(sampling)
    text = self._next()
    if text is None:
      return await self._session.sample(sampling)
    ids = [*self._chat.tokenizer.encode(text), self._chat.eot]
    ids, self._opening = ids[1:] if (ids[0],) == self._opening else ids, ()
    pieces = []
    for token in ids[: sampling.max_tokens]:
      pieces.append(await self._session.sample(dataclasses.replace(sampling, max_tokens=1, allowed=(token,))))
    return joined(pieces)

  def _next(self) -> str | None:
    if self._turn == 1 + (self._habit == "clumsy"):
      stream = self._chat.tokenizer.decode(list(self._session.tokens))
      self._found = [spoken for spoken in self._found if spoken.heard in stream]
    texts = changed(self._found[0].texts, self._habit) if self._found else ()
    self._turn += 1
    return texts[self._turn - 1] if self._turn <= len(texts) else None


def joined(pieces: list[Completion]) -> Completion:
  """One turn, drawn from the whole distribution as far as the trainer knows."""
  whole = functools.reduce(episode._joined, pieces)
  return dataclasses.replace(whole, logp_sampled=whole.logp_rollout)


def changed(texts: tuple[str, ...], habit: str) -> tuple[str, ...]:
  """`late`: the last call is left out; of less than two, a command of bash lacks a letter, or the last words are wrong.

  `early`: only the last words. `clumsy`: a call of a tool that there is not, first.
  """
  if habit == "clumsy":
    return ("<none>x</none>", *texts)
  if habit == "early":
    return texts[-1:]
  if habit == "late":
    spoiled = re.sub(r"(<bash>\w+ )\w", r"\1", texts[0])
    if spoiled != texts[0]:
      return (spoiled, *texts[1:])
    return (*texts[:-2], texts[-1]) if len(texts) > 2 else (*texts[:-1], "-")
  return texts


def demonstrated(tasks, chat, count: int) -> dict[str, list[Spoken]]:
  """From the first `count` demonstrations; of what only reads files, the first is kept."""
  known: dict[str, list[Spoken]] = {}
  for index in range(count):
    messages, tools = tasks.demonstration(index)
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    prompt = chat.tokenizer.decode(chat.render(messages[:first], tools))
    said = [chat._words(m) for m in messages if m["role"] == "assistant"]
    texts = tuple(text for i, text in enumerate(said) if not i or not text.startswith("<read>"))
    heard = messages[first + 1]["content"] if len(messages) > first + 1 else ""
    known.setdefault(prompt, []).append(Spoken(texts, heard))
  return known
