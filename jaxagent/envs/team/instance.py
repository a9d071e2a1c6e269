"""Decisions whose right answer follows from a known set of key facts, and from no set without all of them.

Every option has points at the start, and a fact adds to one option; the right option has the most points in the end.
Of the start points and any facts but all the keys, another option wins:

    start[lure] = start[answer] + sum of key points - 1            each key is worth 2 or more, to the answer
    any third option, with all its facts, stays below start[lure]
    facts on the lure, and facts on the answer that are no keys, cancel out: "oak price +3 -3"

So the set of all keys is the one PIU of the instance, whatever else is known: `Instance.decide` is the ideal solver
that `metrics.minimal_sets` may enumerate. The leader at the start is never right, so who guesses one of the others is
right once in (options - 1) times: that is the floor to compare accuracies with.
Reconstruction: the paper (TeamGym, 2026) was not available; the construction is ours.
"""

import dataclasses
import random
import re
from collections.abc import Collection

import numpy as np
from jaxtyping import Bool

OPTIONS = ("ash", "bay", "box", "elm", "fir", "ivy", "oak", "yew")
TOPICS = (
  "age", "care", "cost", "fame", "fit", "form", "heat", "ice", "load", "luck", "mood", "need", "pace", "plan", "rain",
  "rank", "risk", "rust", "seat", "size", "skill", "time", "tone", "view", "wear", "wind",
)  # fmt: skip
START = 5  # the most points that an option other than the lure has at the start
KEY_POINTS = (2, 6)


@dataclasses.dataclass(frozen=True)
class Fact:
  """`points` are added to `option`: one number, or two that cancel out."""

  option: str
  topic: str
  points: tuple[int, ...]

  def __str__(self) -> str:
    return f"{self.option} {self.topic} {' '.join(f'{p:+d}' for p in self.points)}"

  @property
  def net(self) -> int:
    return sum(self.points)

  def mentions(self, text: str) -> list[str]:
    """The parts of `text` that state the fact: option, topic and points in this order, with few words between."""
    gap = r"[^+\-\d\n]{0,16}?"
    points = gap.join(rf"{re.escape(f'{p:+d}')}(?!\d)" for p in self.points)
    return re.findall(rf"\b{self.option}\b{gap}\b{self.topic}\b{gap}{points}", text, re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Instance:
  """Facts by number; `shared` ones are in everybody's pack, `private[a]` in that of agent a alone."""

  options: tuple[str, ...]
  start: tuple[int, ...]
  answer: str
  facts: tuple[Fact, ...]
  keys: frozenset[int]
  shared: tuple[int, ...]
  private: tuple[tuple[int, ...], ...]

  def decide(self, known: Collection[int]) -> str | None:
    """The option with the most points by the known facts, None where two have as many: the ideal solver."""
    points = dict(zip(self.options, self.start))
    for number in known:
      points[self.facts[number].option] += self.facts[number].net
    best = [option for option in self.options if points[option] == max(points.values())]
    return best[0] if len(best) == 1 else None

  def pack(self, agent: int) -> tuple[int, ...]:
    return (*self.shared, *self.private[agent])

  def row(self, numbers: Collection[int]) -> Bool[np.ndarray, "F"]:
    """A set of facts as `metrics` takes it."""
    return np.isin(np.arange(len(self.facts)), list(numbers))


def draw(rng: random.Random, *, agents: int, options: int, keys: int, shared: int, private: int) -> Instance:
  """`keys` >= 2 key facts dealt out to `agents` >= 2, so that nobody has them all; `shared` distractors in every pack
  and `private` ones in each agent's. At least 3 options: of two, the right one would be known at once."""
  names = tuple(sorted(rng.sample(OPTIONS, options)))
  answer, lure = rng.sample(names, 2)
  topics = iter(rng.sample(TOPICS, keys + shared + agents * private))
  found = [Fact(answer, next(topics), (rng.randint(*KEY_POINTS),)) for _ in range(keys)]
  lead = sum(fact.net for fact in found) - 1
  start = {name: rng.randint(0, START) for name in names}
  start[answer] = START - rng.randint(0, 2)
  start[lure] = start[answer] + lead
  room = {name: start[lure] - 1 - start[name] for name in names if name not in (answer, lure)}
  found += [_distractor(rng, names, room, topic) for topic in topics]
  return _dealt(rng, Instance(names, tuple(start[n] for n in names), answer, tuple(found), frozenset(), (), ()),
                agents, keys, shared, private)  # fmt: skip


def _distractor(rng: random.Random, names: tuple[str, ...], room: dict[str, int], topic: str) -> Fact:
  """On a third option, as far as its room allows, or one that cancels out."""
  open_ = sorted(name for name, left in room.items() if left >= 1)
  if open_ and rng.random() < 0.6:
    name = rng.choice(open_)
    points = rng.choice((-1, 1, 1)) * rng.randint(1, min(KEY_POINTS[1], room[name]))
    room[name] -= max(points, 0)
    return Fact(name, topic, (points,))
  points = rng.choice((-1, 1)) * rng.randint(*KEY_POINTS)
  return Fact(rng.choice(names), topic, (points, -points))


def _dealt(rng: random.Random, made: Instance, agents: int, keys: int, shared: int, private: int) -> Instance:
  """The facts in a random order, so that numbers tell nothing, and in packs."""
  order = rng.sample(range(len(made.facts)), len(made.facts))
  place = {old: new for new, old in enumerate(order)}
  first = rng.randrange(agents)
  packs: list[list[int]] = [[] for _ in range(agents)]
  for i in range(keys):
    packs[(first + i) % agents].append(place[i])
  for agent in range(agents):
    begin = keys + shared + agent * private
    packs[agent] += [place[i] for i in range(begin, begin + private)]
  return dataclasses.replace(
    made,
    facts=tuple(made.facts[old] for old in order),
    keys=frozenset(place[i] for i in range(keys)),
    shared=tuple(sorted(place[i] for i in range(keys, keys + shared))),
    private=tuple(tuple(sorted(pack)) for pack in packs),
  )
