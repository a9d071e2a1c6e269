"""Which tasks a step samples: in turn, by EnvSched, and with more rounds where groups have equal outcomes."""

import dataclasses

import jax
import numpy as np
import pytest
from luck import TINY, Luck

from jaxagent import config as configuration
from jaxagent.envs.base import Observation, Step
from jaxagent.training import loop
from jaxagent.training.build import build
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.scheduling import InTurn, batches, hashed, mixed
from jaxagent.types import Trajectory

MORE = {
  **TINY,
  "model.shape": {**TINY["model.shape"], "layers": 1},
  "rollout.prompts": 4,
  "rollout.max_tokens": 48,
  "rollout.max_turn_tokens": 6,
  "rollout.slots": 16,
  "evaluation.tasks": 0,
}
KINDS = ("always", "never", "parity")


class Episode(Luck):
  def __init__(self, kind):
    self.kind = kind

  async def reset(self, seed):
    return {0: Observation(({"role": "user", "content": f"{self.kind} {seed}"},))}

  async def step(self, actions):
    lucky = await super().step(actions)
    return lucky if self.kind == "parity" else Step(outcome=float(self.kind == "always"), status="done")


@dataclasses.dataclass
class Pool:
  """Tasks of three kinds in turn; only those of "parity" can teach anything."""

  count: int | None = 24

  def size(self, split):
    return self.count

  def kind(self, split, index):
    return KINDS[index % 3]

  def environment(self, split, index):
    return Episode(self.kind(split, index)), index


def run(steps, changes, *, resume=False, seen=None, tasks=None, **hooks):
  config, records = configuration.load(None, {**MORE, "run.steps": steps, **changes}), []
  if seen is not None:
    hooks["rollouts"] = lambda step, rollouts, trajectories: seen.append(trajectories)
  parts = build(config, env=tasks or Pool())
  state = loop.train(config, parts, hooks=loop.Hooks(record=records.append, **hooks), resume=resume)
  return jax.device_get(state), records


ENVSCHED = {"scheduling.name": "envsched", "scheduling.explore": 0.0, "scheduling.quota_ratio": 3.0}


def test_envsched_comes_to_choose_the_tasks_that_can_teach():
  shares = {}
  for name, changes in {"uniform": {}, "envsched": ENVSCHED}.items():
    seen = []
    _, records = run(8, {**changes, "scheduling.penalty": 0.0, "scheduling.uncertainty": 0.0}, seen=seen)
    late = [KINDS[t.task % 3] for trajectories in seen[4:] for t in trajectories]
    shares[name] = late.count("parity") / len(late)
    assert all(len({t.task for t in trajectories}) == 4 for trajectories in seen)
  assert shares["envsched"] >= 0.9 > 0.6 > shares["uniform"]
  assert records[-1]["scheduling/tried"] > records[0]["scheduling/tried"] == 0.0
  assert records[-1]["groups/equal_reward_share"] < 0.5


def test_the_quota_keeps_every_kind_in_the_batch():
  seen = []
  _, records = run(4, {**ENVSCHED, "scheduling.quota_ratio": 1.0}, seen=seen)
  for trajectories, record in zip(seen, records):
    assert {KINDS[t.task % 3] for t in trajectories} == set(KINDS) and record["scheduling/kinds"] == 3


