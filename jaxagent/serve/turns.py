"""A request's choices as sessions of the engine: all of them to their end, or piece by piece."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.sampling import Busy, Engine, Sampling, Session
from jaxagent.serve.reading import Answer, Reader, Rules, read_completion
from jaxagent.serve.schemas import ApiError
from jaxagent.types import Completion

RETRY_AFTER = 1  # seconds


@dataclasses.dataclass(frozen=True)
class Job:
  """What a request asks for: `n` choices of each prompt, in the prompts' order. `source` is the prompt's parameter."""

  prompts: list[list[int]]
  n: int
  seed: int | None
  sampling: Sampling
  rules: Rules
  source: str = "prompt"
  logprobs: bool = False
  token_ids: bool = False
  stream: bool = False
  usage: bool = False  # reported at the stream's end


@dataclasses.dataclass(frozen=True)
class Delta:
  """Tokens that a choice gained, and the text that is certain now. The last one of a choice has its answer."""

  choice: int
  ids: np.ndarray
  logp: np.ndarray
  text: str
  answer: Answer | None = None


def choice_keys(seed: int | None, n: int) -> Sequence[Any]:
  """A key for each of a prompt's choices, from all 64 bits of the seed; None: the engine draws one."""
  if seed is None:
    return [None] * n
  key = jax.random.fold_in(jax.random.key(seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
  return [jax.random.fold_in(key, number) for number in range(n)]


@contextlib.contextmanager
def opened(engine: Engine, job: Job) -> Iterator[list[Session]]:
  """A session for each choice. All are closed at the end, which frees their rows. The engine's errors as ApiErrors."""
  sessions: list[Session] = []
  try:
    keys = choice_keys(job.seed, job.n)
    for prompt in job.prompts:
      sessions.extend(_open(engine, prompt, key, job.source) for key in keys)
    yield sessions
  finally:
    for session in sessions:
      session.close()


def _open(engine: Engine, prompt: list[int], key: Any, source: str) -> Session:
  try:
    return engine.open(prompt, key=key)
  except ValueError as error:
    most = engine.policy.max_prefix
    too_long = len(prompt) >= engine.capacity or (most is not None and len(prompt) > most)
    code = "context_length_exceeded" if too_long else "invalid_value"
    raise ApiError(str(error), param=source, code=code) from error


def as_api_error(error: Exception) -> Exception:
  """A request that the engine cannot serve is the client's error; one too many is to be sent again."""
  if isinstance(error, ValueError):
    return ApiError(str(error))
  if isinstance(error, Busy):
    return ApiError(
      f"the model is busy: {error}", code="rate_limit_exceeded", type="rate_limit_error", status=429,
      headers={"Retry-After": str(RETRY_AFTER)},
    )  # fmt: skip
  return error


async def completions(engine: Engine, job: Job) -> list[Completion]:
  """Every choice, in order. One that fails ends the others."""
  with opened(engine, job) as sessions:
    try:
      async with asyncio.TaskGroup() as group:
        turns = [group.create_task(session.sample(job.sampling)) for session in sessions]
    except* Exception as errors:
      raise as_api_error(_first(errors)) from None
    return [turn.result() for turn in turns]


def _first(errors: BaseExceptionGroup) -> Exception:
  inner = errors.exceptions[0]
  return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


async def deltas(engine: Engine, job: Job) -> AsyncGenerator[Delta, None]:
  """The choices' tokens as they come. Closing it ends the turns that still run."""
  arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()
  with opened(engine, job) as sessions:
    tasks = [asyncio.create_task(_follow(arrived, job, *numbered)) for numbered in enumerate(sessions)]
    try:
      unfinished = len(tasks)
      while unfinished:
        item = await arrived.get()
        if isinstance(item, Exception):
          raise as_api_error(item)
        unfinished -= item.answer is not None
        yield item
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(arrived: asyncio.Queue, job: Job, choice: int, session: Session) -> None:
  reader, seen = Reader(job.rules), 0
  try:
    async with contextlib.aclosing(session.stream(job.sampling)) as pieces:
      async for piece in pieces:
        seen += len(piece.ids)
        arrived.put_nowait(Delta(choice, piece.ids, piece.logp_rollout, reader.read(piece.ids)))
    whole = session.completion
    answer = read_completion(job.rules, whole)
    arrived.put_nowait(Delta(choice, whole.ids[seen:], whole.logp_rollout[seen:], reader.rest(answer), answer))
  except Exception as error:
    arrived.put_nowait(error)
