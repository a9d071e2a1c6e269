"""What a reference policy does with each training task, in each mode: the statistics that When2Think trains against."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxagent.envs.hybrid_reasoning import NO_THINK, THINK, HybridReasoning
from jaxagent.models.chat import Chat
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.types import Trajectory


def reference_statistics(
  engine: Engine,
  chat: Chat,
  tasks: HybridReasoning,
  *,
  count: int,
  samples: int,
  sampling: Sampling,
  limits: Limits,
  key: Array,
) -> list[dict[str, Any]]:
  """A row for each of the first `count` training tasks: accuracy and mean tokens of `samples` episodes of each mode.

  `reference_accuracy` and `reference_tokens` are those of mode THINK; the tokens are those that the policy wrote. A
  truncated episode is not correct. ValueError: a task whose episodes all failed.
  """
  rows: list[dict[str, Any]] = [{"task": index} for index in range(count)]
  for mode in (THINK, NO_THINK):
    posed = dataclasses.replace(tasks, mode=mode, reference=None)
    played = collect(
      engine, chat, posed, split="train", indices=range(count), samples=samples, sampling=sampling, limits=limits,
      key=key,
    )  # fmt: skip
    for row in rows:
      row[mode] = _of_mode([t for t in played if t.task == row["task"]])
  return [{**row, **{f"reference_{k}": row[THINK][k] for k in ("accuracy", "tokens")}} for row in rows]


def _of_mode(played: list[Trajectory]) -> dict[str, float]:
  ended = [t for t in played if t.status != "failed"]
  if not ended:
    raise ValueError(f"all {len(played)} reference episodes of task {played[0].task} failed: {played[0].cause}")
  correct = [t.outcome >= 1 - 1e-6 and t.status != "truncated" for t in ended]
  return {
    "accuracy": float(np.mean(correct)),
    "tokens": float(np.mean([sum(t.action) for t in ended])),
    "samples": len(ended),
  }
