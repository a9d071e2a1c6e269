"""verifiers: tasksets of the verifiers package, its v1 interface (`pip install 'jaxagent[verifiers]'`).

    env: {name: verifiers, options: {taskset: "my_module:MyTaskset", config: {}}}

One prompt, one answer, scored by the task's own rewards. Not taken: tasks with tool servers, user simulators or
containers, and rewards that ask a runtime or a judge: these need verifiers' own harnesses.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from typing import Any

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Message, Observation, Step, with_system
from jaxagent.envs.importing import attribute
from jaxagent.envs.splits import require_split, split_of, task_seed


@dataclasses.dataclass(frozen=True)
class Verifiers:
  """Tasks of `taskset`: `my_module:name` of a Taskset class, or of a function that returns one; or an installed id.

  `config` are the fields of the taskset's configuration. `limit` reads so many tasks, which endless tasksets need. A
  task is "eval" by its content, the share `held_out` of them. `full_reward`: the sum of weighted rewards that is an
  outcome of 1. `system` is used where a task has no system prompt.

  ValueError: a wrong option, no tasks, a task that is not taken (see above), a package that is not installed.
  """

  taskset: str
  config: dict[str, Any] = dataclasses.field(default_factory=dict)
  limit: int | None = None
  held_out: float = 0.1
  full_reward: float = 1.0
  system: str | None = None

  def __post_init__(self):
    check_options(
      "verifiers: ",
      (self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1, or null"),
      (0 < self.held_out < 1, "held_out", self.held_out, "in (0, 1)"),
      (self.full_reward > 0, "full_reward", self.full_reward, "positive"),
    )
    _ = self.tasks

  @functools.cached_property
  def tasks(self) -> dict[str, list[Any]]:
    """The tasks of each split, read once."""
    taskset = _taskset(self.taskset, self.config)
    if self.limit is None and not taskset.bounded:
      raise ValueError(f"verifiers: {self.taskset} is endless; say how many tasks to read with `limit`")
    split: dict[str, list[Any]] = {"train": [], "eval": []}
    for task in itertools.islice(taskset, self.limit):
      _require_single_turn(task, self.taskset)
      own = task.data.model_copy(update={"idx": None})
      split[split_of(own.model_dump_json(), held_out=self.held_out)].append(task)
    if not split["train"]:
      raise ValueError(f"verifiers: {self.taskset} has no training tasks, and {len(split['eval'])} held out")
    return split

  def size(self, split: str) -> int | None:
    return len(self.tasks[require_split(split)])

  def environment(self, split: str, index: int) -> tuple["SingleTurn", int]:
    tasks = self.tasks[require_split(split)]
    if not 0 <= index < len(tasks):
      raise ValueError(f"verifiers: the {split} split has {len(tasks)} tasks, got index {index}")
    return SingleTurn(tasks[index], self), task_seed(split, index)

  def opening(self, task: Any) -> tuple[Message, ...]:
    prompt, system = task.data.prompt, task.data.system_prompt or self.system
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(m) for m in prompt]
    return with_system(system or None, *given)


class SingleTurn:
  """One task. Outcome: the weighted sum of its rewards over `full_reward`; `info` has each, and the metrics."""

  tool_format = None

  def __init__(self, task: Any, tasks: Verifiers):
    self._task, self._tasks = task, tasks

  async def reset(self, seed: int) -> dict[int, Observation]:
    return {0: Observation(self._tasks.opening(self._task))}

  async def step(self, actions: dict[int, Action]) -> Step:
    trace = _trace(self._task, self._tasks.opening(self._task), actions[0].text)
    await self._task.score(trace)
    if not trace.rewards or any(reward is None for reward in trace.rewards.values()):
      raise ValueError(f"verifiers: not every reward of {self._tasks.taskset} was scored: {trace.rewards}")
    if not math.isfinite(trace.reward):
      raise ValueError(f"verifiers: the reward of {self._tasks.taskset} is {trace.reward}")
    scores = {name: reward.value for name, reward in trace.rewards.items()}
    info = {"rewards": scores, "metrics": dict(trace.metrics)}
    return Step(outcome=trace.reward / self._tasks.full_reward, status="done", info=info)

  async def close(self) -> None:
    pass


def _v1():
  try:
    import verifiers.v1 as vf
  except ImportError as error:
    raise ValueError(
      f"the verifiers environment needs the verifiers package ({error}): pip install 'jaxagent[verifiers]'"
    ) from error
  return vf


def _taskset(name: str, config: dict[str, Any]) -> Any:
  vf = _v1()
  from verifiers.v1.utils import generic, loaders

  try:
    if ":" not in name:
      return loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **config))
    made = attribute(name, what="env.options.taskset")
    if not inspect.isclass(made):
      made = made(**config)
    elif issubclass(made, vf.Taskset):
      kind = generic.concrete_type(made, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
      made = made(kind(**config))
  except (ModuleNotFoundError, TypeError) as error:
    raise ValueError(f"verifiers: {name} with config {config}: {error}") from error
  if not isinstance(made, vf.Taskset):
    raise ValueError(f"verifiers: {name} must be or return a verifiers.v1.Taskset, got {type(made).__name__}")
  return made


def _require_single_turn(task: Any, name: str) -> None:
  needs = [
    (task.NEEDS_CONTAINER or task.data.image, "a container"),
    (task.toolsets(task.config), "tool servers"),
    (task.plugged_judges(), "a judge"),
    (task.data.prompt is None, "someone to open the conversation"),
    (not task.hooks("reward"), "a @reward"),
    (any(_asks_runtime(reward) for reward in task.hooks("reward")), "a runtime for its rewards"),
  ]
  for needed, what in needs:
    if needed:
      raise ValueError(f"verifiers: tasks of {name} need {what}, which this environment does not have")


def _asks_runtime(reward: Any) -> bool:
  parameter = inspect.signature(reward).parameters.get("runtime")
  return parameter is not None and parameter.default is inspect.Parameter.empty


def _message(message: Any) -> Message:
  if not isinstance(message.content, str):
    raise ValueError(f"verifiers: a {message.role} message of parts; only texts are taken")
  return {"role": message.role, "content": message.content}


def _trace(task: Any, messages: tuple[Message, ...], text: str) -> Any:
  """What verifiers would have recorded of the conversation."""
  vf = _v1()
  from verifiers.v1.state import state_cls

  kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
  said = [kinds[m["role"]](content=m["content"]) for m in messages]
  nodes = [vf.MessageNode(parent=i - 1 if i else None, message=m) for i, m in enumerate(said)]
  nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=vf.AssistantMessage(content=text), sampled=True))
  about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
  state = state_cls(type(task))()
  return vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), state=state, nodes=nodes, is_completed=True)
