"""A run that is over in seconds: a small model on tasks that a random policy solves half the time."""

from jaxagent.envs.base import Observation, Step

TINY = {
  "model.shape": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16},
  "env.options": {"digits": 1},  # of the calculator, where its demonstrations warm-start
  "rollout.prompts": 2,
  "rollout.samples": 4,
  "rollout.max_turns": 2,
  "rollout.max_tokens": 64,
  "rollout.max_turn_tokens": 8,
  "rollout.slots": 8,
  "training.microbatch_rows": 8,
  "optimizer.learning_rate": 1e-3,
  "evaluation.tasks": 4,
  "run.steps": 4,
  "run.checkpoint_every": 1,
  "tracking.gap_warning": 1e-3,
}


class Luck:
  """The outcome is the parity of what was written: rewards differ within a group of a random policy."""

  tool_format = None

  async def reset(self, seed):
    return {0: Observation(({"role": "user", "content": str(seed % 10)},))}

  async def step(self, actions):
    return Step(outcome=float(sum(map(ord, actions[0].text)) % 2), status="done")

  async def close(self):
    pass


class LuckyTasks:
  def __init__(self, size=None, environment=Luck):
    self._size, self._environment = size, environment

  def size(self, split):
    return self._size

  def environment(self, split, index):
    return self._environment(), index if split == "train" else 10_000 + index
