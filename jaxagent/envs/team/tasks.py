"""team: several agents that know different things exchange short messages, then one of them, or all, decide.

    tasks = Team(agents=3, rounds=2, budget=32)
    environment, seed = tasks.environment("train", 0)

Agents are 0 .. agents - 1, one policy plays them all, and the outcome, 1 or 0, is everybody's. Messages of a round are
simultaneous; each agent then reads those of the others. The same instances are posed under four conditions:

    team   packs, rounds of messages, a decision         pool   one agent with everybody's facts
    solo   packs, no messages, everybody decides alone   piu    one agent with the key facts and nothing else

`information_report` of rollouts under all four gives the retrieval gap and the communication gap.
Columns of an episode: `right [A]`, `piu_recall`, `piu_unsurfaced`, `piu_undelivered`, `message_waste`.
Reconstruction: the paper (TeamGym, 2026) was not available; all of this is ours, from a short summary.
"""

import dataclasses
import functools
import random
from typing import Any

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Message, Observation, Step, with_system
from jaxagent.envs.splits import require_split, split_of, task_seed
from jaxagent.envs.team.instance import OPTIONS, TOPICS, Instance, draw
from jaxagent.envs.team.meeting import CONDITIONS, DECIDER, VOTE, Meeting, Rules
from jaxagent.models.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

HELD_OUT = 0.2  # share of all instances that only the "eval" split draws
ATTEMPTS = 1000


