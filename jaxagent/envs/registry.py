"""From a config's `env` section to tasks."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxagent.checks import nearest
from jaxagent.config import Env
from jaxagent.envs.base import Environment, Tasks
from jaxagent.envs.calculator import Calculator
from jaxagent.envs.dataset import Dataset
from jaxagent.envs.hybrid_reasoning import HybridReasoning
from jaxagent.envs.importing import attribute
from jaxagent.envs.reasoning_gym import ReasoningGym
from jaxagent.envs.search import Search
from jaxagent.envs.splits import require_split, task_seed
from jaxagent.envs.team import Team
from jaxagent.envs.terminal import Terminal
from jaxagent.envs.text_gym import TextGym
from jaxagent.envs.textarena import TextArena
from jaxagent.envs.verifiers import Verifiers
from jaxagent.envs.workflow import Workflow

ENVIRONMENTS: dict[str, Callable[..., Tasks]] = {
  "calculator": Calculator, "reasoning_gym": ReasoningGym, "dataset": Dataset, "search": Search,
  "hybrid_reasoning": HybridReasoning, "team": Team, "terminal": Terminal, "workflow": Workflow,
  "textarena": TextArena, "text_gym": TextGym, "verifiers": Verifiers,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Seeded:
  """Tasks of an environment class: task `index` is a fresh `make(**options)`, reset with a seed of its split alone."""

  make: Callable[..., Environment]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple[Environment, int]:
    return self.make(**self.options), task_seed(split, index)


def resolve(env: Env) -> Tasks:
  """The tasks that a config names: one of `ENVIRONMENTS`, or `my_package.module:MyEnv`.

  `MyEnv` is an environment class (with `reset` and `step`), or a function or class that returns `Tasks`; both take the
  options as keyword arguments. ValueError: an unknown name or option, with the nearest one.
  """
  if ":" not in env.name:
    if env.name not in ENVIRONMENTS:
      raise ValueError(
        f"env.name: unknown environment {env.name!r}{nearest(env.name, ENVIRONMENTS)};"
        f" one of {', '.join(ENVIRONMENTS)}, or my_package.module:MyEnv"
      )
    return _call(ENVIRONMENTS[env.name], env)
  made = attribute(env.name, what="env.name")
  if inspect.isclass(made) and hasattr(made, "reset") and hasattr(made, "step"):
    _check_options(made, env)
    return Seeded(made, dict(env.options))
  if not callable(made):
    raise ValueError(f"env.name: {env.name} must be an environment class or return tasks, got {made!r}")
  tasks = _call(made, env)
  if not (hasattr(tasks, "environment") and hasattr(tasks, "size")):
    raise ValueError(f"env.name: {env.name} must give tasks with `size` and `environment`, got {type(tasks).__name__}")
  return tasks


def _call(make: Callable[..., Any], env: Env) -> Any:
  _check_options(make, env)
  try:
    return make(**env.options)
  except TypeError as error:
    raise ValueError(f"env.options of {env.name}: {error}") from error


def _check_options(make: Callable[..., Any], env: Env) -> None:
  parameters = inspect.signature(make).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  for option in env.options:
    if option not in parameters and not takes_any:
      raise ValueError(
        f"env.options: {env.name} has no option {option!r}{nearest(option, parameters)}; it takes"
        f" {', '.join(parameters) or 'none'}"
      )
  empty, variadic = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  for name, parameter in parameters.items():
    if parameter.default is empty and parameter.kind not in variadic and name not in env.options:
      raise ValueError(f"env.options: {env.name} needs the option {name!r}")
