"""What a judge is shown of rollouts: the words of each step, in order, without the outcome."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxagent.envs.base import Action, Message
from jaxagent.models.chat import Chat, parse
from jaxagent.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Step:
  """One turn of one row: what its agent saw that was new, and what it did. `saw` is empty in the row's first turn."""

  row: int  # in the list of trajectories
  agent: int
  turn: int  # of the row
  saw: tuple[Message, ...]
  action: Action


@dataclasses.dataclass(frozen=True)
class Episode:
  """One logical rollout: its rows, and their steps in the order in which they were taken."""

  rows: tuple[int, ...]
  task: int
  outcome: float
  truncated: bool
  openings: tuple[tuple[int, tuple[Message, ...]], ...]  # agent, first messages
  steps: tuple[Step, ...]

  def until(self, steps: int) -> "Episode":
    return dataclasses.replace(self, steps=self.steps[:steps])

  @property
  def facts(self) -> dict[str, Any]:
    """For rules: the number of the task, the steps' agents and actions."""
    return {
      "task": self.task,
      "agents": [step.agent for step in self.steps],
      "actions": [step.action for step in self.steps],
    }


def episodes(trajectories: Sequence[Trajectory], chat: Chat) -> list[Episode]:
  """The logical rollouts of a group that did not fail, in the order of their first rows."""
  rows: dict[int, list[int]] = {}
  for row, trajectory in enumerate(trajectories):
    rows.setdefault(trajectory.rollout, []).append(row)
  alive = [own for own in rows.values() if all(trajectories[row].status != "failed" for row in own)]
  return [_episode(trajectories, own, chat) for own in alive]


def each_row(trajectories: Sequence[Trajectory], chat: Chat) -> list[Episode]:
  """Every row that did not fail, as an episode of its own: what one agent saw and did."""
  return [_episode(trajectories, [i], chat) for i, t in enumerate(trajectories) if t.status != "failed"]


def shown_task(episode: Episode) -> str:
  """A JSON line for the first messages of each agent."""
  return "\n".join(_line({"agent": agent, "task": _plain(messages)}) for agent, messages in episode.openings)


def shown(episode: Episode) -> str:
  """The task, and a JSON line for each step, numbered from 1: quoting keeps the policy's words from posing as lines."""
  team = len(episode.openings) > 1
  lines = []
  for number, step in enumerate(episode.steps, 1):
    who = {"agent": step.agent} if team else {}
    lines.append(_line({"step": number, **who, "saw": _plain(step.saw), "did": step.action.text}))
  return "\n".join([shown_task(episode), *lines])


def _line(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
  return [{"role": m["role"], "content": _words(m)} for m in messages]


def _words(message: Message) -> str:
  content = message.get("content") or ""
  return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _episode(trajectories: Sequence[Trajectory], rows: list[int], chat: Chat) -> Episode:
  first = trajectories[rows[0]]
  parts = [_row_steps(row, trajectories[row], chat) for row in rows]
  known = all(len(trajectories[row].turn_step) == trajectories[row].turns for row in rows)
  steps = [step for part in parts for step in part]
  if known:
    steps.sort(key=lambda step: (trajectories[step.row].turn_step[step.turn], step.agent))
  openings = tuple((trajectories[row].agent, opening(trajectories[row])) for row in rows)
  truncated = any(trajectories[row].status == "truncated" for row in rows)
  return Episode(tuple(rows), first.task, first.outcome, truncated, openings, tuple(steps))


def _conversation(trajectory: Trajectory) -> tuple[list[Message], list[int]]:
  """The messages, and the places of the turns among them: the last `turns` ones of the assistant."""
  messages = [m for m in trajectory.transcript if m["role"] != "environment"]
  said = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
  return messages, said[len(said) - trajectory.turns :] if trajectory.turns else []


def opening(trajectory: Trajectory) -> tuple[Message, ...]:
  """The messages of the first prompt."""
  messages, turns = _conversation(trajectory)
  return tuple(messages[: turns[0]] if turns else messages)


def _row_steps(row: int, trajectory: Trajectory, chat: Chat) -> list[Step]:
  messages, turns = _conversation(trajectory)
  between = [()] + [tuple(messages[a + 1 : b]) for a, b in itertools.pairwise(turns)]
  last = len(turns) - 1
  cut = trajectory.status == "truncated" and bool(trajectory.tokens) and trajectory.tokens[-1] != chat.eot
  return [
    Step(row, trajectory.agent, turn, saw, _action(messages[at], chat, truncated=cut and turn == last))
    for turn, (at, saw) in enumerate(zip(turns, between))
  ]


def _action(message: Message, chat: Chat, *, truncated: bool) -> Action:
  text = _words(message)
  return Action(text, tuple(parse(text, chat.tool_format)), truncated=truncated)


def turn_tokens(trajectory: Trajectory, turn: int) -> np.ndarray:
  """Places in the row of the tokens of a turn."""
  return np.flatnonzero(np.asarray(trajectory.turn) == turn)


def token_at(trajectory: Trajectory, turn: int, offset: int, chat: Chat) -> int:
  """The place in the row of the first token of the turn whose text goes beyond `offset` characters."""
  places = turn_tokens(trajectory, turn)
  ids = [trajectory.tokens[i] for i in places]
  low, high = 0, len(ids) - 1
  while low < high:
    middle = (low + high) // 2
    if len(chat.tokenizer.decode(ids[: middle + 1])) > offset:
      high = middle
    else:
      low = middle + 1
  return int(places[low])
