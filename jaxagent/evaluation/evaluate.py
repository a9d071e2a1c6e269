"""Held-out success of an engine's weights."""

import numpy as np
from jaxtyping import Array

from jaxagent.envs.base import Tasks
from jaxagent.models.chat import Chat
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling


def evaluate(
  engine: Engine,
  chat: Chat,
  tasks: Tasks,
  *,
  count: int,
  samples: int,
  sampling: Sampling,
  limits: Limits,
  key: Array,
) -> dict[str, float]:
  """The first `count` tasks of the "eval" split, `samples` times each; the same key gives the same episodes.

  `eval/success` is the share of outcomes of 1 among episodes that did not fail; failures of the environment are counted
  in `eval/failed`. Tokens are those sampled in an episode. ValueError: an empty split.
  """
  size = tasks.size("eval")
  count = count if size is None else min(count, size)
  if not count:
    raise ValueError("the eval split has no tasks; hold some out, or set evaluation.tasks to 0")
  trajectories = collect(
    engine, chat, tasks, split="eval", indices=range(count), samples=samples, sampling=sampling, limits=limits, key=key
  )
  episodes = list({t.rollout: t for t in reversed(trajectories)}.values())
  ended = [t for t in episodes if t.status != "failed"]
  if not ended:
    raise ValueError(f"all {len(episodes)} evaluation episodes failed, for example: {episodes[0].cause}")
  outcome = np.array([t.outcome for t in ended])
  return {
    "eval/success": float((outcome >= 1 - 1e-6).mean()),
    "eval/outcome": float(outcome.mean()),
    "eval/truncated": float(np.mean([t.status == "truncated" for t in ended])),
    "eval/turns": float(np.mean([t.turns for t in ended])),
    "eval/tokens": float(np.mean([sum(t.action) for t in ended])),
    "eval/episodes": float(len(episodes)),
    "eval/failed": float(len(episodes) - len(ended)),
  }
