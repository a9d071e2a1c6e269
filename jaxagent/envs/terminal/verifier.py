"""What the folder holds against what the task asked for. Nothing here runs where the agent's commands ran.

Facts are looked up from outside, by `Folder`, while no process of the agent is alive. A program is copied out and run
on its cases in a sandbox of its own, which holds nothing else; what it should print stays here.
"""

import asyncio
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxagent.envs.terminal.confinement import FOLDER, SandboxLimits
from jaxagent.envs.terminal.folder import Folder
from jaxagent.envs.terminal.sandbox import Sandbox, SandboxGone
from jaxagent.envs.terminal.tasks.task import ASSERTIONS, Case, Task, text
from jaxagent.rewards.assertions import assertion_reward, count_assertions

SCALE = 20.0  # of the reward, for all tasks
CASE_WALL = 2.0  # seconds that a program may take for one case
MAX_PROGRAM = 8192  # bytes
BATCH = 8192  # characters of file content in one command


@dataclasses.dataclass(frozen=True)
class Verdict:
  """`record`: {assertion: passed}; None, and `passed` -1, where there is none, with the cause."""

  record: dict[str, bool] | None
  passed: int
  outcome: float
  cause: str = ""

  @property
  def columns(self) -> dict[str, Any]:
    return {"assertions_passed": self.passed}


def score(record: dict[str, bool] | None, cause: str = "") -> Verdict:
  """outcome = passed / 20; without a record, passed is -1 and the outcome is the binary one: 0, with a cause."""
  counted = count_assertions(record)
  binary = float(record is not None and counted.passed == counted.total > 0)
  reward = assertion_reward(np.array([counted.passed]), np.array([binary], np.float32), scale=SCALE)
  cause = ": ".join(part for part in (counted.cause, cause) if part) if counted.cause else ""
  return Verdict(record, counted.passed, float(reward[0]), cause)


class Verifier:
  """Judges one task, as often as asked: a program that has not changed is not run again."""

  def __init__(self, task: Task, limits: SandboxLimits):
    self._task = task
    self._limits = limits
    self._programs: dict[str, str | None] = {}
    self._passed: tuple[bool, ...] = ()

  async def judge(self, folder: Folder) -> Verdict:
    """Only between commands, or after the sandbox is gone. OSError: no sandbox for the programs could be started."""
    guarded, facts, programs = await asyncio.to_thread(self._look, folder)
    if programs != self._programs or not self._passed:
      self._passed = await self._try(programs)
      self._programs = programs
    found = (*facts, *self._passed)
    names = [str(fact) for fact in (*self._task.facts, *self._task.cases)]
    times = ASSERTIONS // len(found)
    record = {
      f"{i * times + j + 1}: {name}": guarded and held
      for i, (name, held) in enumerate(zip(names, found))
      for j in range(times)
    }
    return score(record)

  def _look(self, folder: Folder) -> tuple[bool, tuple[bool, ...], dict[str, str | None]]:
    guarded = all(guard.holds(folder) for guard in self._task.guards)
    facts = tuple(fact.holds(folder) for fact in self._task.facts)
    return guarded, facts, {case.script: text(folder, case.script, MAX_PROGRAM) for case in self._task.cases}

  async def _try(self, programs: dict[str, str | None]) -> tuple[bool, ...]:
    """Whether each case passes. After one that had to be killed the others are not tried: they fail too."""
    cases = self._task.cases
    runnable = {name: body for name, body in programs.items() if body and "\0" not in body}
    if not runnable:
      return (False,) * len(cases)
    sandbox = await Sandbox.start(self._limits)
    passed: list[bool] = []
    try:
      await put(sandbox, runnable.items())
      for case in cases:
        held, killed = await self._case(sandbox, case)
        passed.append(held)
        if killed:
          break
    except SandboxGone:
      pass
    finally:
      await sandbox.close()
    return tuple(passed) + (False,) * (len(cases) - len(passed))

  async def _case(self, sandbox: Sandbox, case: Case) -> tuple[bool, bool]:
    words = shlex.join(["bash", case.script, *case.arguments])
    command = f"cd {FOLDER}; printf %s {shlex.quote(case.stdin)} | {words} 2>/dev/null"
    result = await sandbox.run(command, wall=min(CASE_WALL, self._limits.wall))
    right = result.output.strip() == case.output and result.code == 0 and not result.killed
    return right, bool(result.killed)


async def put(sandbox: Sandbox, files: Iterable[tuple[str, str]]) -> None:
  """Writes files, with the folders above them, a few in a command. OSError: they could not be written."""
  batch: list[str] = []
  for path, content in files:
    folder = path.rpartition("/")[0]
    above = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
    batch.append(f"{above}printf %s {shlex.quote(content)} > {shlex.quote(path)}")
    if sum(map(len, batch)) > BATCH:
      await run_ours(sandbox, batch)
      batch = []
  await run_ours(sandbox, batch)


async def run_ours(sandbox: Sandbox, commands: Sequence[str]) -> None:
  """Commands that must succeed. OSError: one of them did not."""
  result = await sandbox.run(" && ".join(commands)) if commands else None
  if result and (result.code or result.killed):
    raise OSError(f"the sandbox could not be set up: {result.text}")
