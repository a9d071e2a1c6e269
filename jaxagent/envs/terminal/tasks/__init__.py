"""Generators of tasks, by kind and level. Each is a function of a `random.Random`."""

import random
from collections.abc import Callable

from jaxagent.envs.terminal.tasks import config, data, files, programs
from jaxagent.envs.terminal.tasks.task import ASSERTIONS, Task

MODULES = {"files": files, "data": data, "programs": programs, "config": config}
KINDS = tuple(MODULES)
LEVELS = ("full", "tiny")

Generator = Callable[[random.Random], Task]


def generators(kinds: tuple[str, ...], level: str) -> tuple[Generator, ...]:
  return tuple(make for kind in kinds for make in getattr(MODULES[kind], level.upper()))


__all__ = ["ASSERTIONS", "KINDS", "LEVELS", "Generator", "Task", "generators"]
