"""Which tasks a step samples: in turn, or by what their rollouts can teach; and whether to sample more.

A scheduler's state is a pytree that the checkpoint holds; what it chooses is a function of the state and a key.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.config import Config, Scheduling
from jaxagent.envs.base import Tasks
from jaxagent.rollout.collect import run
from jaxagent.scheduling import (
  TaskStatistics,
  beta_posterior,
  environment_quota,
  expected_variance,
  exploring_batch,
  mixed_groups,
  mixed_probability,
  neighbour_weights,
  no_statistics,
  posterior_deviation,
  propagate,
  statistics_at,
  task_score,
  task_similarity,
  update_statistics,
)
from jaxagent.types import Trajectory, pytree

FEATURES = 256  # entries of a task's vector


@pytree
class Schedule:
  """`drawn` batches so far; `statistics` of tasks where the scheduler keeps them."""

  drawn: Any
  statistics: TaskStatistics | None = None


class Scheduler(Protocol):
  def init(self) -> Schedule: ...

  def choose(self, schedule: Schedule, key: Any, taken: Sequence[int]) -> tuple[list[int], Schedule, dict[str, float]]:
    """Tasks of the next batch, none of `taken`; the state after; metrics."""
    ...

  def update(self, schedule: Schedule, trajectories: Sequence[Trajectory], version: int) -> Schedule: ...


def build_scheduler(config: Config, tasks: Tasks) -> Scheduler:
  """ValueError: fewer tasks than a step takes."""
  size, prompts = tasks.size("train"), config.rollout.prompts
  if size is not None and size < prompts:
    raise ValueError(f"the train split has {size} tasks but rollout.prompts is {prompts}; lower rollout.prompts")
  if config.scheduling.name == "uniform":
    return InTurn(tasks, prompts, config.seed)
  count = min(config.scheduling.pool, size or config.scheduling.pool)
  if count < prompts:
    raise ValueError(f"scheduling.pool is {count} tasks but rollout.prompts is {prompts}; raise scheduling.pool")
  return EnvSched(config.scheduling, tasks, count, prompts, config.rollout.samples)


def batches(tasks: Tasks, prompts: int, *, seed: int) -> Iterator[list[int]]:
  """Task indices of each batch, for ever. A finite set is shuffled anew each epoch; no batch has a task twice."""
  size = tasks.size("train")
  if size is None:
    yield from (list(range(start, start + prompts)) for start in itertools.count(0, prompts))
    return
  queue: list[int] = []
  for epoch in itertools.count():
    order = np.random.default_rng([seed, epoch]).permutation(size).tolist()
    left = set(queue)
    queue += [i for i in order if i not in left] + [i for i in order if i in left]
    while len(queue) >= prompts:
      yield queue[:prompts]
      queue = queue[prompts:]


class InTurn:
  """Every task in turn, see `batches`."""

  def __init__(self, tasks: Tasks, prompts: int, seed: int):
    self._start = functools.partial(batches, tasks, prompts, seed=seed)
    self._iterator, self._at = self._start(), 0

  def init(self) -> Schedule:
    return Schedule(np.zeros((), np.int32))

  def choose(self, schedule, key, taken):
    wanted = int(schedule.drawn)
    if wanted < self._at:
      self._iterator, self._at = self._start(), 0
    batch = next(itertools.islice(self._iterator, wanted - self._at, None))
    self._at = wanted + 1
    fresh = [i for i in batch if i not in set(taken)]  # the next epoch may begin within a step
    return fresh, dataclasses.replace(schedule, drawn=np.int32(wanted + 1)), {}

  def update(self, schedule, trajectories, version):
    return schedule


class EnvSched:
  """Informative and diverse batches of a pool, the first `count` tasks of the train split, see `jaxagent.scheduling`.

  Similar tasks lend each other evidence: two are similar if they belong to one kind (`tasks.kind(split, index)`, where
  there is such a method) and by the words of their first observation.
  """

  def __init__(self, options: Scheduling, tasks: Tasks, count: int, prompts: int, group_size: int):
    self._options, self._prompts, self._group_size = options, prompts, group_size
    self._tasks, self._count = tasks, count

  @functools.cached_property
  def _kind(self) -> np.ndarray:
    kind = getattr(self._tasks, "kind", lambda split, index: "")
    _, numbers = np.unique([str(kind("train", index)) for index in range(self._count)], return_inverse=True)
    return numbers

  @functools.cached_property
  def _similarity(self) -> np.ndarray:
    features = np.stack([hashed(text) for text in run(_texts(self._tasks, self._count))])
    o = self._options
    return np.asarray(task_similarity(features, self._kind, env_share=o.env_share, neighbours=o.neighbours))

  def init(self) -> Schedule:
    return Schedule(np.zeros((), np.int32), jax.device_get(no_statistics(self._count)))

  def choose(self, schedule, key, taken):
    o = self._options
    available = np.ones(self._count, bool)
    available[list(taken)] = False
    size = min(self._prompts, int(available.sum()))
    if not size:
      return [], schedule, {}
    known = statistics_at(schedule.statistics, jnp.max(schedule.statistics.version), discount=o.discount)
    lent = propagate(known, neighbour_weights(self._similarity), group_size=self._group_size, share=o.lent_share)
    a, b = beta_posterior(lent)
    informative = (
      mixed_probability(a, b, group_size=self._group_size) if o.informativeness == "mixed" else expected_variance(a, b)
    )
    score = task_score(informative, posterior_deviation(a, b), uncertainty_share=o.uncertainty)
    quota = environment_quota(self._kind, available, envs=int(self._kind.max()) + 1, size=size, ratio=o.quota_ratio)
    choice = exploring_batch(
      key, score, self._similarity, self._kind, quota, size=size, available=available, penalty=o.penalty,
      explore=o.explore,
    )  # fmt: skip
    indices = np.asarray(choice.task).tolist()
    metrics = {
      "scheduling/expected_success": float(np.mean(np.asarray(a / (a + b))[indices])),
      "scheduling/informativeness": float(np.mean(np.asarray(informative)[indices])),
      "scheduling/kinds": float(len({int(self._kind[i]) for i in indices})),
      "scheduling/tried": float(np.mean(np.asarray(known.count) > 0)),
    }
    return indices, dataclasses.replace(schedule, drawn=schedule.drawn + np.int32(1)), metrics

  def update(self, schedule, trajectories, version):
    logical = list({t.rollout: t for t in trajectories}.values())
    outcome = np.array([t.outcome for t in logical], np.float32)
    valid = np.array([t.status != "failed" for t in logical])
    if outside := [float(x) for x in outcome[valid] if not 0 <= x <= 1]:
      raise ValueError(
        f"scheduling.name envsched counts outcomes in [0, 1] as shares of a success, but the environment gave"
        f" {outside[0]:g}; use scheduling.name uniform"
      )
    task = np.array([t.task for t in logical])
    statistics = update_statistics(
      schedule.statistics, task, outcome, np.full(len(task), version), valid=valid, discount=self._options.discount
    )
    return dataclasses.replace(schedule, statistics=jax.device_get(statistics))


def mixed(trajectories: Sequence[Trajectory]) -> list[bool]:
  """For each group, in order, whether the outcomes of its valid rollouts differ."""
  logical = list({t.rollout: t for t in trajectories}.values())
  group = np.array([t.group for t in logical])
  names = sorted(set(group.tolist()))
  ids = np.searchsorted(names, group)
  outcome = np.array([t.outcome for t in logical], np.float32)
  keep = np.asarray(mixed_groups(outcome, ids, valid=np.array([t.status != "failed" for t in logical])))
  return [bool(keep[ids == i].any()) for i in range(len(names))]


def hashed(text: str) -> np.ndarray:
  """Counts of the text's words and pairs of words in `FEATURES` places, each under a sign of its hash."""
  words = text.lower().split()
  out = np.zeros(FEATURES, np.float32)
  for word in (*words, *map(" ".join, itertools.pairwise(words))):
    code = zlib.crc32(word.encode())
    out[code % FEATURES] += 1.0 if code >> 31 else -1.0
  return out


async def _texts(tasks: Tasks, count: int) -> list[str]:
  """What the agents of each task see first."""

  async def one(index: int) -> str:
    environment, seed = tasks.environment("train", index)
    try:
      observations = await environment.reset(seed)
    finally:
      await environment.close()
    return "\n".join(str(m.get("content", "")) for o in observations.values() for m in o.messages)

  return [await one(index) for index in range(count)]
