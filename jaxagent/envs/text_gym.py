"""text_gym: environments of texts with gymnasium's interface, from anywhere.

    env: {name: text_gym, options: {make: "my_module:make", options: {size: 4}}}

    observation, info = environment.reset(seed=3)                                   # or the observation alone
    observation, reward, terminated, truncated, info = environment.step("north")    # or observation, reward, done

gymnasium's own environments, TextWorld's, or any object with these two methods; gymnasium itself is not needed.
"""

import asyncio
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Message, Observation, Step, with_system
from jaxagent.envs.importing import attribute
from jaxagent.envs.splits import require_split, task_seed

ACTIONS: dict[str, Callable[[str], str]] = {
  "text": str.strip,
  "first_line": lambda text: next((line.strip() for line in text.splitlines() if line.strip()), ""),
  "last_line": lambda text: next((line.strip() for line in reversed(text.splitlines()) if line.strip()), ""),
}


@dataclasses.dataclass(frozen=True)
class TextGym:
  """Tasks: `make(**options)`, `my_module:name`, reset with a seed of its split alone. Endless.

  `action` says what of the policy's words is sent: the "text", its "first_line" or its "last_line". The outcome is the
  sum of rewards over `full_reward`, within [0, 1]; `turn_rewards` pays each reward at its turn. `observation` is a key
  of observations that are mappings. `shown` bounds an observation, in characters. `in_thread`: for environments that
  block for long. An episode ends as truncated after `max_turns` turns. `system` is a system prompt.

  ValueError: a wrong option; what `make` gives has no `reset` and `step`.
  """

  make: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  action: str = "text"
  observation: str | None = None
  full_reward: float = 1.0
  turn_rewards: bool = False
  max_turns: int = 32
  shown: int = 4000
  in_thread: bool = False
  system: str | None = None

  def __post_init__(self):
    check_options(
      "text_gym: ",
      (self.action in ACTIONS, "action", self.action, f"one of {', '.join(ACTIONS)}"),
      (self.full_reward > 0, "full_reward", self.full_reward, "positive"),
      (self.max_turns >= 1, "max_turns", self.max_turns, "at least 1"),
      (self.shown >= 16, "shown", self.shown, "at least 16 characters"),
    )
    self.made()

  def made(self) -> Any:
    factory = attribute(self.make, what="env.options.make")
    try:
      made = factory(**self.options)
    except TypeError as error:
      raise ValueError(f"text_gym: {self.make} with options {self.options}: {error}") from error
    if not (hasattr(made, "reset") and hasattr(made, "step")):
      raise ValueError(f"text_gym: {self.make} must give an object with reset and step, got {type(made).__name__}")
    return made

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["TextGymEpisode", int]:
    return TextGymEpisode(self), task_seed(split, index)


class TextGymEpisode:
  """One episode. What the environment raises fails it; it is closed once."""

  tool_format = None

  def __init__(self, tasks: TextGym):
    self._tasks = tasks
    self._inner: Any = None
    self._turns, self._total = 0, 0.0

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._inner = self._tasks.made()
    takes = inspect.signature(self._inner.reset).parameters
    named = "seed" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given = await (self._run(self._inner.reset, seed=seed) if named else self._run(self._inner.reset, seed))
    observation = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    return {0: Observation(with_system(self._tasks.system, self._said(observation)))}

  async def step(self, actions: dict[int, Action]) -> Step:
    self._turns += 1
    given = await self._run(self._inner.step, ACTIONS[self._tasks.action](actions[0].text))
    observation, reward, ended, cut = _five(given)
    if not math.isfinite(reward):
      raise ValueError(f"text_gym: {self._tasks.make} gave the reward {reward}")
    self._total += reward
    outcome = min(max(self._total / self._tasks.full_reward, 0.0), 1.0)
    paid = {0: reward / self._tasks.full_reward} if self._tasks.turn_rewards else {}
    last = self._turns >= self._tasks.max_turns
    if ended or cut or last:
      cause = "" if ended else "the environment's limit" if cut else f"{self._turns} turns"
      return Step(turn_rewards=paid, outcome=outcome, status="done" if ended else "truncated", cause=cause)
    return Step({0: Observation((self._said(observation),))}, turn_rewards=paid, outcome=outcome)

  async def close(self) -> None:
    close, self._inner = getattr(self._inner, "close", None), None
    if close is not None:
      await self._run(close)

  async def _run(self, method: Callable[..., Any], *arguments, **named) -> Any:
    if self._tasks.in_thread:
      return await asyncio.to_thread(method, *arguments, **named)
    return method(*arguments, **named)

  def _said(self, observation: Any) -> Message:
    key = self._tasks.observation
    if key is not None:
      observation = observation[key]
    if not isinstance(observation, str):
      raise ValueError(f"text_gym: an observation must be a text, got {type(observation).__name__}; name its key")
    return {"role": "user", "content": observation[: self._tasks.shown]}


def _five(given: Any) -> tuple[Any, float, bool, bool]:
  """(observation, reward, terminated, truncated) of gymnasium's five values or of four or three older ones."""
  match given:
    case (observation, reward, terminated, truncated, _):
      return observation, float(reward), bool(terminated), bool(truncated)
    case (observation, reward, done, _) | (observation, reward, done):
      return observation, float(reward), bool(done), False
  raise ValueError(f"text_gym: step must give five values, four or three, got {given!r:.100}")
