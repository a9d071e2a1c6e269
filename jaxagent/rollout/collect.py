"""Many episodes at once: groups of samples of the same tasks."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import jax

from jaxagent.envs.base import Tasks
from jaxagent.models.chat import Chat
from jaxagent.rollout.episode import Limits, run_episode
from jaxagent.sampling.request import Sampling
from jaxagent.types import Trajectory

Result = TypeVar("Result")


async def collect_async(
  engine,
  chat: Chat,
  tasks: Tasks,
  *,
  split: str,
  indices: Sequence[int],
  samples: int,
  sampling: Sampling,
  limits: Limits,
  key,
  env: int = 0,
  lockstep: bool = True,
  finished: Callable[[list[Trajectory]], None] | None = None,
) -> list[Trajectory]:
  """`samples` episodes of every task in `indices`: a group per task; trajectories in order of (task, sample, agent).

  Group ids count the indices, rollout ids the episodes. An episode's key is (key, task index, sample), so a result does
  not depend on the order of the tasks, on the others, or on timing. `lockstep`: the engine decodes when every running
  episode waits for it, which makes its batches, and so its rounding, independent of timing too; without it, it decodes
  whatever is there. `finished` is called with the trajectories of each episode as it ends.

  ValueError: no indices, an index twice (its samples would be the same), an index outside the split; and those of
  `run_episode`. The first error ends all episodes.
  """
  _check_indices(tasks, split, indices, samples)

  everyone = asyncio.Barrier(len(indices) * samples)  # all take part before the first one samples

  async def one(group: int, index: int, sample: int) -> list[Trajectory]:
    environment, seed = tasks.environment(split, index)
    folded = jax.random.fold_in(jax.random.fold_in(key, index), sample)
    ids = {"task": index, "group": group, "rollout": group * samples + sample, "env": env}
    async with engine.participant() if lockstep else contextlib.nullcontext():
      await everyone.wait()
      episode = await run_episode(engine, chat, environment, seed, sampling=sampling, limits=limits, key=folded, **ids)
    if finished is not None:
      finished(episode)
    return episode

  jobs = [one(group, index, sample) for group, index in enumerate(indices) for sample in range(samples)]
  return [trajectory for episode in await together(jobs) for trajectory in episode]


def collect(engine, chat: Chat, tasks: Tasks, **arguments) -> list[Trajectory]:
  """`collect_async`, run to its end; also where an event loop is running already (a notebook)."""
  return run(collect_async(engine, chat, tasks, **arguments))


def run(job: Coroutine[Any, Any, Result]) -> Result:
  """`asyncio.run`, in another thread where this one has a running loop."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(job)
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, job).result()


async def together(jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
  """The results; after a first error the others are cancelled, and waited for."""
  running = [asyncio.ensure_future(job) for job in jobs]
  try:
    return await asyncio.gather(*running)
  except BaseException as error:
    for job in running:
      job.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if isinstance(error, KeyboardInterrupt):  # it has left the loop already; twice would leave a traceback
      raise asyncio.CancelledError from None
    raise


def _check_indices(tasks: Tasks, split: str, indices: Sequence[int], samples: int) -> None:
  if not len(indices):
    raise ValueError("collect: no task indices")
  if samples < 1:
    raise ValueError(f"collect: samples must be at least 1, got {samples}")
  if len(set(indices)) != len(indices):
    twice = next(i for i in indices if list(indices).count(i) > 1)
    raise ValueError(f"collect: task {twice} is listed twice; its samples would be the same: use `samples`")
  size = tasks.size(split)
  if size is not None and not all(0 <= i < size for i in indices):
    raise ValueError(f"collect: the {split} split has {size} tasks, got indices {min(indices)}..{max(indices)}")
