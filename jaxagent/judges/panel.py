"""A judge with a cache, votes and counts, asked for typed verdicts."""

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from jaxagent.checks import check_options
from jaxagent.judges.base import Judge, JudgeError, Question, Reply, digest
from jaxagent.judges.cache import Cache
from jaxagent.judges.replies import Unparsed

T = TypeVar("T")

COUNTS = ("calls", "cached", "failed", "unparsed", "tokens")


class Panel:
  """What annotators ask: `async with panel: verdict = await panel.ask(question, parse)`; None is no verdict.

  Equal requests of one `async with` are one request, so a state that many rollouts pass through is judged once.
  `concurrency` bounds the calls in flight. `cause` is the last failure, in one line.
  """

  def __init__(self, judge: Judge, *, votes: int = 1, cache: Cache | None = None, concurrency: int = 16):
    check_options(
      "a panel's ",
      (votes >= 1, "votes", votes, "at least 1"),
      (concurrency >= 1, "concurrency", concurrency, "at least 1"),
    )
    self.judge, self.votes, self.cache, self.cause = judge, votes, cache, ""
    self._concurrency, self._free = concurrency, asyncio.Semaphore(concurrency)
    self._asked: dict[str, asyncio.Future] = {}
    self._counts, self._seconds = collections.Counter(), 0.0

  async def __aenter__(self) -> "Panel":
    self._free, self._asked = asyncio.Semaphore(self._concurrency), {}
    if hasattr(self.judge, "__aenter__"):
      await self.judge.__aenter__()
    return self

  async def __aexit__(self, *error) -> None:
    running = [call for call in self._asked.values() if not call.done()]
    for call in running:
      call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    self._asked = {}
    if hasattr(self.judge, "__aexit__"):
      await self.judge.__aexit__(*error)

  async def ask(self, question: Question, parse: Callable[[str], T], *, vote: int = 0) -> T | None:
    """What `parse` reads in the reply; None where there is no reply, or `parse` raised `Unparsed`."""
    reply = await self._reply(question, vote)
    if reply is None:
      return None
    try:
      return parse(reply.text)
    except Unparsed as error:
      self._counts["unparsed"] += 1
      self.cause = f"{question.kind}: a reply that does not parse: {error}"
      return None

  async def poll(self, question: Question, parse: Callable[[str], T]) -> list[T] | None:
    """`votes` verdicts on the same question, without those that are missing; None unless more than half are there."""
    cast = await asyncio.gather(*(self.ask(question, parse, vote=vote) for vote in range(self.votes)))
    there = [verdict for verdict in cast if verdict is not None]
    return there if 2 * len(there) > self.votes else None

  def metrics(self) -> dict[str, float]:
    """Counts since the last time: `judge/calls` that were made, replies from the cache, failures, replies that did not
    parse, tokens; `time/judge` are the seconds of all calls together."""
    found = {f"judge/{name}": float(self._counts[name]) for name in COUNTS} | {"time/judge": self._seconds}
    self._counts, self._seconds = collections.Counter(), 0.0
    return found

  async def _reply(self, question: Question, vote: int) -> Reply | None:
    request = self.judge.request(question, vote)
    if request is None:
      return await self._called(question, vote, None)
    name = digest(request)
    if name not in self._asked:
      self._asked[name] = asyncio.ensure_future(self._called(question, vote, request))
    return await asyncio.shield(self._asked[name])  # who is cancelled leaves the call to the others

  async def _called(self, question: Question, vote: int, request: Mapping[str, Any] | None) -> Reply | None:
    kept = None if request is None or self.cache is None else self.cache.get(request)
    if kept is not None:
      self._counts["cached"] += 1
      return kept
    async with self._free:
      reply = await self._timed(self.judge.reply(question, vote), question.kind)
    if reply is None:
      return None
    self._counts["tokens"] += reply.tokens
    if request is not None and self.cache is not None:
      self.cache.put(request, reply)
    return reply

  async def _timed(self, call: Awaitable[Reply], kind: str) -> Reply | None:
    start = time.perf_counter()
    self._counts["calls"] += 1
    try:
      return await call
    except Exception as error:  # whatever a judge raises, it gave no verdict
      self._counts["failed"] += 1
      words = str(error) if isinstance(error, JudgeError) else f"{type(error).__name__}: {error}"
      self.cause = " ".join(f"{kind}: {words}".split())
      return None
    finally:
      self._seconds += time.perf_counter() - start


def majority(votes: list[int]) -> int:
  """The most frequent vote, of several the largest."""
  counts = collections.Counter(votes)
  most = max(counts.values())
  return max(vote for vote, count in counts.items() if count == most)
