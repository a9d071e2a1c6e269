"""What a person sees: progress with reward, gap and speed, and rollouts in readable form.

On a terminal a bar moves and what is printed scrolls above it; elsewhere every step is one plain line.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from jaxagent.report.store import Decode, to_record
from jaxagent.types import Trajectory

NAMES = {"sft": "warm start", "train": "step", "eval": "evaluation"}
SHOWN = {  # metric -> how it is shown
  "reward/mean": "reward {:.3f}",
  "success/mean": "success {:.3f}",
  "loss": "loss {:.4g}",
  "logp_gap/max": "gap {:.1e}",
  "tokens_per_second/rollout": "{:,.0f} tok/s rollout",
  "tokens_per_second/update": "{:,.0f} tok/s update",
  "time/step": "{:.1f} s",
}


WARM_START_EVERY = 10  # steps of a warm start between plain lines


class Display:
  """A tracker for people: `write` takes every metrics record. Use with `with`.

  `decode` (ids -> text) makes `show` print the tokens as the policy read and wrote them; without it, the messages.
  """

  def __init__(
    self,
    folder: Any,
    *,
    steps: int,
    warm_start: int | None = None,
    decode: Decode | None = None,
    console: Console | None = None,
  ):
    self._folder, self._decode = folder, decode
    self._totals = {"sft": warm_start, "train": steps}
    self._console = console or Console(highlight=False)
    self._progress = _bars(self._console) if self._console.is_terminal else None
    self._tasks: dict[str, Any] = {}

  def __enter__(self) -> "Display":
    self.say(f"run folder: {self._folder}")
    if self._progress is not None:
      self._progress.start()
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    if self._progress is not None:
      self._progress.stop()

  def write(self, record: Mapping[str, Any]) -> None:
    phase = record["phase"]
    measured = {key: value for key, value in record.items() if key.startswith("eval/")}
    skipped = phase == "sft" and record["step"] % WARM_START_EVERY and not measured
    if measured or (self._progress is None and not skipped):
      self.say(line(record, total=self._totals.get(phase)))
    if self._progress is not None and not measured:
      self._move(phase, record)

  def say(self, text: str) -> None:
    _print(self._console, Text(text))

  def warn(self, text: str) -> None:
    _print(self._console, Text(f"warning: {text}", style="yellow"))

  def show(self, step: int, rollouts: Sequence[Trajectory | Mapping[str, Any]]) -> None:
    """Rollouts of `step`: trajectories, or records of the store."""
    for rollout in rollouts:
      self.say(f"a rollout of step {step}:")
      record = to_record(rollout, decode=self._decode) if isinstance(rollout, Trajectory) else rollout
      show_rollout(record, console=self._console)

  def _move(self, phase: str, record: Mapping[str, Any]) -> None:
    if phase not in self._tasks:
      self._tasks[phase] = self._progress.add_task(NAMES[phase], total=self._totals.get(phase), values="")
    self._progress.update(self._tasks[phase], completed=record["step"], values="  ".join(values(record)))


def line(record: Mapping[str, Any], *, total: int | None = None) -> str:
  """A metrics record on one line."""
  measured = [f"{key.removeprefix('eval/')} {value:.4g}" for key, value in record.items() if key.startswith("eval/")]
  count = f"{record['step']}/{total}" if total is not None else f"{record['step']}"
  if record["phase"] == "eval":
    return "  ".join([f"evaluation after step {count}:", *measured])
  return "  ".join([f"{NAMES[record['phase']]} {count}", *values(record), *measured])


def values(record: Mapping[str, Any]) -> list[str]:
  return [how.format(float(record[key])) for key, how in SHOWN.items() if record.get(key) is not None]


def say(text: str) -> None:
  print(text, flush=True)


def warn(text: str) -> None:
  print(f"warning: {text}", file=sys.stderr, flush=True)


def show_rollout(record: Mapping[str, Any], *, console: Console | None = None) -> None:
  """A record of the store, block by block: what the policy wrote is green, what it read dim; rewards at its turns."""
  console = console or Console(highlight=False)
  _print(console, Text(summary(record), style="bold"))
  if record.get("cause"):
    _print(console, Text(f"cause: {_visible(record['cause'])}", style="red"))
  for turn, author, text in _blocks(record):
    rewards = record.get("turn_reward") or []
    reward = f", reward {rewards[turn]:.4g}" if 0 <= turn < len(rewards) else ""
    _print(console, Text(f"── {author}{reward}", style="green" if turn >= 0 else "cyan"))
    _print(console, Text(_visible(text), style="green" if turn >= 0 else "dim"))


def list_rollouts(step: int, records: Sequence[Mapping[str, Any]], *, console: Console | None = None) -> None:
  """One line for each rollout of a step."""
  console = console or Console(highlight=False)
  _print(console, Text(f"step {step}: {len(records)} rollouts", style="bold"))
  for record in records:
    last = [text for turn, _, text in _blocks(record) if turn >= 0][-1:]
    written = " ".join(_visible(last[0]).split()) if last else ""
    _print(console, Text(f"{summary(record)}  {written[:60]}"))


def summary(record: Mapping[str, Any]) -> str:
  row = f"row {record['row']}, " if record.get("row") is not None else ""
  reward = f", reward {record['reward']:.4g}" if record.get("reward") is not None else ""
  invalid = "" if record.get("valid", True) else ", not valid"
  return (
    f"{row}rollout {record['rollout']}, task {record['task']}, group {record['group']}: {record['status']}{invalid},"
    f" outcome {record['outcome']:.4g}{reward}; {record['turns']} turns, {record['tokens']} tokens,"
    f" {record['actions']} by the policy"
  )


def _blocks(record: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
  """(turn, author, text) of each block; the turn is -1 for what the policy read."""
  if record.get("spans") is not None:
    for span in record["spans"]:
      author = f"policy, turn {span['turn']}" if span["turn"] >= 0 else "read"
      yield span["turn"], f"{author}, {span['tokens']} tokens", span["text"]
    return
  turn = 0
  for message in record["transcript"]:
    wrote = message.get("role") == "assistant"
    yield turn if wrote else -1, f"policy, turn {turn}" if wrote else str(message.get("role")), _content(message)
    turn += wrote


def _content(message: Mapping[str, Any]) -> str:
  content = message.get("content")
  text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
  calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
  return "\n".join([*([text] if text else []), *calls])


def _visible(text: str) -> str:
  """Text whose control characters are escaped: a policy may write anything, and a terminal obeys some of it."""
  return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _print(console: Console, text: Text) -> None:
  console.print(text, soft_wrap=True)


def _bars(console: Console) -> Progress:
  text, shown = TextColumn("{task.description}"), TextColumn("{task.fields[values]}")
  return Progress(text, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), shown, console=console)
