"""A text for the policy that can be edited: a prompt and skills, put before what an environment says first."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.envs.base import Action, Environment, Message, Observation, Step, Tasks


@dataclasses.dataclass(frozen=True)
class Instructions:
  """`text` is what the policy reads: the prompt, then a line for each skill. `version` counts its changes.

  `refused` are items that validation turned down, `retired` those that the policy came to do without: what an edit
  need not propose again.
  """

  prompt: str = ""
  skills: tuple[str, ...] = ()
  refused: tuple[str, ...] = ()
  retired: tuple[str, ...] = ()
  version: int = 0

  @property
  def items(self) -> tuple[str, ...]:
    """What can be taken away one by one."""
    return (*((self.prompt,) if self.prompt else ()), *self.skills)

  @property
  def text(self) -> str:
    return "\n".join([*([self.prompt] if self.prompt else []), *(f"- {skill}" for skill in self.skills)])

  def edited(self, *, prompt: str, skills: Sequence[str]) -> "Instructions":
    """The same record with this content; a new version if the content differs."""
    after = dataclasses.replace(self, prompt=prompt, skills=tuple(dict.fromkeys(skills)))
    return after if after.text == self.text else dataclasses.replace(after, version=self.version + 1)

  def without(self, items: Sequence[str]) -> "Instructions":
    """Those items taken away; they count as retired."""
    gone = [item for item in self.items if item in items]
    prompt = "" if self.prompt in gone else self.prompt
    after = self.edited(prompt=prompt, skills=[skill for skill in self.skills if skill not in gone])
    return dataclasses.replace(after, retired=tuple(dict.fromkeys((*self.retired, *gone))))

  def refusing(self, candidate: "Instructions") -> "Instructions":
    """The same content; what the candidate had beyond it counts as refused."""
    new = [item for item in candidate.items if item not in self.items]
    return dataclasses.replace(self, refused=tuple(dict.fromkeys((*self.refused, *new))))

  def to_json(self) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

  @classmethod
  def from_json(cls, record: Mapping[str, Any]) -> "Instructions":
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})


NONE = Instructions()


def instructed(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
  """The messages with the text at the end of the system message, or as one where there is none."""
  if not text:
    return tuple(messages)
  if messages and messages[0]["role"] == "system":
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    return (first, *messages[1:])
  return ({"role": "system", "content": text}, *messages)


@dataclasses.dataclass(frozen=True)
class Instructed:
  """The same tasks, each agent's first observation with the text of the instructions."""

  tasks: Tasks
  instructions: Instructions

  def size(self, split: str) -> int | None:
    return self.tasks.size(split)

  def environment(self, split: str, index: int) -> tuple[Environment, int]:
    environment, seed = self.tasks.environment(split, index)
    return InstructedEpisode(environment, self.instructions.text), seed


class InstructedEpisode:
  def __init__(self, environment: Environment, text: str):
    self._environment, self._text, self._met = environment, text, set()
    self.tool_format = getattr(environment, "tool_format", None)

  async def reset(self, seed: int) -> dict[int, Observation]:
    return self._introduced(await self._environment.reset(seed))

  async def step(self, actions: dict[int, Action]) -> Step:
    step = await self._environment.step(actions)
    return dataclasses.replace(step, observations=self._introduced(step.observations))

  async def close(self) -> None:
    await self._environment.close()

  def _introduced(self, observations: dict[int, Observation]) -> dict[int, Observation]:
    new = {agent for agent in observations if agent not in self._met}
    self._met |= new
    return {
      agent: dataclasses.replace(o, messages=instructed(o.messages, self._text)) if agent in new else o
      for agent, o in observations.items()
    }
