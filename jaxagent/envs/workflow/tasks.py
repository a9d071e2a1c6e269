"""workflow: an agent repairs the files of a small operation with tool calls, and writes a report.

    tasks = Workflow(domains=("cleaning", "forensics"), scale="unit")
    environment, seed = tasks.environment("train", 0)

After Tev (Hu et al. 2026): a seeded latent world is rendered to files, declared defects are put into them, and a
progress contract scores every state on the way. An episode is worth

    R = 1[pass] + progress_weight * Phi(end)

`outcome` is 1[pass]; turn s is rewarded with progress_weight * (Phi after s - Phi before), so outcome and rewards sum
to R. The column `potential [N, S+1]` is Phi at the start and after each turn: the preset `tev` makes its own turn
rewards of it. A rollout that is cut short is graded on the workspace it leaves.

Ours differs: four domains instead of seven, in memory, with four file tools instead of bash. The sizes of the tiers,
the domains and the scorers are reconstructions: only the authors' summary of the method was available, not the paper.
"""

import dataclasses
from typing import Any, ClassVar

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Message, Observation, Step, ToolCall, with_system
from jaxagent.envs.splits import require_split, split_of, task_seed
from jaxagent.envs.workflow import judge as rules
from jaxagent.envs.workflow.cleaning import CLEANING
from jaxagent.envs.workflow.draft import Draft
from jaxagent.envs.workflow.forensics import FORENSICS
from jaxagent.envs.workflow.inventory import INVENTORY
from jaxagent.envs.workflow.pipeline import PIPELINE
from jaxagent.envs.workflow.task import Task, build, truth_of
from jaxagent.envs.workflow.verifier import verify
from jaxagent.envs.workflow.workspace import NAMED, SINGLE, Workspace, as_input, schemas
from jaxagent.envs.workflow.world import SCALES, Domain, Scale
from jaxagent.types import PerTurn

DOMAINS: dict[str, Domain] = {d.name: d for d in (CLEANING, PIPELINE, INVENTORY, FORENSICS)}
HELD_OUT = 0.2  # share of all tasks that only the "eval" split draws
ATTEMPTS = 1000
RULES_FILE = "rules.md"
SEED_STRIDE = 2**40  # seeds of one task's attempts are this far apart


@dataclasses.dataclass(frozen=True)
class Workflow:
  """Tasks: domain `index mod len(domains)`, endless; no task is in both splits.

  `scale` is a tier, whose `rows` of the world, `defects` of each class and number of `classes` may be given on their
  own; fewer than `defects` are drawn where the world has fewer places for them. `rules` says where the agent finds the
  rules: in the "prompt", or in the "file" rules.md, which makes a prompt of about 60 bytes. `arguments` is how tools
  are called: "named", or with one text, "input" (path first), as the plain tool format needs; both are understood.
  `max_calls` bounds an episode (the paper: 64), `max_output` the characters of a reply.
  """

  domains: tuple[str, ...] = tuple(DOMAINS)
  scale: str = "unit"
  rows: int | None = None
  defects: int | None = None
  classes: int | None = None
  rules: str = "prompt"
  arguments: str = NAMED
  max_calls: int = 64
  max_output: int = 10_000
  progress_weight: float = 0.25
  system: str | None = None
  columns: ClassVar[tuple[str, ...]] = ("potential",)  # that its rollouts bring

  def __post_init__(self):
    names = (self.domains,) if isinstance(self.domains, str) else self.domains
    object.__setattr__(self, "domains", tuple(names))
    most = min((len(DOMAINS[name].corruptions) for name in self.domains if name in DOMAINS), default=1)
    optional = lambda value, low, high: value is None or low <= value <= high  # noqa: E731
    check_options(
      "workflow: ",
      (
        self.domains and set(self.domains) <= set(DOMAINS) and len(set(self.domains)) == len(self.domains),
        "domains", self.domains, f"different ones of {', '.join(DOMAINS)}",
      ),
      (self.scale in SCALES, "scale", self.scale, f"one of {', '.join(SCALES)}"),
      (optional(self.rows, 2, 1000), "rows", self.rows, "in 2..1000"),
      (optional(self.defects, 1, 1000), "defects", self.defects, "in 1..1000"),
      (optional(self.classes, 1, most), "classes", self.classes, f"in 1..{most} for these domains"),
      (self.rules in ("prompt", "file"), "rules", self.rules, "'prompt' or 'file'"),
      (self.arguments in (NAMED, SINGLE), "arguments", self.arguments, f"{NAMED!r} or {SINGLE!r}"),
      (self.max_calls >= 1, "max_calls", self.max_calls, "at least 1"),
      (self.max_output >= 16, "max_output", self.max_output, "at least 16 characters"),
      (self.progress_weight >= 0, "progress_weight", self.progress_weight, "at least 0"),
    )  # fmt: skip
    if self.sizes.rows < (needed := self.sizes.classes * self.sizes.defects):
      raise ValueError(
        f"workflow: rows must be at least classes * defects = {needed}, got {self.sizes.rows}; each defect has a record"
        " of its own"
      )

  @property
  def sizes(self) -> Scale:
    own = {name: getattr(self, name) for name in ("rows", "defects", "classes")}
    return dataclasses.replace(SCALES[self.scale], **{name: n for name, n in own.items() if n is not None})

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["WorkflowEpisode", int]:
    return WorkflowEpisode(self, self.kind(split, index), require_split(split)), task_seed(split, index)

  def kind(self, split: str, index: int) -> str:
    """The task's domain."""
    return self.domains[index % len(self.domains)]

  def task(self, domain: str, split: str, seed: int) -> Task:
    """The first task of the split among those of seed, seed + stride, ..."""
    for attempt in range(ATTEMPTS):
      own = DOMAINS[domain], self.sizes, seed + attempt * SEED_STRIDE
      if split_of(repr(sorted(truth_of(*own).items())), held_out=HELD_OUT) == split:
        task = build(*own)
        return task if self.rules == "prompt" else _with_file(task)
    raise ValueError(f"workflow: no {domain} task of the {split} split among {ATTEMPTS}; raise rows")

  def judge(self, question: Any) -> str:
    """What the task's contract says of an attempt: see `jaxagent.judges`."""
    index = question.facts["task"]
    task = self.task(self.kind("train", index), "train", task_seed("train", index))
    return rules.judge(task, question.kind, dict(question.facts), max_calls=self.max_calls)

  def opening(self, task: Task) -> tuple[Message, ...]:
    words = task.rules if self.rules == "prompt" else f"Do what {RULES_FILE} says, then write done."
    if self.rules == "prompt":
      words += f"\nFiles: {', '.join(sorted(task.files))}. When all is right, write done."
    return with_system(self.system, {"role": "user", "content": words})

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """The reference solution: every file read, then one repair a turn, by one who sees no more than the agent."""
    task = self.task(self.kind("train", index), "train", task_seed("train", index))
    workspace = Workspace(dict(task.files), self.max_output)
    messages = list(self.opening(task))
    for call in (*_reading(task), *reference_calls(task)):
      written = as_input(call) if self.arguments == SINGLE else call
      function = {"name": written.name, "arguments": written.arguments}
      messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
      messages.append({"role": "tool", "name": call.name, "content": workspace.reply(call)})
    return (*messages, {"role": "assistant", "content": "done"}), schemas(self.arguments)


