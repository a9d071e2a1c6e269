"""From trajectories, ragged records on the host, to `Rollouts` of one fixed shape."""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.envs.base import Tasks
from jaxagent.models.chat import Chat
from jaxagent.types import Completion, PerTurn, Rollouts, Trajectory, check


def to_rollouts(
  trajectories: Sequence[Trajectory], *, tokens: int, turns: int, routing: bool = False, multiple: int = 1
) -> Rollouts:
  """NumPy arrays `[N, tokens]` and `[N, turns]`, one row per trajectory in their order, then filler up to `multiple`.

  - `mask` is the sampler's record, `position` the index. Past `length`, ids are 0 and the rest is 0, False or -1.
  - `reward` is the outcome; `turn_reward` stays beside it, and a method's reward slots may add the two.
  - `rollout` and `group` are renumbered densely, in order of first appearance.
  - `turn` counts the steps of the rollout in which somebody acted, by `turn_step`: agents who act together share a
    number. Rows that do not know theirs number their turns on from one row to the next. `turn_reward` stands at the
    same numbers, 0 elsewhere.
  - `valid` is False for status "failed" and for filler rows. Those have task -1, length 0 and ids of their own.
  - `entropy` [N, T] is None unless the sampler gave it for every action. With `routing`, `[N, T, L, K]` as recorded,
    -1 for tokens that were not processed. `columns`: "logp_sampled" [N, T], where some token was drawn from a truncated
    distribution, and the trajectories' own, see `column` (0 for failed ones that lack it).

  ValueError: an episode still running, too long or with too many turns, at temperature 0, without a recorded routing or
  a column the others have; a batch without one token to train on. A valid row without one is warned about.
  """
  rows = list(trajectories)
  for row in rows:
    _check_row(row, tokens)
  _check_trained(rows)
  n = -(-len(rows) // multiple) * multiple
  filler = n - len(rows)
  numbers = _turn_numbers(rows, turns)

  def per_row(name: str, dtype, fill) -> np.ndarray:
    return np.array([getattr(row, name) for row in rows] + [fill] * filler, dtype)

  def per_token(name: str, dtype, fill) -> np.ndarray:
    return _padded([getattr(row, name) for row in rows], (n, tokens), dtype, fill)

  length = np.array([len(row.tokens) for row in rows] + [0] * filler, np.int32)
  mask = per_token("action", bool, False)
  turn = per_token("turn", np.int32, -1)
  turn_reward = np.zeros((n, turns), np.float32)
  for i, row in enumerate(rows):
    turn[i, mask[i]] = numbers[i][turn[i, mask[i]]]
    turn_reward[i, numbers[i][: len(row.turn_reward)]] = row.turn_reward
  entropy = per_token("entropy", np.float32, 0)
  outcome = per_row("outcome", np.float32, 0)
  return check(
    Rollouts(
      tokens=per_token("tokens", np.int32, 0),
      position=np.tile(np.arange(tokens, dtype=np.int32), (n, 1)),
      mask=mask,
      turn=turn,
      length=length,
      prefix_length=per_row("prefix_length", np.int32, 0),
      rollout=_dense([row.rollout for row in rows], n),
      agent=per_row("agent", np.int32, 0),
      group=_dense([row.group for row in rows], n),
      env=per_row("env", np.int32, 0),
      task=per_row("task", np.int32, -1),
      outcome=outcome,
      reward=outcome.copy(),
      turn_reward=turn_reward,
      valid=np.array([row.status != "failed" for row in rows] + [False] * filler, bool),
      truncated=np.array([row.status == "truncated" for row in rows] + [False] * filler, bool),
      temperature=per_row("temperature", np.float32, 1),
      logp_rollout=per_token("logp_rollout", np.float32, 0),
      version=per_token("version", np.int32, -1),
      entropy=None if np.isnan(entropy[mask]).any() else entropy,
      routing=_routing(rows, n, tokens) if routing else None,
      columns=_columns(rows, (n, tokens, turns)),
    )
  )


def column(
  name: str, entries: Mapping[int, Any], trajectories: Sequence[Trajectory], shape: tuple[int, int, int]
) -> np.ndarray:
  """`[N, ...]` from the entries of rows by index, 0 elsewhere; N, T and S of `shape`. bool, int32 or float32.

  An entry is a number, an array of one fixed shape, one value (or array) per token of the row, padded to T, or a
  `PerTurn`: it stands at the numbers that the row's turns have in the batch, in S places or, of states, in S + 1: the
  state before turn s in place s and the one after it in s + 1.

  ValueError: entries of several shapes or kinds, a `PerTurn` that does not fit its row's turns, no numbers, and
  integers beyond int32.
  """
  n, tokens, turns = shape
  arrays = {row: _array(name, entry) for row, entry in entries.items()}
  per_turn = any(isinstance(entry, PerTurn) for entry in entries.values())
  width = None
  if per_turn:
    more = _states(name, entries, trajectories)
    width, numbers = turns + more, _turn_numbers(trajectories, turns)
  elif all(a.ndim and len(a) == len(trajectories[row].tokens) for row, a in arrays.items()):
    width = tokens
  filled = {row: a for row, a in arrays.items() if a.size} or arrays
  shapes = {a.shape if width is None else (width, *a.shape[1:]) for a in filled.values()}
  if len(shapes) > 1:
    raise ValueError(
      f"column {name!r} has entries of shapes {sorted({a.shape for a in arrays.values()})}; give one shape, one value"
      " per token, or a PerTurn"
    )
  out = np.zeros((n, *shapes.pop()), _dtype(name, filled))
  for row, a in filled.items():
    if per_turn:
      own = numbers[row][: trajectories[row].turns]
      out[row, own] = a[: len(own)]
      out[row, own + more] = a[more:]
    else:
      out[row if width is None else (row, slice(len(a)))] = a
  return out


def demonstrations_batch(
  tasks: Tasks, chat: Chat, indices: Sequence[int], tokens: int, *, turns: int = 4, multiple: int = 1
) -> Rollouts:
  """Solved conversations as rollouts to imitate: reward 1, temperature 1, logp_rollout 0, each a group of its own.

  `mask` is True on the assistant's words and the end of each of its turns.
  ValueError: tasks without demonstrations; those of `to_rollouts`.
  """
  if not hasattr(tasks, "demonstration"):
    raise ValueError(f"{type(tasks).__name__} has no demonstration(index) to warm-start from; set sft.steps to 0")
  rows = [_demonstration(tasks, chat, index, row) for row, index in enumerate(indices)]
  return to_rollouts(rows, tokens=tokens, turns=turns, multiple=multiple)


def _demonstration(tasks: Tasks, chat: Chat, index: int, row: int) -> Trajectory:
  ids, action = chat.demonstration(*tasks.demonstration(index))
  trajectory = Trajectory(task=index, group=row, rollout=row, outcome=1.0, status="done")
  append_turns(trajectory, ids, np.where(action, 0, -1))
  return trajectory


def append_turns(trajectory: Trajectory, ids: Sequence[int] | np.ndarray, turn: np.ndarray) -> None:
  """Tokens to imitate, with logp_rollout and rewards of 0: each run of one number is a turn, of -1 context."""
  edges = [0, *np.flatnonzero(np.diff(turn)) + 1, len(ids)]
  for start, end in itertools.pairwise(edges):
    if turn[start] >= 0:
      zeros = np.zeros(end - start)
      trajectory.append_action(Completion(ids[start:end], zeros, zeros, zeros, "stop"))
      trajectory.turn_reward.append(0.0)
    else:
      trajectory.append_context(ids[start:end])


def _check_row(row: Trajectory, tokens: int) -> None:
  name = f"rollout {row.rollout} of task {row.task}"
  if row.status == "running":
    raise ValueError(f"{name} is still running; wait for its end before training on it")
  if len(row.tokens) > tokens:
    raise ValueError(f"{name} has {len(row.tokens)} tokens, a row holds {tokens}; raise rollout.max_tokens")
  if row.temperature <= 0:
    raise ValueError(
      f"{name} was sampled at temperature {row.temperature}: greedy rollouts have no log-probs to train on;"
      " set rollout.temperature above 0"
    )


def _check_trained(rows: list[Trajectory]) -> None:
  valid = [row for row in rows if row.status != "failed"]
  empty = [row.rollout for row in valid if not any(row.action)]
  if len(empty) == len(valid):
    causes = sorted({row.cause for row in rows if row.status == "failed"})
    because = f"; {len(rows) - len(valid)} of {len(rows)} rollouts failed, for example: {causes[0]}" if causes else ""
    raise ValueError(f"the batch of {len(rows)} rollouts has no token to train on{because}")
  if empty:
    warnings.warn(f"{len(empty)} of {len(valid)} valid rows have no token to train on, as {empty[0]}", stacklevel=3)


def _turn_numbers(rows: Sequence[Trajectory], turns: int) -> list[np.ndarray]:
  """For each row the numbers that its turns have in its rollout: ranks of the steps in which somebody acted."""
  members: dict[int, list[int]] = defaultdict(list)
  for i, row in enumerate(rows):
    members[row.rollout].append(i)
  numbers = [np.zeros(0, np.int64)] * len(rows)
  for rollout, own in members.items():
    steps = _steps([rows[i] for i in own])
    order, number = np.unique(np.concatenate(steps), return_inverse=True)
    if len(order) > turns:
      raise ValueError(f"rollout {rollout} has {len(order)} turns, the batch holds {turns}; raise rollout.max_turns")
    for i, part in zip(own, np.split(number, np.cumsum([len(s) for s in steps])[:-1])):
      numbers[i] = part
  return numbers


def _steps(rows: list[Trajectory]) -> list[np.ndarray]:
  """The step of each turn of the rows of one rollout."""
  counts = [max(row.turns, len(row.turn_reward)) for row in rows]
  if not any(row.turn_step for row in rows):
    return np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
  for row, count in zip(rows, counts):
    if len(row.turn_step) != count or np.any(np.diff(row.turn_step) <= 0):
      raise ValueError(
        f"turn_step of a row of rollout {row.rollout} must give a rising step for each of its {count} turns, got"
        f" {row.turn_step}; give the steps of all rows of a rollout, or of none"
      )
  return [np.array(row.turn_step, np.int64) for row in rows]


def _dense(ids: list[int], n: int) -> np.ndarray:
  """Ids renumbered from 0 in order of first appearance; filler rows get ids of their own."""
  number: dict[int, int] = {}
  dense = [number.setdefault(i, len(number)) for i in ids]
  return np.array([*dense, *range(len(ids), n)], np.int32)


def _padded(ragged: list, shape: tuple[int, int], dtype, fill) -> np.ndarray:
  out = np.full(shape, fill, dtype)
  for i, values in enumerate(ragged):
    out[i, : len(values)] = values
  return out


def _routing(rows: list[Trajectory], n: int, tokens: int) -> np.ndarray:
  recorded = next((row.routing[0] for row in rows if row.routing), None)
  if recorded is None:
    raise ValueError("no rollout recorded its routing; set rollout.replay_routing to false for a dense model")
  out = np.full((n, tokens, *np.shape(recorded)), -1, recorded.dtype)
  for i, row in enumerate(rows):
    if row.routing:
      out[i, : len(row.routing)] = row.routing
  return out


def _columns(rows: list[Trajectory], shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
  names = sorted({name for row in rows for name in row.columns})
  columns = {name: column(name, _entries(rows, name), rows, shape) for name in names}
  if any(row.logp_sampled != row.logp_rollout for row in rows):
    columns["logp_sampled"] = _padded([row.logp_sampled for row in rows], shape[:2], np.float32, 0)
  return columns


def _entries(rows: list[Trajectory], name: str) -> dict[int, Any]:
  lacking = [row.rollout for row in rows if name not in row.columns and row.status != "failed"]
  if lacking:
    raise ValueError(f"column {name!r} is missing in {len(lacking)} of {len(rows)} rollouts, as in {lacking[0]}")
  return {i: row.columns[name] for i, row in enumerate(rows) if name in row.columns}


def _array(name: str, entry: Any) -> np.ndarray:
  try:
    array = np.asarray(entry)
  except ValueError as error:
    raise ValueError(f"column {name!r} has an entry that is no array: {error}") from None
  if array.dtype.kind not in "biuf":
    raise ValueError(f"column {name!r} must hold numbers, got {entry!r}")
  return array


def _states(name: str, entries: Mapping[int, Any], trajectories: Sequence[Trajectory]) -> int:
  """0 for a value per turn, 1 for one per state before and after them."""
  more = {len(entry) - trajectories[row].turns if isinstance(entry, PerTurn) else -1 for row, entry in entries.items()}
  if more not in ({0}, {1}):
    found = [(len(np.atleast_1d(entry)), trajectories[row].turns) for row, entry in entries.items()]
    raise ValueError(
      f"column {name!r} must be a PerTurn in every row, with a value for each of its turns, or in all with one more;"
      f" got (values, turns) {sorted(set(found))}"
    )
  return more.pop()


def _dtype(name: str, arrays: Mapping[int, np.ndarray]) -> type:
  kinds = {a.dtype.kind for a in arrays.values()}
  if "f" in kinds:
    return np.float32
  if kinds == {"b"}:
    return np.bool_
  largest = max(max(int(a.max(initial=0)), -int(a.min(initial=0))) for a in arrays.values())
  if largest > np.iinfo(np.int32).max:
    raise ValueError(f"column {name!r} must hold integers within int32, got one of size {largest}")
  return np.int32
