"""The warm start: what it imitates, and which stored rollouts the filters keep."""

import dataclasses

import numpy as np
import pytest

from jaxagent import config as configuration
from jaxagent.rollout.batch import to_rollouts
from jaxagent.training import loop, supervise
from jaxagent.training.build import build
from jaxagent.types import Completion, Trajectory

TINY = {
  "model.shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16},
  "rollout.max_tokens": 12,
  "rollout.max_turn_tokens": 4,
  "rollout.prompts": 2,
  "sft.batch": 4,
  "evaluation.tasks": 0,
}


def episode(rollout, task, outcome, turns, *, cost=None, status="done", agent=0):
  row = Trajectory(task, rollout, rollout, outcome=outcome, status=status, agent=agent, temperature=0.7)
  row.append_context([1, 2])
  for i, size in enumerate(turns):
    if i:
      row.append_context([3])
    ids = np.arange(10, 10 + size)
    row.append_action(Completion(ids, np.full(size, -0.5), np.full(size, -0.5), np.zeros(size), "stop"))
    row.turn_reward.append(0.0)
  if cost is not None:
    row.columns["tool_cost"] = cost
  return row


def batch(*rows):
  return to_rollouts(rows, tokens=12, turns=3, multiple=8)


def lengths(rows):
  return [(row.task, sum(row.action)) for row in rows]


def test_a_stored_row_comes_back_as_what_it_said():
  row = episode(0, 7, 0.0, [2, 3])
  back = supervise.example(batch(row), 0)
  assert (back.tokens, back.action, back.turn) == (row.tokens, row.action, row.turn)
  assert (back.task, back.prefix_length, back.outcome, back.status) == (7, 2, 1.0, "done")
  assert back.temperature == 1.0 and set(back.logp_rollout) == {0.0} and back.turns == 2


def test_filters_keep_what_they_say():
  first = batch(
    episode(0, 1, 1.0, [4]), episode(1, 1, 1.0, [2]), episode(2, 2, 0.0, [1]), episode(3, 3, 1.0, [3]),
    episode(4, 4, 1.0, [1], status="failed"), episode(5, 5, 1.0, [1], status="truncated"),
  )  # fmt: skip
  second = batch(episode(0, 1, 1.0, [3]), episode(1, 3, 1.0, [1, 1]))
  rows, count = supervise.chosen([first, second], "none")
  assert count == len(rows) == 7
  rows, count = supervise.chosen(iter([first, second]), "correct")
  assert count == 7 and lengths(rows) == [(1, 4), (1, 2), (3, 3), (1, 3), (3, 2)]
  rows, _ = supervise.chosen([first, second], "pareto")
  assert lengths(rows) == [(1, 2), (3, 2)]
  with pytest.raises(ValueError, match="keeps none of the 1 rollouts"):
    supervise.chosen([batch(episode(0, 1, 0.0, [4]))], "correct")


def test_the_pareto_filter_weighs_tools_against_length():
  """Gates 2 sigmoid(-(c - c_min) / (c_min + eps)): (1, 8) scores .99 * .54, (4, 4) .37 * 1, (1, 9) less than (1, 8)."""
  rows = [episode(0, 1, 1.0, [8], cost=1.0), episode(1, 1, 1.0, [4], cost=4.0), episode(2, 1, 1.0, [9], cost=1.0)]
  assert lengths(supervise.chosen([batch(*rows)], "pareto")[0]) == [(1, 8)]
  cheap = [dataclasses.replace(row, columns={"tool_cost": 0.0}) for row in rows]
  assert lengths(supervise.chosen([batch(*cheap)], "pareto")[0]) == [(1, 4)]


def test_all_agents_of_a_rollout_are_kept_together():
  team = [episode(0, 1, 1.0, [2], agent=0), episode(0, 1, 1.0, [3], agent=1), episode(1, 1, 1.0, [6])]
  rows, count = supervise.chosen([batch(*team)], "pareto")
  assert count == 2 and [(row.agent, sum(row.action)) for row in rows] == [(0, 2), (1, 3)]


def test_every_row_is_seen_once_an_epoch():
  config = configuration.load(None, TINY)
  rows = [episode(i, i, 1.0, [2]) for i in range(6)]
  examples = supervise.in_epochs(config, rows)
  seen = np.concatenate([examples(step).task for step in range(6)])
  for epoch in range(4):
    assert sorted(seen[6 * epoch : 6 * epoch + 6]) == list(range(6))
  assert (seen[:6] != seen[6:12]).any()
  np.testing.assert_array_equal(examples(3).tokens, supervise.in_epochs(config, rows)(3).tokens)


def test_a_warm_start_learns_the_rows_that_it_is_given():
  config = configuration.load(None, {**TINY, "sft.steps": 25, "sft.learning_rate": 0.03, "run.steps": 0})
  records, rows = [], [episode(i, i, 1.0, [4]) for i in range(3)]
  parts = build(config)
  loop.train(config, parts, hooks=loop.Hooks(record=records.append), examples=supervise.in_epochs(config, rows))
  losses = [r["loss"] for r in records]
  assert len(losses) == 25 and losses[-1] < 0.1 * losses[0]


def test_a_source_that_nobody_read_is_an_error():
  config = configuration.load(None, {**TINY, "sft.steps": 1, "sft.source": "runs/other", "run.steps": 0})
  with pytest.raises(ValueError, match=r"sft.source is 'runs/other'"):
    loop.train(config, build(config))
  with pytest.raises(configuration.ConfigError, match=r"set sft.source to a run"):
    configuration.load(None, {**TINY, "sft.filter": "pareto"})
