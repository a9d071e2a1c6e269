"""reasoning_gym: one question, one answer, from the reasoning-gym package (`pip install 'jaxagent[envs]'`).

The answer is extracted from the text before it is scored, because the package gives partial marks (0.01 to 0.07) to
wrong answers. The outcome is 1 iff the score of the extracted answer is 1.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jaxagent.checks import check_options, nearest
from jaxagent.envs.base import Action, Observation, Step, with_system
from jaxagent.envs.splits import SPLITS, digest, require_split, split_of

SEED_SPAN = 2**31  # the eval split's seeds begin here; a generator uses the seeds seed .. seed + size - 1
ATTEMPTS = 500
UNUSABLE = ("game_of_life_halting",)  # of 0.1.25: its scorer takes every answer for right
PROMPTS = {
  "tags": "Give the final answer inside <answer></answer>.",
  "last_number": "End with the final answer, a number.",
  "text": "Reply with the final answer only.",
}


def tagged_answer(text: str) -> str | None:
  """What stands in the last <answer></answer>."""
  found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
  return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
  """The last decimal number in the text, without thousands separators."""
  found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)
  return found[-1].replace(",", "") if found else None


EXTRACT: dict[str, Callable[[str], str | None]] = {
  "tags": tagged_answer, "last_number": last_number, "text": lambda text: text.strip() or None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
  """Tasks of the generator `dataset`, which takes `options`; `size_per_split` distinct seeds in each split.

  A mixture is a mapping of generators to weights, `options` then one of generators to their options: task `index` is of
  a generator drawn by the weights, with the seed it has there. Names are those of `reasoning_gym.factory.DATASETS`.
  A question whose text falls to the other split is replaced by another one with the generator's next seeds, so the two
  splits share neither seeds nor questions; `held_out` is the share of questions that only "eval" draws.
  `answer` says where the answer stands ("tags", "last_number", "text") and gives the default `system` prompt ("" is
  none).
  """

  dataset: str | dict[str, float] = "chain_sum"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  answer: str = "tags"
  system: str | None = None
  size_per_split: int = 10_000
  seed: int = 0
  held_out: float = 0.2

  def __post_init__(self):
    check_options(
      "reasoning_gym: ",
      (self.answer in EXTRACT, "answer", self.answer, f"one of {', '.join(EXTRACT)}"),
      (1 <= self.size_per_split <= SEED_SPAN // 2, "size_per_split", self.size_per_split, "in 1..2^30"),
      (0 <= self.seed <= SEED_SPAN // 2, "seed", self.seed, "in 0..2^30"),
      (0 < self.held_out < 1, "held_out", self.held_out, "in (0, 1)"),
    )
    if isinstance(self.dataset, dict):
      _check_mixture(self.dataset, self.options)
    if own := {"seed", "size"} & {key for options in self._weighted_options.values() for key in options}:
      raise ValueError(f"reasoning_gym: {', '.join(sorted(own))} in `options`: use `seed`, `size_per_split` beside it")
    _ = self._generators  # a wrong generator or option is reported here

  @property
  def _weighted_options(self) -> dict[str, dict[str, Any]]:
    if isinstance(self.dataset, dict):
      return {name: self.options.get(name, {}) for name in self.dataset}
    return {self.dataset: self.options}

  @functools.cached_property
  def _generators(self) -> dict[str, dict[str, Any]]:
    """By split and name."""
    seeds = {split: self.seed + i * SEED_SPAN for i, split in enumerate(SPLITS)}
    return {
      split: {name: _generator(name, o, self.size_per_split, seed) for name, o in self._weighted_options.items()}
      for split, seed in seeds.items()
    }

  def kind(self, split: str, index: int) -> str:
    """The name of the generator that the task comes from."""
    if not isinstance(self.dataset, dict):
      return self.dataset
    place = digest(f"{split} {index} of {self.seed}") * sum(self.dataset.values())
    for name, weight in self.dataset.items():
      place -= weight
      if place < 0:
        return name
    return name

  def size(self, split: str) -> int | None:
    require_split(split)
    return self.size_per_split

  def environment(self, split: str, index: int) -> tuple["Question", int]:
    require_split(split)
    if not 0 <= index < self.size_per_split:
      raise ValueError(f"reasoning_gym: index must be in [0, {self.size_per_split}), got {index}")
    name = self.kind(split, index)
    generator = self._generators[split][name]
    entry = self._item(generator, name, split, index)
    return Question(generator, entry, self.prompt, EXTRACT[self.answer], name), generator.seed + index

  @property
  def prompt(self) -> str:
    return PROMPTS[self.answer] if self.system is None else self.system

  def _item(self, generator, name: str, split: str, index: int) -> dict[str, Any]:
    """The first question of the split among those of index, index + stride, ... (mod size)."""
    stride = 7919
    for attempt in range(ATTEMPTS):
      entry = generator[(index + attempt * stride) % self.size_per_split]
      if split_of(entry["question"], held_out=self.held_out) == split:
        return entry
    raise ValueError(
      f"reasoning_gym: no question of the {split} split among {ATTEMPTS} of {name!r}; it has too few different"
      " questions with these options: widen them or change held_out"
    )


class Question:
  """Single turn. Outcome 1 iff the generator's score of the extracted answer is 1; no answer found is 0."""

  tool_format = None

  def __init__(
    self, generator, entry: dict[str, Any], prompt: str, extract: Callable[[str], str | None], name: str
  ):
    self._generator, self._entry, self._prompt, self._extract, self._name = generator, entry, prompt, extract, name

  async def reset(self, seed: int) -> dict[int, Observation]:
    return {0: Observation(with_system(self._prompt or None, {"role": "user", "content": self._entry["question"]}))}

  async def step(self, actions: dict[int, Action]) -> Step:
    answer = self._extract(actions[0].text)
    score = 0.0 if answer is None else self._score(answer)
    info = {"answer": answer, "score": score, "expected": self._entry["answer"], "generator": self._name}
    return Step(outcome=float(score == 1.0), status="done", info=info)

  def _score(self, answer: str) -> float:
    """0 where the generator's scorer fails to read what was written; one that fails on the right answer too raises."""
    try:
      return float(self._generator.score_answer(answer, entry=self._entry))
    except Exception:  # the scorers parse with whatever raises whatever
      self._generator.score_answer(self._entry["answer"], entry=self._entry)
      return 0.0

  async def close(self) -> None:
    pass