@dataclasses.dataclass(frozen=True)
class Team:
  """Tasks: endless; no instance is in both splits, and an index is the same instance under every `condition`.

  `keys` key facts are dealt out so that no agent has them all; `shared` and `private` count the distractors in
  everyone's and in each agent's pack. `roles` are the agents' public names (default: agent1, ...); the last one
  decides, or all vote (a tie is wrong). Of a message `budget` tokens of `tokenizer` ("bytes", or a folder) are
  delivered: with `rollout.max_turn_tokens` at most that, nothing is written that nobody reads. A turn of each agent per
  round, and the deciders' last one, need `rollout.max_turns` > `rounds`.
  """

  agents: int = 3
  options: int = 4
  keys: int = 3
  shared: int = 2
  private: int = 2
  rounds: int = 2
  budget: int = 32
  decision: str = DECIDER
  condition: str = "team"
  roles: tuple[str, ...] = ()
  tokenizer: str = "bytes"
  system: str | None = None

  def __post_init__(self):
    object.__setattr__(self, "roles", tuple(self.roles) or tuple(f"agent{i + 1}" for i in range(max(self.agents, 0))))
    facts = self.keys + self.shared + self.agents * self.private
    check_options(
      "team: ",
      (2 <= self.agents <= 8, "agents", self.agents, "in 2..8"),
      (3 <= self.options <= len(OPTIONS), "options", self.options, f"in 3..{len(OPTIONS)}"),
      (self.keys >= 2, "keys", self.keys, "at least 2: one fact cannot be distributed"),
      (self.shared >= 0, "shared", self.shared, "at least 0"),
      (self.private >= 0, "private", self.private, "at least 0"),
      (facts <= len(TOPICS), "keys + shared + agents * private", facts, f"at most {len(TOPICS)} facts"),
      (self.rounds >= 1, "rounds", self.rounds, "at least 1; without messages: condition 'solo'"),
      (self.budget >= 1, "budget", self.budget, "at least 1 token"),
      (self.decision in (DECIDER, VOTE), "decision", self.decision, f"{DECIDER!r} or {VOTE!r}"),
      (self.condition in CONDITIONS, "condition", self.condition, f"one of {', '.join(CONDITIONS)}"),
      (
        len(set(self.roles)) == self.agents and all(role and "\n" not in role for role in self.roles), "roles",
        self.roles, f"{self.agents} different names",
      ),
    )  # fmt: skip
    _ = self._tokenizer  # a folder without a tokenizer is reported here

  @functools.cached_property
  def _tokenizer(self) -> Tokenizer:
    return byte_tokenizer() if self.tokenizer == "bytes" else load_tokenizer(self.tokenizer)

  @property
  def rules(self) -> Rules:
    words = self._tokenizer
    return Rules(self.condition, self.rounds, self.budget, self.decision, self.roles, words.encode, words.decode)

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["TeamEpisode", int]:
    return TeamEpisode(self, require_split(split)), task_seed(split, index)

  def instance(self, split: str, seed: int) -> Instance:
    rng = random.Random(seed)
    for _ in range(ATTEMPTS):
      made = draw(
        rng, agents=self.agents, options=self.options, keys=self.keys, shared=self.shared, private=self.private
      )
      if split_of(repr((made.options, made.start, made.facts)), held_out=HELD_OUT) == split:
        return made
    raise ValueError(f"team: no instance of the {split} split among {ATTEMPTS} draws; raise options, keys or packs")

  def message(self, text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)

  def opening(self, meeting: Meeting, seat: int) -> Observation:
    return Observation(with_system(self.system, *self.message(meeting.opening(seat))))

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """What one seat reads and writes where everyone tells their key facts and decides by what they know and heard.

    The seats of an instance have successive indices. The speakers are shown which of their facts are keys, which the
    policy is not; where the budget does not let them say those, and in "solo", the decision is what little is known
    gives.
    """
    seats = self.rules.seats
    seed = task_seed("train", index // len(seats))
    meeting = Meeting(self.instance("train", seed), self.rules)
    return _conversation(self, meeting, seats[index % len(seats)]), ()


def _conversation(tasks: Team, meeting: Meeting, seat: int) -> tuple[Message, ...]:
  messages = list(tasks.opening(meeting, seat).messages)
  left = {other: [i for i in meeting.known(other) if i in meeting.instance.keys] for other in meeting.rules.seats}
  while meeting.talking:
    texts = {other: _told(meeting, left[other]) for other in meeting.rules.seats}
    messages.append({"role": "assistant", "content": texts[seat]})
    read = meeting.talk(texts)
    if seat not in read:
      return tuple(messages)
    messages += tasks.message(read[seat])
  made = meeting.instance
  heard = {i for i, fact in enumerate(made.facts) if any(map(fact.mentions, meeting.heard))}
  chosen = made.decide({*meeting.known(seat), *heard})
  return (*messages, {"role": "assistant", "content": chosen or made.options[0]})


def _told(meeting: Meeting, left: list[int]) -> str:
  """As many of the facts that are left as the budget takes, which are then no longer left."""
  told = ""
  while left:
    longer = f"{told}, {meeting.instance.facts[left[0]]}".removeprefix(", ")
    if len(meeting.rules.encode(longer)) > meeting.rules.budget:
      break
    told = longer
    left.pop(0)
  return told or "-"


class TeamEpisode:
  """One instance under one condition."""

  tool_format = None

  def __init__(self, tasks: Team, split: str):
    self._tasks, self._split = tasks, split

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._meeting = Meeting(self._tasks.instance(self._split, seed), self._tasks.rules)
    return {seat: self._tasks.opening(self._meeting, seat) for seat in self._meeting.rules.seats}

  async def step(self, actions: dict[int, Action]) -> Step:
    meeting = self._meeting
    if meeting.talking:
      read = meeting.talk({agent: action.text for agent, action in actions.items()})
      observations = {seat: Observation(self._tasks.message(text)) for seat, text in read.items()}
      return Step(observations, info=self._info())
    unfinished = [agent for agent, action in actions.items() if action.truncated]
    outcome = meeting.decide({agent: action.text for agent, action in actions.items()}, unfinished)
    return Step(outcome=outcome, status="done", info=self._info())

  def _info(self) -> dict[str, Any]:
    made = self._meeting.instance
    keys = [str(made.facts[i]) for i in sorted(made.keys)]
    return {"columns": self._meeting.columns(), "answer": made.answer, "keys": keys}

  async def close(self) -> None:
    pass
