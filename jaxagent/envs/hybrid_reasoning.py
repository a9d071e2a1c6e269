"""hybrid_reasoning: think, or answer at once; the first token of the answer decides.

    env:
      name: hybrid_reasoning
      options: {env: reasoning_gym, options: {dataset: chain_sum}, reference: stats.json}

    assistant  <think>12 + 30 is 42</think><answer>42</answer>      THINK
    assistant  </think><answer>42</answer>                          NOTHINK: the thinking is over at once

The tasks are those of another single-turn environment, which is given only what follows the thinking. In training a
fair coin draws the first token (mode "coin"), so both modes stay explored; in evaluation the policy does. Columns:
`forced` (the coin's token), `thought` (1 in mode THINK), and with `reference` what the presets `when2think` and
`think_only` read of a task: `reference_accuracy` and `reference_tokens`, of a reference policy in mode THINK.
`jaxagent reference-stats CONFIG` writes that file, once.

Source: Shim et al. 2026, arXiv 2609.19671 (When2Think), from its abstract and notes. The fair coin is AdaptThink's,
arXiv 2505.13417. Ours differs: any tasks in place of DeepScaleR's.
"""

import dataclasses
import functools
import json
import os
from typing import Any

from jaxagent.checks import check_options
from jaxagent.config import Env
from jaxagent.envs.base import Action, Environment, Message, Observation, Step, Tasks, with_system
from jaxagent.envs.splits import require_split

THINK, NO_THINK = "think", "no_think"
MODES = ("coin", "free", THINK, NO_THINK)
REFERENCE = ("reference_accuracy", "reference_tokens")


@dataclasses.dataclass(frozen=True)
class HybridReasoning:
  """Tasks of the single-turn environment `env` with its `options`, answered with or without thinking.

  An answer that begins with `think` has its thought before the last `no_think`; one that begins with `no_think` has
  none. Their first tokens must differ: they decide. Where the chat template opens the thinking itself, `think` is a
  word that thoughts begin with. `mode` says who draws the first token of training: "coin", the policy ("free"), or
  nobody ("think", "no_think": it is the same for all). `reference` is a file of `jaxagent reference-stats`; the tasks
  of training are then those that it has. `system` replaces the system prompt of the inner environment.

  ValueError: a wrong option; no such file, or one of other tasks.
  """

  env: str = "reasoning_gym"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  reference: str | None = None
  mode: str = "coin"
  think: str = "<think>"
  no_think: str = "</think>"
  system: str | None = None

  def __post_init__(self):
    check_options(
      "hybrid_reasoning: ",
      (self.env != "hybrid_reasoning", "env", self.env, "another environment"),
      (self.mode in MODES, "mode", self.mode, f"one of {', '.join(MODES)}"),
      (self.think and not self.think.startswith(self.no_think), "think", self.think, "a text of its own"),
      (self.no_think and not self.no_think.startswith(self.think), "no_think", self.no_think, "a text of its own"),
    )
    _ = self.inner, self.statistics

  @functools.cached_property
  def inner(self) -> Tasks:
    from jaxagent.envs.registry import resolve  # which knows this environment too

    return resolve(Env(self.env, dict(self.options)))

  @functools.cached_property
  def statistics(self) -> list[dict[str, float]] | None:
    return None if self.reference is None else read_statistics(self.reference, self)

  @property
  def identity(self) -> dict[str, Any]:
    """What statistics must agree in: the tasks and how they are posed."""
    return {name: getattr(self, name) for name in ("env", "options", "think", "no_think", "system")}

  def size(self, split: str) -> int | None:
    if require_split(split) == "train" and self.statistics is not None:
      return len(self.statistics)
    return self.inner.size(split)

  def environment(self, split: str, index: int) -> tuple["HybridEpisode", int]:
    environment, seed = self.inner.environment(require_split(split), index)
    known = self.statistics if split == "train" else None
    if known is not None and index >= len(known):
      raise ValueError(
        f"hybrid_reasoning: {self.reference} has {len(known)} tasks, got index {index}; make more of them with"
        " jaxagent reference-stats --tasks"
      )
    words = {"coin": (self.think, self.no_think), "free": (), THINK: (self.think,), NO_THINK: (self.no_think,)}
    openings = words[self.mode] if split == "train" else ()
    facts = {} if known is None else {name: known[index][name] for name in REFERENCE}
    return HybridEpisode(self, environment, openings, facts), seed

  def kind(self, split: str, index: int) -> str:
    """The inner task's, where it has one."""
    return self.inner.kind(split, index) if hasattr(self.inner, "kind") else ""

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """The inner one without thinking: its last message after `no_think`."""
    if not hasattr(self.inner, "demonstration"):
      raise ValueError(f"hybrid_reasoning: {self.env} has no demonstrations to warm-start from; set sft.steps to 0")
    messages, _ = self.inner.demonstration(index)
    prompt = tuple(message for message in messages if message["role"] in ("system", "user"))
    answer = {"role": "assistant", "content": self.no_think + messages[-1]["content"]}
    return (*self.posed(prompt), answer), ()

  def posed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if self.system is None:
      return messages
    rest = tuple(message for message in messages if message["role"] != "system")
    return with_system(self.system, *rest)


