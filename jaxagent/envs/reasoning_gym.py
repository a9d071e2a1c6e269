"""reasoning_gym: one question, one answer, from the reasoning-gym package (`pip install 'jaxagent[envs]'`).

The answer is extracted from the text before it is scored, because the package gives partial marks (0.01 to 0.07) to
wrong answers. The outcome is 1 iff the score of the extracted answer is 1.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable
from typing import Any

from jaxagent.envs.base import Action, Message, Observation, Step
from jaxagent.envs.splits import SPLITS, require_split, split_of

SEED_SPAN = 2**31  # the eval split's seeds begin here; a generator uses the seeds seed .. seed + size - 1
ATTEMPTS = 500
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
  """Tasks of the generator `dataset`, which takes `options`; `size` distinct seeds in each split.

  A question whose text falls to the other split is replaced by another one with the generator's next seeds, so the two
  splits share neither seeds nor questions; `held_out` is the share of questions that only "eval" draws.
  `answer` says where the answer stands ("tags", "last_number", "text") and gives the default `system` prompt ("" is
  none).
  """

  dataset: str = "chain_sum"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  answer: str = "tags"
  system: str | None = None
  size_per_split: int = 10_000
  seed: int = 0
  held_out: float = 0.2

  def __post_init__(self):
    rules = [
      (self.answer in EXTRACT, "answer", self.answer, f"one of {', '.join(EXTRACT)}"),
      (1 <= self.size_per_split <= SEED_SPAN // 2, "size_per_split", self.size_per_split, "in 1..2^30"),
      (0 <= self.seed <= SEED_SPAN // 2, "seed", self.seed, "in 0..2^30"),
      (0 < self.held_out < 1, "held_out", self.held_out, "in (0, 1)"),
    ]
    for ok, name, got, want in rules:
      if not ok:
        raise ValueError(f"reasoning_gym: {name} must be {want}, got {got!r}")
    if own := {"seed", "size"} & set(self.options):
      raise ValueError(f"reasoning_gym: {', '.join(sorted(own))} in `options`: use `seed`, `size_per_split` beside it")
    _ = self._generators  # a wrong generator or option is reported here

  @functools.cached_property
  def _generators(self) -> dict[str, Any]:
    seeds = {split: self.seed + i * SEED_SPAN for i, split in enumerate(SPLITS)}
    return {split: _generator(self.dataset, self.options, self.size_per_split, seed) for split, seed in seeds.items()}

  def size(self, split: str) -> int | None:
    require_split(split)
    return self.size_per_split

  def environment(self, split: str, index: int) -> tuple["Question", int]:
    generator = self._generators[require_split(split)]
    if not 0 <= index < self.size_per_split:
      raise ValueError(f"reasoning_gym: index must be in [0, {self.size_per_split}), got {index}")
    return Question(generator, self._item(split, index), self.prompt, EXTRACT[self.answer]), generator.seed + index

  @property
  def prompt(self) -> str:
    return PROMPTS[self.answer] if self.system is None else self.system

  def _item(self, split: str, index: int) -> dict[str, Any]:
    """The first question of the split among those of index, index + stride, ... (mod size)."""
    generator, stride = self._generators[split], 7919
    for attempt in range(ATTEMPTS):
      entry = generator[(index + attempt * stride) % self.size_per_split]
      if split_of(entry["question"], held_out=self.held_out) == split:
        return entry
    raise ValueError(
      f"reasoning_gym: no question of the {split} split among {ATTEMPTS} of {self.dataset!r}; it has too few different"
      " questions with these options: widen them or change held_out"
    )


class Question:
  """Single turn. Outcome 1 iff the generator's score of the extracted answer is 1; no answer found is 0."""

  tool_format = None

  def __init__(self, generator, entry: dict[str, Any], prompt: str, extract: Callable[[str], str | None]):
    self._generator, self._entry, self._prompt, self._extract = generator, entry, prompt, extract

  async def reset(self, seed: int) -> dict[int, Observation]:
    system: tuple[Message, ...] = ({"role": "system", "content": self._prompt},) if self._prompt else ()
    return {0: Observation((*system, {"role": "user", "content": self._entry["question"]}))}

  async def step(self, actions: dict[int, Action]) -> Step:
    answer = self._extract(actions[0].text)
    score = 0.0 if answer is None else float(self._generator.score_answer(answer, entry=self._entry))
    info = {"answer": answer, "score": score, "expected": self._entry["answer"]}
    return Step(outcome=float(score == 1.0), status="done", info=info)

  async def close(self) -> None:
    pass


def _generator(name: str, options: dict[str, Any], size: int, seed: int):
  try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise ValueError(
      f"the reasoning_gym environment needs the reasoning-gym package ({error}): pip install 'jaxagent[envs]'"
    ) from error
  if name not in DATASETS:
    near = difflib.get_close_matches(name, DATASETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"reasoning_gym has no generator {name!r}{hint}")
  try:
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
  except (TypeError, AssertionError, ValueError) as error:
    fields = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    raise ValueError(f"reasoning_gym {name}: {error}; got options {options}, it takes {', '.join(fields)}") from error