def _check_mixture(weights: dict[str, float], options: dict[str, Any]) -> None:
  if not weights or not all(isinstance(w, (int, float)) and 0 < w < float("inf") for w in weights.values()):
    raise ValueError(f"reasoning_gym: a mixture is a mapping of generators to weights above 0, got {weights!r}")
  if strangers := sorted(set(options) - set(weights)):
    raise ValueError(f"reasoning_gym: `options` of {', '.join(strangers)}, which the mixture does not have")
  if not all(isinstance(o, dict) for o in options.values()):
    raise ValueError(f"reasoning_gym: `options` of a mixture map its generators to their options, got {options!r}")


def _generator(name: str, options: dict[str, Any], size: int, seed: int):
  try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise ValueError(
      f"the reasoning_gym environment needs the reasoning-gym package ({error}): pip install 'jaxagent[envs]'"
    ) from error
  if name not in DATASETS:
    raise ValueError(f"reasoning_gym has no generator {name!r}{nearest(name, DATASETS)}")
  if name in UNUSABLE:
    raise ValueError(f"reasoning_gym: the scorer of {name} takes every answer for right; choose another generator")
  try:
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
  except (TypeError, AssertionError, ValueError) as error:
    fields = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    raise ValueError(f"reasoning_gym {name}: {error}; got options {options}, it takes {', '.join(fields)}") from error
