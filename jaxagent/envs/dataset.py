"""dataset: prompts and answers from a file, scored by a Python function.

    env: {name: dataset, options: {path: train.jsonl, reward: my_module:my_reward}}

    def my_reward(prompt, completion, answer) -> float: ...     # or async def

`completion` is what the model wrote, and only that.
"""

import dataclasses
import functools
import inspect
import json
import math
import os
from collections.abc import Callable
from typing import Any

from jaxagent.envs.base import Action, Message, Observation, Step, with_system
from jaxagent.envs.importing import attribute
from jaxagent.envs.splits import digest, require_split, task_seed

Row = dict[str, Any]


def exact_match(prompt: Any, completion: str, answer: Any) -> float:
  """1 if the completion is the answer, white space at the ends aside."""
  return float(completion.strip() == str(answer).strip())


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Single-turn tasks from the rows of `path`: a JSON-lines file, or a Hugging Face data set's folder or hub name.

  A row's prompt is a text or a list of messages, its answer anything that `reward` understands. `held_out` is the share
  of distinct prompts that make the "eval" split (chosen by a hash of the prompt, so a repeated prompt lies in one split
  and an added row moves few others); with `eval_path` the whole of `path` is "train". `reward` is a function, or the
  name of one as `my_module:my_reward`. `name` and `split` are those of the Hugging Face data set.

  ValueError: a missing file, no rows, a line that is not a JSON object, a row without a key, a prompt in both files.
  """

  path: str
  eval_path: str | None = None
  reward: str | Callable[..., Any] = exact_match
  prompt_key: str = "prompt"
  answer_key: str = "answer"
  system: str | None = None
  held_out: float = 0.1
  name: str | None = None
  split: str = "train"

  def __post_init__(self):
    if not 0 <= self.held_out < 1:
      raise ValueError(f"dataset: held_out must be in [0, 1), got {self.held_out!r}")
    if isinstance(self.reward, str):
      object.__setattr__(self, "reward", attribute(self.reward, what="env.options.reward"))
    if not callable(self.reward):
      raise ValueError(f"dataset: reward must be a function of (prompt, completion, answer), got {self.reward!r}")
    _ = self.rows  # files are read, and their faults reported, here

  @functools.cached_property
  def rows(self) -> dict[str, list[Row]]:
    rows = self._read(self.path)
    if self.eval_path is None:
      return _held_out(rows, self.held_out, self.path)
    held = self._read(self.eval_path)
    shared = {_text(row["prompt"]) for row in rows} & {_text(row["prompt"]) for row in held}
    if shared:
      raise ValueError(
        f"dataset: {len(shared)} prompts are both in {self.path} and in {self.eval_path}, for example"
        f" {min(shared)[:80]!r}; the splits must not share prompts"
      )
    return {"train": rows, "eval": held}

  def size(self, split: str) -> int | None:
    return len(self.rows[require_split(split)])

  def environment(self, split: str, index: int) -> tuple["Prompt", int]:
    rows = self.rows[require_split(split)]
    if not 0 <= index < len(rows):
      raise ValueError(f"dataset: the {split} split has {len(rows)} prompts, got index {index}")
    return Prompt(rows[index], self.system, self.reward), task_seed(split, index)

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict, ...]]:
    """The prompt and the answer's text: only for data sets whose answer is what the model should write."""
    row = self.rows["train"][index % len(self.rows["train"])]
    return (*opening(row["prompt"], self.system), {"role": "assistant", "content": str(row["answer"])}), ()

  def _read(self, path: str) -> list[Row]:
    if path.endswith((".jsonl", ".json")):
      found = read_jsonl(path)
    else:
      found = _hugging_face(path, self.name, self.split)
    if not found:
      raise ValueError(f"dataset: {path} has no rows: the prompt set is empty")
    return [self._row(row, where) for where, row in found]

  def _row(self, row: dict[str, Any], where: str) -> Row:
    for key in (self.prompt_key, self.answer_key):
      if row.get(key) is None:
        raise ValueError(f"dataset: {where} has no {key!r}; its keys are {', '.join(row) or 'none'}")
    prompt = row[self.prompt_key]
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    if not (prompt and (isinstance(prompt, str) or messages)):
      raise ValueError(f"dataset: {where}: {self.prompt_key!r} must be a text or a list of messages, got {prompt!r}")
    return {"prompt": prompt, "answer": row[self.answer_key]}


class Prompt:
  """Single turn; the outcome is the reward function's value, which must be a finite number."""

  tool_format = None

  def __init__(self, row: Row, system: str | None, reward: Callable[..., Any]):
    self._row, self._system, self._reward = row, system, reward

  async def reset(self, seed: int) -> dict[int, Observation]:
    return {0: Observation(opening(self._row["prompt"], self._system))}

  async def step(self, actions: dict[int, Action]) -> Step:
    value = self._reward(self._row["prompt"], actions[0].text, self._row["answer"])
    value = await value if inspect.isawaitable(value) else value
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
      raise TypeError(f"the reward function must return a number, got {value!r}")
    if not math.isfinite(value):
      raise ValueError(f"the reward function returned {float(value)}")
    return Step(outcome=float(value), status="done")

  async def close(self) -> None:
    pass


def opening(prompt: str | list[Message], system: str | None) -> tuple[Message, ...]:
  messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
  return with_system(system, *messages)


def read_jsonl(path: str) -> list[tuple[str, dict[str, Any]]]:
  """(place, object) of every line that is not blank; a ValueError names the line that is not a JSON object."""
  if not os.path.isfile(path):
    raise ValueError(f"dataset: no file {path!r}")
  rows = []
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        rows.append((f"line {number} of {path}", _object(line, f"{path}, line {number}")))
  return rows


def _object(line: str, where: str) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"{where}: not JSON: {error}") from error
  if not isinstance(row, dict):
    raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
  return row


def _hugging_face(path: str, name: str | None, split: str) -> list[tuple[str, dict[str, Any]]]:
  try:
    import datasets
  except ImportError as error:
    raise ValueError(
      f"dataset: {path!r} is not a .jsonl file; to read it as a Hugging Face data set, pip install datasets"
    ) from error
  if os.path.isfile(os.path.join(path, "dataset_info.json")):
    loaded = datasets.load_from_disk(path)
  else:
    loaded = datasets.load_dataset(path, name, split=split)
  return [(f"row {i} of {path}", dict(row)) for i, row in enumerate(loaded)]


def _text(prompt: str | list[Message]) -> str:
  return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _held_out(rows: list[Row], share: float, path: str) -> dict[str, list[Row]]:
  texts = sorted({_text(row["prompt"]) for row in rows}, key=lambda text: (digest(text), text))
  held = set(texts[: math.ceil(share * len(texts))])
  split = {
    "train": [row for row in rows if _text(row["prompt"]) not in held],
    "eval": [row for row in rows if _text(row["prompt"]) in held],
  }
  if not split["train"]:
    raise ValueError(f"dataset: {path} has {len(texts)} distinct prompts, all held out; give more, or held_out: 0")
  return split
