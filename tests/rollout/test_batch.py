import dataclasses

import numpy as np
import pytest

from jaxagent.envs.calculator import Calculator
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import demonstrations_batch, to_rollouts
from jaxagent.types import Completion, PerTurn, Trajectory

CHAT = Chat(byte_tokenizer())


def completion(ids, logp=-0.5, routing=None):
  n = len(ids)
  return Completion(
    np.array(ids), np.full(n, logp), np.full(n, logp), np.full(n, 2), "stop", entropy=np.full(n, 0.25), routing=routing
  )


def trajectory(prompt=(1, 2), turns=((5, 9), (6,)), *, rollout=0, group=0, status="done", outcome=1.0, **fields):
  """prompt, turn, one token of context 7, turn, ..."""
  t = Trajectory(task=40 + group, group=group, rollout=rollout, status=status, outcome=outcome, **fields)
  t.append_context(prompt)
  for i, ids in enumerate(turns):
    if i:
      t.append_context([7])
    t.append_action(completion(ids))
    t.turn_reward.append(0.1 * (i + 1))
  return t


def test_a_row_by_hand():
  r = to_rollouts([trajectory()], tokens=8, turns=3)
  expected = {
    "tokens": [1, 2, 5, 9, 7, 6, 0, 0],
    "position": [0, 1, 2, 3, 4, 5, 6, 7],
    "mask": [0, 0, 1, 1, 0, 1, 0, 0],
    "turn": [-1, -1, 0, 0, -1, 1, -1, -1],
    "logp_rollout": [0, 0, -0.5, -0.5, 0, -0.5, 0, 0],
    "entropy": [0, 0, 0.25, 0.25, 0, 0.25, 0, 0],
    "version": [-1, -1, 2, 2, -1, 2, -1, -1],
  }
  for name, row in expected.items():
    np.testing.assert_array_equal(getattr(r, name)[0], row, err_msg=name)
  scalars = {
    "length": 6, "prefix_length": 2, "rollout": 0, "agent": 0, "group": 0, "env": 0, "task": 40, "outcome": 1,
    "reward": 1, "valid": True, "truncated": False, "temperature": 1,
  }  # fmt: skip
  for name, value in scalars.items():
    assert getattr(r, name).shape == (1,) and getattr(r, name)[0] == value, name
  np.testing.assert_allclose(r.turn_reward, [[0.1, 0.2, 0.0]], rtol=1e-6)
  assert r.columns == {} and r.routing is None
  types = {name: getattr(r, name).dtype.name for name in ("tokens", "mask", "reward", "logp_rollout", "turn", "valid")}
  assert types == {
    "tokens": "int32", "mask": "bool", "reward": "float32", "logp_rollout": "float32", "turn": "int32", "valid": "bool",
  }  # fmt: skip


def test_the_mask_is_the_record_whatever_the_ids_are():
  t = trajectory(prompt=(0, 0), turns=((0, 258), (0,)))
  r = to_rollouts([t], tokens=10, turns=2)
  assert r.mask[0].tolist() == t.action + [False] * 4 and r.length[0] == 6


def test_failed_and_truncated_are_told_apart_from_zero():
  rows = [
    trajectory(), trajectory(rollout=1, outcome=0.0), trajectory(rollout=2, status="truncated", outcome=0.0),
    trajectory(rollout=3, status="failed", outcome=0.0, cause="down"), Trajectory(9, 0, 4, status="failed"),
  ]  # fmt: skip
  r = to_rollouts(rows, tokens=8, turns=2, multiple=4)
  assert r.valid.tolist() == [True, True, True, False, False, False, False, False]
  assert r.truncated.tolist() == [False, False, True] + [False] * 5
  assert r.length.tolist() == [6, 6, 6, 6, 0, 0, 0, 0]
  assert (r.task[:5] >= 0).all() and (r.task[5:] == -1).all()  # so a failure is no filler