class HybridEpisode:
  """Single turn. The outcome is the inner environment's for what follows the thinking; a thought without end has 0."""

  tool_format = None

  def __init__(self, tasks: HybridReasoning, inner: Environment, openings: tuple[str, ...], facts: dict[str, float]):
    self._tasks, self._inner, self._openings, self._facts = tasks, inner, openings, facts

  async def reset(self, seed: int) -> dict[int, Observation]:
    observations = await self._inner.reset(seed)
    if set(observations) != {0}:
      raise ValueError(f"hybrid_reasoning takes tasks of one agent, {self._tasks.env} has {len(observations)}")
    return {0: Observation(self._tasks.posed(observations[0].messages), openings=self._openings)}

  async def step(self, actions: dict[int, Action]) -> Step:
    action = actions[0]
    thought, answer = answer_of(action.text, self._tasks.think, self._tasks.no_think)
    facts = {**self._facts, "thought": float(thought)}
    if answer is None:
      status = "truncated" if action.truncated else "done"
      return Step(status=status, info={"columns": facts, "answer": None})
    step = await self._inner.step({0: dataclasses.replace(action, text=answer, calls=())})
    if step.status == "running":
      raise ValueError(f"hybrid_reasoning takes single-turn tasks; {self._tasks.env} goes on after an answer")
    columns = {**step.info.get("columns", {}), **facts}
    return dataclasses.replace(step, info={**step.info, "columns": columns, "answer": answer})

  async def close(self) -> None:
    await self._inner.close()


def answer_of(text: str, think: str, no_think: str) -> tuple[bool, str | None]:
  """(whether it is in mode THINK, the answer). None: a thought without end.

  A text that begins with neither word is a thought that began without saying so.
  """
  if text.startswith(no_think):
    return False, text.removeprefix(no_think)
  _, ended, answer = text.rpartition(no_think)
  return True, answer if ended else None


def write_statistics(path: str, tasks: HybridReasoning, rows: list[dict[str, Any]], **about: Any) -> None:
  """`rows`, of the training tasks 0, 1, ...: the `REFERENCE` columns and what they come from."""
  text = json.dumps({"identity": tasks.identity, **about, "tasks": rows}, indent=1, sort_keys=True)
  with open(f"{path}.new", "w", encoding="utf-8") as file:
    file.write(text + "\n")
  os.replace(f"{path}.new", path)


def read_statistics(path: str, tasks: HybridReasoning) -> list[dict[str, float]]:
  if not os.path.isfile(path):
    raise ValueError(f"hybrid_reasoning: no file {path!r}; make it with: jaxagent reference-stats CONFIG")
  try:
    with open(path, encoding="utf-8") as file:
      found = json.load(file)
    rows = [{name: float(row[name]) for name in REFERENCE} for row in found["tasks"]]
    identity = found["identity"]
  except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"hybrid_reasoning: {path} is not a file of jaxagent reference-stats: {error!r}") from None
  if not rows:
    raise ValueError(f"hybrid_reasoning: {path} has no tasks")
  own = json.loads(json.dumps(tasks.identity))
  if other := [name for name in own if own[name] != identity.get(name)]:
    raise ValueError(
      f"hybrid_reasoning: {path} was made with {other[0]} {identity.get(other[0])!r}, not {own[other[0]]!r}; make it"
      " again with jaxagent reference-stats"
    )
  return rows
