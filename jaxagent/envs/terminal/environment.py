"""terminal: a task in a folder, a bash tool, and a verifier that looks at the folder from outside.

    user       Sort bada into kelo
    assistant  <bash>sort bada>kelo</bash>        in the tool format of the run
    tool       [exit 0]
    assistant  done

The outcome is the number of assertions that pass, over 20, whatever the last words are. Source: Yang et al. 2026, arXiv
2609.11042 (T1). Ours differs: tasks are generated, all have 20 assertions, and the verifier is out of the sandbox's
reach.
"""

import dataclasses
import random
from typing import Any

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Malformed, Message, Observation, Step, ToolCall, fault, with_system
from jaxagent.envs.splits import require_split, split_of, task_seed
from jaxagent.envs.terminal.confinement import SandboxLimits, require_confinement
from jaxagent.envs.terminal.sandbox import Sandbox, SandboxGone
from jaxagent.envs.terminal.tasks import KINDS, LEVELS, Task, generators
from jaxagent.envs.terminal.verifier import Verdict, Verifier, put, run_ours, score

HELD_OUT = 0.1  # share of all tasks that only the "eval" split draws
ATTEMPTS = 1000  # draws before a split is called empty

TOOL = {
  "type": "function",
  "function": {
    "name": "bash",
    "description": "Runs a bash command. The folder, files and exported variables stay; processes do not. No network.",
    "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
  },
}


@dataclasses.dataclass(frozen=True)
class Terminal:
  """Tasks of the given `kinds` ("files", "data", "programs", "config"), evenly. Endless; none is in both splits.

  `level` "full": prompts of a few hundred bytes, results of ten or twenty parts. "tiny": one command does it, prompts
  of less than 100 bytes, for byte-level decoders. `max_turns` bounds the turns of an episode; a call in the last one is
  run, and the episode ends as truncated. `shown` is how many bytes of a command's output the model reads. `system` is a
  system prompt for pretrained models. `limits` are those of the sandbox: `SandboxLimits`, or some of its fields.

  ValueError: a wrong option; a machine that cannot confine a sandbox, with what to install or allow.
  """

  kinds: tuple[str, ...] = KINDS
  level: str = "full"
  max_turns: int = 8
  shown: int = 2048
  system: str | None = None
  limits: SandboxLimits | dict[str, Any] = dataclasses.field(default_factory=SandboxLimits)

  def __post_init__(self):
    kinds = (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds)
    object.__setattr__(self, "kinds", kinds)
    known = bool(kinds) and set(kinds) <= set(KINDS) and len(set(kinds)) == len(kinds)
    least = 2 if self.level == "tiny" else 4
    check_options(
      "terminal: ",
      (known, "kinds", kinds, f"some of {', '.join(KINDS)}, each once"),
      (self.level in LEVELS, "level", self.level, f"one of {', '.join(LEVELS)}"),
      (self.max_turns >= least, "max_turns", self.max_turns, f"at least {least}: what a solution takes"),
      (self.shown >= 64, "shown", self.shown, "at least 64 bytes"),
    )
    object.__setattr__(self, "limits", _limits(self.limits))
    require_confinement()

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["TerminalEpisode", int]:
    return TerminalEpisode(self, require_split(split)), task_seed(split, index)

  def kind(self, split: str, index: int) -> str:
    """One of `kinds`."""
    return self.task(split, task_seed(split, index)).name.partition("/")[0]

  def task(self, split: str, seed: int) -> Task:
    rng = random.Random(seed)
    makers = generators(self.kinds, self.level)
    for _ in range(ATTEMPTS):
      task = rng.choice(makers)(rng)
      if split_of(task.identity, held_out=HELD_OUT) == split:
        return task
    raise ValueError(f"terminal: no task of the {split} split among {ATTEMPTS} draws")

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict, ...]]:
    """The solution of a training task, a command a turn; its commands print nothing."""
    task = self.task("train", task_seed("train", index))
    turns: list[Message] = []
    for command in task.solution:
      call = {"type": "function", "function": {"name": "bash", "arguments": {"input": command}}}
      turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
      turns.append({"role": "tool", "name": "bash", "content": "[exit 0]"})
    return (*self.opening(task), *turns, {"role": "assistant", "content": "done"}), (TOOL,)

  def opening(self, task: Task) -> tuple[Message, ...]:
    return with_system(self.system, {"role": "user", "content": task.prompt})


class TerminalEpisode:
  """One task in one sandbox. A turn without a call ends it.

  Every step is judged, so an episode that the rollout's limits end has the outcome of its last turn. `info` holds the
  column `assertions_passed`, the task's name, the verifier's record, and what was reported: commands that were killed,
  processes left behind. A sandbox that had to be stopped (too many files) leaves no record: outcome 0, with the cause.
  """

  tool_format = "chat"

  def __init__(self, tasks: Terminal, split: str):
    self._tasks, self._split = tasks, split
    self._turns = 0
    self._reports: list[str] = []
    self._sandbox: Sandbox | None = None

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._task = self._tasks.task(self._split, seed)
    self._verifier = Verifier(self._task, self._tasks.limits)
    self._sandbox = await Sandbox.start(self._tasks.limits, shown=self._tasks.shown)
    await put(self._sandbox, self._task.files)
    await run_ours(self._sandbox, [self._task.setup] if self._task.setup else [])
    return {0: Observation(self._tasks.opening(self._task), (TOOL,))}

  async def step(self, actions: dict[int, Action]) -> Step:
    action = actions[0]
    self._turns += 1
    try:
      replies = tuple([await self._reply(call) for call in action.calls])
    except SandboxGone as gone:
      self._reports.append(f"turn {self._turns}: {gone}")
      return self._step(score(None, str(gone)), "truncated")
    verdict = await self._verifier.judge(self._sandbox.folder)
    if not action.calls:
      return self._step(verdict, "truncated" if action.truncated else "done")
    if self._turns >= self._tasks.max_turns:
      cause = f"a call in turn {self._turns} of at most {self._tasks.max_turns}"
      return self._step(dataclasses.replace(verdict, cause=verdict.cause or cause), "truncated")
    return dataclasses.replace(self._step(verdict, "running"), observations={0: Observation(replies)})

  async def close(self) -> None:
    if self._sandbox is not None:
      await self._sandbox.close()

  async def _reply(self, call: ToolCall | Malformed) -> Message:
    """What is wrong with a call goes back to the model; it does not end the episode."""
    if error := fault(call, "bash"):
      return {"role": "tool", "name": "bash", "content": f"error: {error}"}
    result = await self._sandbox.run(call.arguments["input"])
    self._reports += [f"turn {self._turns}: {note}" for note in result.notes]
    return {"role": "tool", "name": "bash", "content": result.text}

  def _step(self, verdict: Verdict, status: str) -> Step:
    info = {
      "columns": verdict.columns,
      "task": self._task.name,
      "record": verdict.record,
      "reports": tuple(self._reports),
    }
    return Step(outcome=verdict.outcome, status=status, cause=verdict.cause, info=info)


def _limits(given: Any) -> SandboxLimits:
  if isinstance(given, SandboxLimits):
    return given
  names = [field.name for field in dataclasses.fields(SandboxLimits)]
  if not isinstance(given, dict) or not set(given) <= set(names):
    raise ValueError(f"terminal: limits takes some of {', '.join(names)}, got {given!r}")
  return SandboxLimits(**given)