def test_more_rounds_replace_groups_of_equal_outcomes_and_count_them():
  seen = []
  _, records = run(2, {"scheduling.rounds": 4}, seen=seen)
  for trajectories, record in zip(seen, records):
    assert all(KINDS[t.task % 3] == "parity" for t in trajectories)
    assert [(t.group, t.rollout) for t in trajectories] == [(i // 4, i) for i in range(16)]
    assert record["scheduling/rounds"] > 1 and record["scheduling/dropped_groups"] >= 4
    assert record["scheduling/dropped_tokens"] > 0 and record["groups/equal_reward_share"] == 0


def test_where_no_group_differs_the_step_goes_on_with_the_first_ones():
  seen = []
  pool = Pool(24)
  pool.kind = lambda split, index: "never"
  _, (record,) = run(1, {"scheduling.rounds": 2}, seen=seen, tasks=pool)
  assert record["scheduling/rounds"] == 2 and record["scheduling/dropped_groups"] == 4
  assert len({t.task for t in seen[0]}) == 4 and record["groups/equal_reward_share"] == 1


@pytest.mark.parametrize("changes", [ENVSCHED, {"scheduling.rounds": 2}, {**ENVSCHED, "scheduling.rounds": 2}])
def test_a_resume_goes_on_with_the_same_tasks_bit_for_bit(tmp_path, changes):
  whole, rest = [], []
  state, _ = run(3, changes, seen=whole)
  with Checkpointer(tmp_path) as checkpointer:
    run(1, changes, checkpointer=checkpointer)
  with Checkpointer(tmp_path) as checkpointer:
    resumed, _ = run(3, changes, checkpointer=checkpointer, resume=True, seen=rest)
  assert [[t.tokens for t in step] for step in whole[1:]] == [[t.tokens for t in step] for step in rest]
  jax.tree.map(np.testing.assert_array_equal, state, resumed)


@pytest.mark.parametrize("size, prompts", [(5, 2), (7, 3), (4, 4), (9, 5)])
def test_in_turn_every_epoch_has_every_task_once(size, prompts):
  scheduler, drawn = InTurn(Pool(size), prompts, seed=0), []
  schedule = scheduler.init()
  for _ in range(size):
    batch, schedule, _ = scheduler.choose(schedule, None, [])
    assert len(set(batch)) == prompts
    drawn += batch
  for epoch in range(prompts):
    assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
  again, _, _ = scheduler.choose(scheduler.init(), None, [])
  assert again == drawn[:prompts] == next(batches(Pool(size), prompts, seed=0))


def test_an_endless_set_is_counted_on():
  scheduler = InTurn(Pool(None), 3, seed=0)
  schedule = scheduler.init()
  first, schedule, _ = scheduler.choose(schedule, None, [])
  second, _, _ = scheduler.choose(schedule, None, first)
  assert (first, second) == ([0, 1, 2], [3, 4, 5])


def test_mixed_looks_at_valid_rollouts_alone():
  def of(group, outcome, status="done"):
    of.count += 1
    return Trajectory(0, group, of.count, outcome=outcome, status=status)

  of.count = -1
  trajectories = [of(0, 1.0), of(0, 0.0), of(1, 1.0), of(1, 0.0, "failed"), of(2, 0.5), of(2, 0.5)]
  assert mixed(trajectories) == [True, False, False]


def test_texts_that_share_words_have_similar_features():
  a, b, c = (hashed(text) for text in ("sort the files by size", "sort the files by name", "what is 3 + 4"))
  cosine = lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y)  # noqa: E731
  assert cosine(a, b) > 0.5 > 0.2 > cosine(a, c)


@pytest.mark.parametrize("changes, message", [
  ({"scheduling.pool": 3, "scheduling.name": "envsched"}, "scheduling.pool is 3 tasks but rollout.prompts is 4"),
  ({"rollout.prompts": 25}, "the train split has 24 tasks but rollout.prompts is 25"),
])  # fmt: skip
def test_too_few_tasks(changes, message):
  with pytest.raises(ValueError, match=message):
    run(1, changes)


def test_outcomes_that_are_no_shares_of_a_success_are_refused():
  class Odd(Episode):
    async def step(self, actions):
      return Step(outcome=2.0, status="done")

  pool = Pool()
  pool.environment = lambda split, index: (Odd("odd"), index)
  with pytest.raises(ValueError, match=r"envsched counts outcomes in .0, 1.*gave 2; use scheduling.name uniform"):
    run(1, ENVSCHED, tasks=pool)