def test_filler_rows_have_ids_of_their_own():
  r = to_rollouts([trajectory(rollout=i, group=i // 2) for i in range(5)], tokens=8, turns=2, multiple=8)
  assert r.rollout.tolist() == list(range(8)) and r.group.tolist() == [0, 0, 1, 1, 2, 5, 6, 7]
  filler = slice(5, None)
  assert not r.mask[filler].any() and (r.length[filler] == 0).all() and (r.temperature[filler] == 1).all()


def test_ids_become_dense_and_keep_their_order():
  rows = [trajectory(rollout=r, group=g) for r, g in [(70, 9), (71, 9), (12, 3)]]
  r = to_rollouts(rows, tokens=8, turns=2)
  assert (r.rollout.tolist(), r.group.tolist(), r.task.tolist()) == ([0, 1, 2], [0, 0, 1], [49, 49, 43])


def test_rows_of_one_rollout_number_their_turns_on():
  rows = [trajectory(), trajectory(turns=((3,),), agent=1), trajectory(rollout=1)]
  r = to_rollouts(rows, tokens=8, turns=3)
  assert [sorted(set(row.tolist()) - {-1}) for row in r.turn] == [[0, 1], [2], [0, 1]]
  np.testing.assert_allclose(r.turn_reward, [[0.1, 0.2, 0], [0, 0, 0.1], [0.1, 0.2, 0]], rtol=1e-6)
  assert r.rollout.tolist() == [0, 0, 1] and r.agent.tolist() == [0, 1, 0]


def team():
  """Agent 0 acts in steps 0, 1 and 4 of the environment, agent 1 in 1 and 2; nobody in step 3. Then a rollout alone."""
  return [
    trajectory(turns=((5, 9), (6,), (8,)), turn_step=[0, 1, 4]), trajectory(agent=1, turn_step=[1, 2]),
    trajectory(rollout=1),
  ]  # fmt: skip


def test_agents_turns_are_numbered_by_the_step_they_were_taken_in():
  r = to_rollouts(team(), tokens=10, turns=4)
  assert [list(dict.fromkeys(row[row >= 0].tolist())) for row in r.turn] == [[0, 1, 3], [1, 2], [0, 1]]
  np.testing.assert_allclose(r.turn_reward, [[0.1, 0.2, 0, 0.3], [0, 0.1, 0.2, 0], [0.1, 0.2, 0, 0]], rtol=1e-6)
  assert (r.turn[~r.mask] == -1).all()


def test_the_order_of_the_rows_does_not_number_the_steps():
  rows = team()
  r, swapped = (to_rollouts(x, tokens=10, turns=4) for x in (rows, rows[::-1]))
  np.testing.assert_array_equal(r.turn, swapped.turn[::-1])
  np.testing.assert_array_equal(r.turn_reward, swapped.turn_reward[::-1])


def test_values_and_states_of_agents_stand_at_their_steps():
  rows = team()
  for row, turns, states in zip(rows, ([1, 2, 3], [4, 5], [6, 7]), ([1, 2, 3, 4], [5, 6, 7], [8, 9, 10])):
    row.columns = {"turns": PerTurn(turns), "states": PerTurn(states)}
  columns = to_rollouts(rows, tokens=10, turns=4).columns
  np.testing.assert_array_equal(columns["turns"], [[1, 2, 0, 3], [0, 4, 5, 0], [6, 7, 0, 0]])
  np.testing.assert_array_equal(columns["states"], [[1, 2, 3, 3, 4], [0, 5, 6, 7, 0], [8, 9, 10, 0, 0]])


@pytest.mark.parametrize("steps", [[0], [1, 0], [0, 0], []])
def test_steps_that_do_not_fit_the_turns(steps):
  with pytest.raises(ValueError, match="turn_step of a row of rollout 0 must give a rising step for each of its 2 tu"):
    to_rollouts([trajectory(turn_step=steps), trajectory(agent=1, turn_step=[0, 1])], tokens=8, turns=4)


def routed(last=3):
  t = Trajectory(0, 0, 0, status="done", outcome=1.0)
  t.append_context([1, 2])
  t.append_action(completion([5, 9], routing=np.full((3, 2, 1), 1, np.int16)))
  t.append_context([7])
  t.append_action(completion([6], routing=np.full((2, 2, 1), last, np.int16)))
  return t


def test_routing_is_minus_one_where_nothing_was_processed():
  r = to_rollouts([routed(), trajectory(rollout=1, status="failed")], tokens=8, turns=2, routing=True)
  assert r.routing.shape == (2, 8, 2, 1) and r.routing.dtype == np.int16
  assert r.routing[0, :, 0, 0].tolist() == [1, 1, 1, 3, 3, -1, -1, -1] and (r.routing[1] == -1).all()


def test_columns():
  rows = [trajectory(columns={"steps": 3, "won": True}), trajectory(rollout=1, columns={"steps": 4, "won": False})]
  rows.append(trajectory(rollout=2, status="failed"))
  r = to_rollouts(rows, tokens=8, turns=2, multiple=4)
  assert r.columns["steps"].tolist() == [3, 4, 0, 0] and r.columns["won"].tolist() == [1, 0, 0, 0]


def column_of(*entries, rows=None, **options):
  """Of three rows: two turns, one turn, and a second row of the first one's rollout."""
  rows = rows or [trajectory(), trajectory(turns=((3,),), rollout=1), trajectory(turns=((4,),))]
  for row, entry in zip(rows, entries):
    row.columns["a"] = entry
  return to_rollouts(rows, **{"tokens": 8, "turns": 3, "multiple": 4, **options}).columns["a"]


COLUMNS = {  # entries, column, dtype
  "numbers": ((1, 2.5, -1), [1, 2.5, -1, 0], "float32"),
  "integers": ((1, 2, np.int64(-1)), [1, 2, -1, 0], "int32"),
  "booleans": ((True, False, True), [True, False, True, False], "bool"),
  "arrays": (([1, 2], [3, 4], (5, 6)), [[1, 2], [3, 4], [5, 6], [0, 0]], "int32"),
  "arrays as long as the number of turns": (([1.0], [2.0], [3.0]), [[1], [2], [3], [0]], "float32"),
  "tokens": (
    ([1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 2, 3]),
    [[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 9, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0], [0] * 8], "int32",
  ),
  "turns": ((PerTurn([1, 2]), PerTurn([3]), PerTurn([4])), [[1, 2, 0], [3, 0, 0], [0, 0, 4], [0] * 3], "int32"),
  "states": (
    (PerTurn([0, 0.5, 1]), PerTurn([0, 0.25]), PerTurn([1, 2])),
    [[0, 0.5, 1, 0], [0, 0.25, 0, 0], [0, 0, 1, 2], [0] * 4], "float32",
  ),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_kind(kind):
  entries, want, dtype = COLUMNS[kind]
  got = column_of(*entries)
  np.testing.assert_array_equal(got, want)
  assert got.dtype == dtype


def test_values_of_turns_stand_where_their_rewards_stand():
  rows = [trajectory(), trajectory(turns=((3,),), agent=1), trajectory(rollout=1)]
  for row in rows:
    row.columns["a"] = PerTurn(row.turn_reward)
  r = to_rollouts(rows, tokens=8, turns=3)
  np.testing.assert_array_equal(r.columns["a"], r.turn_reward)


def test_entries_may_have_axes_behind_the_token_or_the_turn():
  rows = [trajectory(), trajectory(turns=((3,),), rollout=1), trajectory(turns=((4,),))]
  assert column_of(*(np.ones((len(r.tokens), 2)) for r in rows)).shape == (4, 8, 2)
  assert column_of(*(PerTurn(np.ones((r.turns, 5))) for r in rows)).shape == (4, 3, 5)
  assert column_of(*(np.ones((2, 2)) for r in rows)).shape == (4, 2, 2)
  rows = [trajectory(), trajectory(turns=(), rollout=1, status="failed")]
  assert column_of(*(PerTurn(np.ones((r.turns, 5))) for r in rows), rows=rows).shape == (4, 3, 5)


def test_a_failed_row_may_lack_a_column_of_turns():
  rows = [trajectory(), trajectory(rollout=1, status="failed"), trajectory(rollout=2)]
  rows[0].columns["a"], rows[2].columns["a"] = PerTurn([1, 2]), PerTurn([3, 4])
  np.testing.assert_array_equal(to_rollouts(rows, tokens=8, turns=2).columns["a"], [[1, 2], [0, 0], [3, 4]])


@pytest.mark.parametrize(
  "entries, message",
  [
    ((1, [1], 2), r"column 'a' has entries of shapes \[\(\), \(1,\)\]; give one shape"),
    (([1], [1, 2], [1]), "give one shape, one value per token, or a PerTurn"),
    ((PerTurn([1, 2]), [3], [4]), "column 'a' must be a PerTurn in every row"),
    ((PerTurn([1, 2]), PerTurn([3, 4]), PerTurn([5])), r"got \(values, turns\) \[\(1, 1\), \(2, 1\), \(2, 2\)\]"),
    ((PerTurn([1]), PerTurn([]), PerTurn([])), "with a value for each of its turns"),
    (("yes", "no", "no"), "column 'a' must hold numbers, got 'yes'"),
    (([1, [2, 3]], [1], [1]), "column 'a' has an entry that is no array"),
    ((1, 2**31, 3), "column 'a' must hold integers within int32, got one of size 2147483648"),
  ],
)
def test_columns_that_do_not_fit_are_named(entries, message):
  with pytest.raises(ValueError, match=message):
    column_of(*entries)


def test_what_was_drawn_from_rides_along_where_it_differs():
  t = trajectory()
  t.logp_sampled = [x / 2 for x in t.logp_rollout]
  r = to_rollouts([t, trajectory(rollout=1)], tokens=8, turns=2)
  np.testing.assert_allclose(r.columns["logp_sampled"][:, :6], [np.array(t.logp_sampled), r.logp_rollout[1, :6]])


def test_entropy_is_none_where_the_sampler_gave_none():
  t = trajectory()
  t.append_action(dataclasses.replace(completion([3]), entropy=None))
  assert to_rollouts([t, trajectory(rollout=1)], tokens=8, turns=3).entropy is None


@pytest.mark.parametrize(
  "rows, options, message",
  [
    ([trajectory(status="running")], {}, "still running"),
    ([trajectory(prompt=range(9))], {}, "has 13 tokens, a row holds 8; raise rollout.max_tokens"),
    ([trajectory(temperature=0.0)], {}, "greedy rollouts have no log-probs"),
    ([trajectory()], {"turns": 1}, "has 2 turns, the batch holds 1; raise rollout.max_turns"),
    ([trajectory()], {"routing": True}, "no rollout recorded its routing"),
    ([routed(), trajectory(rollout=1)], {"routing": True}, "routing is not recorded"),
    ([trajectory(turns=())], {}, "no token to train on"),
    ([], {}, "no token to train on"),
    ([trajectory(status="failed", cause="sandbox died")], {}, "1 of 1 rollouts failed, for example: sandbox died"),
    ([trajectory(columns={"a": 1}), trajectory(rollout=1)], {}, "column 'a' is missing in 1 of 2"),
  ],
)
def test_errors(rows, options, message):
  with pytest.raises(ValueError, match=message):
    to_rollouts(rows, **{"tokens": 8, "turns": 2, **options})


def test_a_valid_row_without_a_trained_token_is_warned_about():
  with pytest.warns(UserWarning, match="1 of 2 valid rows have no token to train on"):
    to_rollouts([trajectory(), trajectory(rollout=1, turns=())], tokens=8, turns=2)


def test_demonstrations_train_on_the_assistants_words_and_its_ends():
  tasks = Calculator()
  r = demonstrations_batch(tasks, CHAT, range(6), 120, multiple=4)
  assert r.tokens.shape == (8, 120) and r.turn_reward.shape == (8, 4)
  for i in range(6):
    messages, tools = tasks.demonstration(i)
    ids, action = CHAT.demonstration(messages, tools)
    assert r.tokens[i, : r.length[i]].tolist() == ids and r.mask[i, : r.length[i]].tolist() == action
    words = [CHAT.tokenizer.decode(r.tokens[i, r.turn[i] == turn]) for turn in (0, 1)]
    problem, answer = messages[0]["content"], messages[-1]["content"]
    assert words == [f"<calc>{problem}</calc><|im_end|>", f"{answer}<|im_end|>"]
    assert r.prefix_length[i] == action.index(True)
  assert (r.reward[:6] == 1).all() and (r.temperature == 1).all() and (r.logp_rollout == 0).all()
  assert r.valid.tolist() == [True] * 6 + [False] * 2 and r.group.tolist() == list(range(8))


def test_a_demonstration_longer_than_a_row_names_the_knob():
  with pytest.raises(ValueError, match=r"raise rollout.max_tokens"):
    demonstrations_batch(Calculator(), CHAT, range(3), 40)


def test_tasks_without_demonstrations_say_so():
  with pytest.raises(ValueError, match=r"set sft.steps to 0"):
    demonstrations_batch(object(), CHAT, range(3), 40)
