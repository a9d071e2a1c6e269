"""Facts from annotators, asked for group by group, as columns of the batch."""

import asyncio

import numpy as np
import pytest

from jaxagent.methods import Given
from jaxagent.rollout.batch import to_rollouts
from jaxagent.training.annotate import annotate, with_columns
from jaxagent.types import Completion, PerTurn, Trajectory


def trajectory(group, rollout, turns):
  t = Trajectory(task=7, group=group, rollout=rollout, status="done")
  t.append_context([1, 2])
  for _ in range(turns):
    ids = np.arange(rollout + 1)
    t.append_action(Completion(ids, -ids / 2, -ids / 2, ids, "stop"))
  return t


ROWS = [trajectory(5, 0, 1), trajectory(3, 1, 2), trajectory(5, 2, 3)]
ROLLOUTS = to_rollouts(ROWS, tokens=12, turns=3, multiple=4)


class Place:
  """Of each trajectory in its group, at its tokens, at its turns and at the states around them."""

  columns = ("place", "token", "step", "state")

  def __init__(self):
    self.groups = []

  async def __call__(self, trajectories, tools):
    await asyncio.sleep(0)
    self.groups.append([t.rollout for t in trajectories])
    place = range(len(trajectories))
    return {
      "place": list(place),
      "token": [np.full(len(t.tokens), i + 0.5) for i, t in zip(place, trajectories)],
      "step": [PerTurn([i] * t.turns) for i, t in zip(place, trajectories)],
      "state": [PerTurn(range(t.turns + 1)) for t in trajectories],
    }


def test_columns_in_the_order_of_the_rows():
  place = Place()
  columns = annotate((place,), ROWS, None, ROLLOUTS)
  assert sorted(place.groups) == [[0, 2], [1]]
  np.testing.assert_array_equal(columns["place"], [0, 0, 1, 0])
  np.testing.assert_array_equal(columns["step"], [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]])
  np.testing.assert_array_equal(columns["state"], [[0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
  inside = np.arange(12) < ROLLOUTS.length[:, None]
  np.testing.assert_array_equal(columns["token"], np.where(inside, columns["place"][:, None] + 0.5, 0))
  assert {k: x.dtype.name for k, x in columns.items()} == {
    "place": "int32", "token": "float32", "step": "int32", "state": "int32",
  }  # fmt: skip


def test_one_fraction_makes_a_column_of_fractions():
  columns = annotate((Given(("a",), lambda t: {"a": 0 if t.rollout else 0.5}),), ROWS, None, ROLLOUTS)
  np.testing.assert_array_equal(columns["a"], np.array([0.5, 0, 0, 0], np.float32))


def test_a_field_of_the_rollouts_is_set_and_others_are_added():
  columns = annotate((Given(("value", "b"), lambda t: {"value": [1.0] * len(t.tokens), "b": 2}),), ROWS, None, ROLLOUTS)
  r = with_columns(ROLLOUTS, columns)
  assert r.value.shape == (4, 12) and set(r.columns) == {"b"}


class Wrong(Place):
  def __init__(self, result):
    self.result = result

  async def __call__(self, trajectories, tools):
    return self.result


@pytest.mark.parametrize(
  "result, message",
  [
    ({"place": [1]}, r"Wrong declares \('place', 'token', 'step', 'state'\) but returned \('place',\)"),
    ({name: [1] for name in Place.columns}, "Wrong: place has 1 entries for 2 trajectories"),
  ],
)
def test_what_an_annotator_got_wrong_is_said(result, message):
  with pytest.raises(ValueError, match=message):
    annotate((Wrong(result),), ROWS, None, ROLLOUTS)
