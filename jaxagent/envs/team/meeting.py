"""Who sees and says what in a team: rounds of simultaneous messages, a decision; and what became of each fact."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxagent.envs.team.instance import Fact, Instance
from jaxagent.metrics.team import message_waste, piu_recall, undelivered_share, unsurfaced_share

CONDITIONS = ("team", "solo", "pool", "piu")
DECIDER, VOTE = "decider", "vote"


@dataclasses.dataclass(frozen=True)
class Rules:
  """`budget`: tokens of a message that are delivered. `encode` and `decode` count and cut them."""

  condition: str
  rounds: int
  budget: int
  decision: str
  roles: tuple[str, ...]
  encode: Callable[[str], list[int]]
  decode: Callable[[list[int]], str]

  @property
  def seats(self) -> tuple[int, ...]:
    """The agents that act: all, or the one who has the PIU or the pool."""
    return (0,) if self.condition in ("pool", "piu") else tuple(range(len(self.roles)))

  @property
  def deciders(self) -> tuple[int, ...]:
    """Alone, everybody decides."""
    return self.seats if self.condition != "team" or self.decision == VOTE else self.seats[-1:]


class Meeting:
  """`opening` is what each seat reads first; then `talk` once a round, and `decide` at the end."""

  def __init__(self, instance: Instance, rules: Rules):
    self.instance, self.rules = instance, rules
    self.round = 0
    self.said: list[tuple[int, str]] = []  # all that was written
    self.delivered: list[list[int]] = []  # tokens of each message
    self.heard: list[str] = []
    self.choices: dict[int, str | None] = {}

  @property
  def talking(self) -> bool:
    return self.rules.condition == "team" and self.round < self.rules.rounds

  def known(self, seat: int) -> tuple[int, ...]:
    """The facts in what the seat reads at the start."""
    made = self.instance
    if self.rules.condition == "piu":
      return tuple(sorted(made.keys))
    return tuple(range(len(made.facts))) if self.rules.condition == "pool" else made.pack(seat)

  def opening(self, seat: int) -> str:
    made, team = self.instance, self.rules.condition == "team"
    lines = ["Which option has the most points? A fact adds to its option."]
    lines.append("Start: " + ", ".join(f"{name} {points}" for name, points in zip(made.options, made.start)))
    if team:
      lines.insert(0, f"Team: {', '.join(map(self._label, self.rules.seats))}. You are {self.rules.roles[seat]}.")
      lines += ["All know:", *(str(made.facts[i]) for i in made.shared)] if made.shared else []
      lines += ["Only you know:", *(str(made.facts[i]) for i in made.private[seat])]
    else:
      lines += ["Facts:", *(str(made.facts[i]) for i in self.known(seat))]
    return "\n".join([*lines, self._asked(seat)])

  def talk(self, texts: Mapping[int, str]) -> dict[int, str]:
    """Delivers a round's messages, cut to the budget; what each seat that acts next reads: those of the others."""
    heard = {}
    for seat, text in sorted(texts.items()):
      tokens = self.rules.encode(text)[: self.rules.budget]
      self.delivered.append(tokens)
      self.said.append((seat, text))
      heard[seat] = " ".join(self.rules.decode(tokens).split())  # one line, so that nobody can speak for another
    self.heard += heard.values()
    self.round += 1
    seats = self.rules.seats if self.talking else self.rules.deciders
    return {seat: "\n".join([*self._others(seat, heard), self._asked(seat)]) for seat in seats}

  def decide(self, texts: Mapping[int, str], unfinished: Collection[int] = ()) -> float:
    """1 iff the decider, or more voters than for any other option, named the answer; `unfinished` seats named none."""
    self.said += sorted(texts.items())
    options = self.instance.options
    self.choices = {s: None if s in unfinished else named(text, options) for s, text in texts.items()}
    if self.rules.decision == DECIDER or len(self.choices) == 1:
      return float(self.choices[max(self.choices)] == self.instance.answer)
    votes = Counter(choice for choice in self.choices.values() if choice is not None)
    most = [choice for choice, count in votes.items() if count == max(votes.values())]
    return float(most == [self.instance.answer])

  def columns(self) -> dict[str, Any]:
    """`right [A]`, per agent, and the coverage of the PIU so far (see `metrics.team`)."""
    made = self.instance
    piu = made.row(made.keys)
    surfaced = made.row({i for i, fact in enumerate(made.facts) if self._surfaced(i, fact)})
    delivered = made.row({i for i, fact in enumerate(made.facts) if any(map(fact.mentions, self.heard))})
    packs = np.array([made.row(self.known(seat)) for seat in self.rules.deciders])
    tokens = np.array([self._tokens_on(fact) for fact in made.facts], np.float32)
    return {
      "right": [float(self.choices.get(seat) == made.answer) for seat in range(len(self.rules.roles))],
      "piu_recall": float(np.mean(piu_recall(*np.broadcast_arrays(piu, delivered, packs)))),
      "piu_unsurfaced": float(unsurfaced_share(piu, surfaced)),
      "piu_undelivered": float(undelivered_share(piu, surfaced, delivered)),
      "message_waste": float(message_waste(tokens, piu, np.float32(sum(map(len, self.delivered))))),
    }

  def _surfaced(self, number: int, fact: Fact) -> bool:
    return any(number in self.known(seat) and fact.mentions(text) for seat, text in self.said)

  def _tokens_on(self, fact: Fact) -> int:
    return sum(len(self.rules.encode(words)) for text in self.heard for words in fact.mentions(text))

  def _label(self, seat: int) -> str:
    decides = self.rules.decision == DECIDER and seat == self.rules.deciders[0]
    return self.rules.roles[seat] + " (decides)" * decides

  def _others(self, seat: int, heard: Mapping[int, str]) -> list[str]:
    return [f"{self.rules.roles[other]}: {text}" for other, text in heard.items() if other != seat]

  def _asked(self, seat: int) -> str:
    if self.talking:
      return f"Round {self.round + 1} of {self.rules.rounds}: write to the others, at most {self.rules.budget} tokens."
    return "Decide: end with a line that is one option."


def named(text: str, options: tuple[str, ...]) -> str | None:
  """The one option that the last line with words names, None where it names none or several."""
  lines = [line for line in text.split("\n") if line.strip()]
  found = {word for word in re.findall(r"\w+", lines[-1].lower()) if word in options} if lines else set()
  return found.pop() if len(found) == 1 else None
