"""The environment protocol: single-use, asynchronous, seeded.

    env = MyEnv(**options)
    observations = await env.reset(seed)             # {agent: Observation}
    step = await env.step({agent: Action(...)})      # until step.status is not "running"
    await env.close()

The same seed gives the same episode for the same actions. A failure of infrastructure raises, or returns
`status="failed"` with a cause: it is never a reward of 0.
"""

import dataclasses
from typing import Any, Protocol

from jaxagent.types import Status

Message = dict[str, Any]  # {"role": "user", "content": "..."}; what chat templates take


def with_system(system: str | None, *messages: Message) -> tuple[Message, ...]:
  """The messages after a system prompt, where there is one."""
  return messages if system is None else ({"role": "system", "content": system}, *messages)


@dataclasses.dataclass(frozen=True)
class ToolCall:
  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Malformed:
  """A tool call that does not parse; `error` says what was wrong, in words for the model."""

  error: str


def fault(call: ToolCall | Malformed, tool: str) -> str:
  """What is wrong with a call where there is one tool, of one text `input`; "" if nothing is."""
  if isinstance(call, Malformed):
    return call.error
  if call.name != tool:
    return f"no tool {call.name[:16]!r}, only {tool}"
  if set(call.arguments) != {"input"} or not isinstance(call.arguments["input"], str):
    return f"{tool} takes one text, input"
  return ""


@dataclasses.dataclass(frozen=True)
class Observation:
  """Messages that are new to the agent. `tools` are JSON schemas, read at reset only.

  `openings`: the agent's turn begins with the first token of one of these texts, drawn by a fair coin in place of the
  policy. It is an action, and True in the column `forced [N, T]`. Empty: the policy begins itself.
  """

  messages: tuple[Message, ...]
  tools: tuple[dict[str, Any], ...] = ()
  openings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Action:
  """What the agent wrote. `calls` are parsed under the environment's `tool_format` (empty where that is None)."""

  text: str
  calls: tuple[ToolCall | Malformed, ...] = ()
  truncated: bool = False  # the turn ended by its token limit


@dataclasses.dataclass(frozen=True)
class Step:
  """`turn_rewards` are for the actions just taken. `outcome` is the final score of the episode, at its end, in
  [0, 1] by custom; `success/mean` counts those of 1."""

  observations: dict[int, Observation] = dataclasses.field(default_factory=dict)
  turn_rewards: dict[int, float] = dataclasses.field(default_factory=dict)
  outcome: float = 0.0
  status: Status = "running"
  cause: str = ""
  info: dict[str, Any] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
  tool_format: str | None = None

  async def reset(self, seed: int) -> dict[int, Observation]: ...

  async def step(self, actions: dict[int, Action]) -> Step: ...

  async def close(self) -> None: ...


class Tasks(Protocol):
  """Where environments come from. `size` is the number of distinct tasks of a split ("train" or "eval"), None: endless.

  Tasks of different splits never coincide. Optional are:
  `demonstration(index)`: a whole solved conversation about a training task, for a warm start.
  `kind(split, index) -> str`: what the task is one of; `EnvSched` takes tasks of one kind for similar.
  `columns`: names of columns that every rollout brings, so that no annotator needs to.
  `judge(question) -> str`: what rules say of an attempt, see `jaxagent.judges`.
  `skills`: texts that may help, for `jaxagent funnel` to try.
  """

  def size(self, split: str) -> int | None: ...

  def environment(self, split: str, index: int) -> tuple[Environment, int]: ...  # and the seed to reset it with

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]: ...  # messages, tools