def reference_calls(task: Task) -> list[ToolCall]:
  """The changes of the reference solution, which works from the inputs alone."""
  draft = Draft(task.files)
  task.domain.solve(draft)
  return draft.calls


class WorkflowEpisode:
  """One task. It ends with the first turn without a call, or after `max_calls` calls (truncated)."""

  tool_format = "chat"

  def __init__(self, tasks: Workflow, domain: str, split: str):
    self._tasks, self._domain, self._split = tasks, domain, split

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._task = self._tasks.task(self._domain, self._split, seed)
    self._workspace = Workspace(dict(self._task.files), self._tasks.max_output)
    self._calls, self._potential = 0, [self._task.contract.potential(self._workspace.files)]
    return {0: Observation(self._tasks.opening(self._task), schemas(self._tasks.arguments))}

  async def step(self, actions: dict[int, Action]) -> Step:
    action = actions[0]
    left = self._tasks.max_calls - self._calls
    calls, over = action.calls[:left], len(action.calls) > left
    self._calls += len(calls)
    replies = tuple(
      {"role": "tool", "name": getattr(call, "name", "error"), "content": self._workspace.reply(call)} for call in calls
    )
    self._potential.append(self._task.contract.potential(self._workspace.files))
    if over or (calls and self._calls == self._tasks.max_calls):
      return self._graded(status="truncated", cause=f"all of at most {self._tasks.max_calls} calls were made")
    if not action.calls:
      return self._graded(status="truncated" if action.truncated else "done")
    return self._graded(observations={0: Observation(replies)})

  def _graded(self, **fields) -> Step:
    """Every step carries the grade of the workspace as it is: a limit may end the episode after any of them."""
    before, after = self._potential[-2:]
    return Step(
      turn_rewards={0: self._tasks.progress_weight * (after - before)},
      outcome=float(verify(self._workspace.files, self._task.truth)),
      info={
        "columns": {"potential": PerTurn(self._potential)},
        "domain": self._domain,
        "stages": self._task.contract.scores(self._workspace.files),
      },
      **fields,
    )

  async def close(self) -> None:
    pass


def _reading(task: Task) -> list[ToolCall]:
  return [ToolCall("read", {"path": path}) for path in sorted(task.files)]


def _with_file(task: Task) -> Task:
  """The task with its rules among its files, where they have to stay as they are."""
  more = {RULES_FILE: task.rules + "\n"}
  contract = dataclasses.replace(task.contract, truth={**task.truth, **more})
  return dataclasses.replace(task, files={**task.files, **more}, truth={**task.truth, **more}, contract=contract)
