import asyncio
import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest
from scripted import ScriptedEngine

from jaxagent.config import Env
from jaxagent.envs.base import Action
from jaxagent.envs.registry import resolve
from jaxagent.envs.splits import task_seed
from jaxagent.envs.team import Fact, Instance, Team, information_report
from jaxagent.envs.team.instance import draw
from jaxagent.envs.team.meeting import CONDITIONS, Meeting, named
from jaxagent.methods import credit, teamgym
from jaxagent.metrics import distributed, fact_subsets, minimal_sets
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import demonstrations_batch, to_rollouts
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.request import Sampling
from jaxagent.types import Trajectory

CHAT = Chat(byte_tokenizer())
SHAPES = [
  dict(agents=3, options=4, keys=3, shared=2, private=2), dict(agents=2, options=3, keys=2, shared=0, private=0),
  dict(agents=2, options=3, keys=4, shared=3, private=1), dict(agents=4, options=8, keys=2, shared=1, private=2),
  dict(agents=5, options=5, keys=6, shared=0, private=1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_all_keys_decide_no_set_without_them_does_and_nobody_has_them_all(shape, seed):
  made = draw(random.Random(seed), **shape)
  subsets = np.asarray(fact_subsets(len(made.facts)))
  correct = np.array([made.decide(np.flatnonzero(row)) == made.answer for row in subsets])
  piu = subsets[np.asarray(minimal_sets(correct))]
  np.testing.assert_array_equal(piu, [made.row(made.keys)])
  np.testing.assert_array_equal(correct, subsets[:, sorted(made.keys)].all(axis=1))  # more facts never mislead
  assert distributed(piu, np.array([made.row(made.pack(agent)) for agent in range(shape["agents"])]))
  assert len(made.keys) == shape["keys"] and len(made.shared) == shape["shared"]
  everyone = [*made.shared, *itertools.chain(*made.private)]
  assert sorted(everyone) == list(range(len(made.facts)))
  assert len({fact.topic for fact in made.facts}) == len(made.facts)


def test_the_place_of_the_answer_and_of_the_keys_tells_nothing():
  made = [draw(random.Random(i), **SHAPES[0]) for i in range(400)]
  places = np.bincount([m.options.index(m.answer) for m in made], minlength=4)
  holders = np.bincount([next(a for a in range(3) if min(m.keys) in m.private[a]) for m in made], minlength=3)
  assert places.min() > 60 and holders.min() > 90
  assert all(max(zip(m.start, m.options))[1] != m.answer for m in made)


@pytest.mark.parametrize(
  "text, times",
  [
    ("oak cost +3", 1), ("Oak: cost, +3.", 1), ("the oak's cost is +3 and oak cost +3", 2), ("oak cost +31", 0),
    ("oak cost -3", 0), ("oak cost 3", 0), ("cost oak +3", 0), ("soak cost +3", 0), ("", 0),
    ("oak size +1, cost +3", 0),
  ],
)  # fmt: skip
def test_where_a_fact_is_stated(text, times):
  assert len(Fact("oak", "cost", (3,)).mentions(text)) == times


def test_both_numbers_of_a_fact_that_cancels_out_must_be_stated():
  fact = Fact("oak", "cost", (-3, 3))
  assert str(fact) == "oak cost -3 +3" and fact.net == 0
  assert fact.mentions("oak cost -3 and +3") and not fact.mentions("oak cost -3")


@pytest.mark.parametrize(
  "text, option",
  [("oak", "oak"), ("I say:\nOak.\n\n", "oak"), ("oak\nash", "ash"), ("oak or ash", None), ("oaks", None), ("", None),
   ("oak, surely oak", "oak"), ("oak\nno idea", None)],
)  # fmt: skip
def test_a_decision_is_the_one_option_of_the_last_line(text, option):
  assert named(text, ("ash", "oak")) == option


# a hand-made instance: fir needs both +4s to pass oak
GOLDEN = Instance(
  ("ash", "fir", "oak"), (1, 3, 10), "fir",
  (Fact("fir", "age", (4,)), Fact("fir", "fit", (4,)), Fact("oak", "rust", (2, -2)), Fact("ash", "luck", (5,))),
  frozenset({0, 1}), (3,), ((0, 2), (1,)),
)  # fmt: skip


def fixed(monkeypatch, **options):
  tasks = Team(**{"agents": 2, "rounds": 1, **options})
  monkeypatch.setattr(Team, "instance", lambda self, split, seed: GOLDEN)
  return tasks


def play(tasks, *rounds):
  """The observations' texts and the last step, where the agents of a turn write the texts of a round."""

  async def run():
    environment, seed = tasks.environment("train", 0)
    read = [await environment.reset(seed)]
    for texts in rounds:
      agents = sorted(read[-1])
      step = await environment.step({a: act(text) for a, text in zip(agents, texts, strict=True)})
      read.append(step.observations)
    await environment.close()
    return [{a: o.messages[-1]["content"] for a, o in observed.items()} for observed in read], step

  def act(text):
    return Action(text.removeprefix("CUT "), truncated=text.startswith("CUT "))

  return asyncio.run(run())


def test_an_episode_of_a_team(monkeypatch):
  read, step = play(fixed(monkeypatch), ["fir age +4", "-"], ["So\nfir"])
  assert read[0][0] == (
    "Team: agent1, agent2 (decides). You are agent1.\nWhich option has the most points? A fact adds to its option.\n"
    "Start: ash 1, fir 3, oak 10\nAll know:\nash luck +5\nOnly you know:\nfir age +4\noak rust +2 -2\n"
    "Round 1 of 1: write to the others, at most 32 tokens."
  )
  assert "fir fit" not in read[0][0] and "fir fit +4" in read[0][1] and "fir age" not in read[0][1]
  assert read[1] == {1: "agent1: fir age +4\nDecide: end with a line that is one option."}
  assert (step.status, step.outcome, step.info["answer"]) == ("done", 1.0, "fir")
  assert step.info["columns"]["right"] == [0.0, 1.0]


COVERAGE = {  # messages, decision -> recall, unsurfaced, undelivered, waste
  "all is told": (["fir age +4", "fir fit +4"], "fir", (1.0, 0.0, 0.0, 0.0)),
  "only the decider knows": (["-", "-"], "fir", (0.5, 1.0, 0.0, 0.0)),
  "the decider reasons": (["-", "-"], "fir fit +4 so\noak", (0.5, 0.5, 0.5, 0.0)),
  "half is waste": (["oak rust +2 -2", "fir age +4...."], "oak", (1.0, 1.0, 0.0, 0.5)),
  "beyond the budget": (["x" * 30 + " fir age +4", "-"], "oak", (0.5, 0.5, 0.5, 0.0)),
  "cut in the middle": (["y" * 23 + "fir age +4", "-"], "oak", (0.5, 1.0, 0.0, 0.0)),
}


@pytest.mark.parametrize("case", COVERAGE)
def test_coverage_of_the_piu(monkeypatch, case):
  messages, decision, want = COVERAGE[case]
  _, step = play(fixed(monkeypatch), messages, [decision])
  columns = step.info["columns"]
  got = [columns[name] for name in ("piu_recall", "piu_unsurfaced", "piu_undelivered", "message_waste")]
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert step.outcome == float(decision.endswith("fir"))


def test_a_message_is_cut_to_its_budget_and_is_one_line(monkeypatch):
  read, _ = play(fixed(monkeypatch, budget=9), ["one\nagent2: two", "é" * 9], ["oak"])
  assert read[1][1].split("\n")[0] == "agent1: one agent"
  assert "tokens" in read[0][0] and "at most 9" in read[0][0]


def test_rounds_are_simultaneous_and_everyone_hears_the_others():
  tasks = Team(agents=3, rounds=2, roles=("scout", "clerk", "chair"))
  read, step = play(tasks, ["a", "b", "c"], ["d", "", "f"], ["nothing"])
  assert read[0][0].startswith("Team: scout, clerk, chair (decides). You are scout.")
  assert [sorted(r) for r in read] == [[0, 1, 2], [0, 1, 2], [2], []]
  assert read[1][1].split("\n")[:2] == ["scout: a", "chair: c"] and "Round 2 of 2" in read[1][1]
  assert read[2][2].split("\n")[:2] == ["scout: d", "clerk: "] and step.outcome == 0.0


@pytest.mark.parametrize(
  "votes, outcome",
  [
    ("fir fir oak", 1), ("fir oak ash", 0), ("fir x y", 1), ("oak oak fir", 0), ("x y z", 0), ("fir oak x", 0),
    ("CUT_fir oak x", 0), ("fir fir fir", 1),
  ],
)  # fmt: skip
def test_votes(monkeypatch, votes, outcome):
  three = dataclasses.replace(GOLDEN, private=((0, 2), (1,), ()))
  monkeypatch.setattr(Team, "instance", lambda self, split, seed: three)
  texts = [vote.replace("_", " ") for vote in votes.split()]
  read, step = play(Team(agents=3, rounds=1, decision="vote"), ["-"] * 3, texts)
  assert step.outcome == outcome and "(decides)" not in read[0][0]
  assert step.info["columns"]["right"] == [float(text == "fir") for text in texts]


def test_a_cut_decision_is_not_right_by_luck(monkeypatch):
  assert play(fixed(monkeypatch), ["-", "-"], ["CUT fir"])[1].outcome == 0.0


@pytest.mark.parametrize(
  "condition, facts, recall",
  [("solo", [{3, 0, 2}, {3, 1}], 0.5), ("pool", [{0, 1, 2, 3}], 1.0), ("piu", [{0, 1}], 1.0)],
)
def test_conditions_without_messages(monkeypatch, condition, facts, recall):
  read, step = play(fixed(monkeypatch, condition=condition), ["oak", "fir"][: len(facts)])
  for agent, known in enumerate(facts):
    assert {i for i, fact in enumerate(GOLDEN.facts) if str(fact) in read[0][agent]} == known
    assert "Team" not in read[0][agent] and read[0][agent].endswith("Decide: end with a line that is one option.")
  columns = step.info["columns"]
  assert step.status == "done" and columns["piu_recall"] == recall and columns["message_waste"] == 0.0
  assert step.outcome == (condition == "solo") and columns["right"] == [0.0, float(condition == "solo")]


def ideal(tasks, *, mute=False):
  """What a policy writes that tells all it knows, and decides by the facts that its own stream shows."""
  instances = {}

  def write(text, rng):
    last = text.rsplit("<|im_start|>user\n", 1)[1]
    if "Round" in last:
      own = text.split("Only you know:\n")[1].split("\nRound")[0].split("\n")
      return "-" if mute or "Round 1" not in last else ", ".join(fact for fact in own if fact.count(" ") == 2)
    start = text.split("Start: ")[1].split("\n")[0]
    made = instances[start]
    return made.decide({i for i, fact in enumerate(made.facts) if fact.mentions(text)}) or "?"

  for i in range(8):
    made = tasks.instance("train", task_seed("train", i))
    instances[", ".join(f"{name} {points}" for name, points in zip(made.options, made.start))] = made
  return write


def collected(tasks, write, *, samples=2, indices=range(8), max_turns=4):
  engine = ScriptedEngine(CHAT.tokenizer, CHAT.eot, write, capacity=4000)
  return collect(
    engine, CHAT, tasks, split="train", indices=list(indices), samples=samples, key=jax.random.key(0),
    sampling=Sampling(max_tokens=200), limits=Limits(max_turns, 3000),
  )  # fmt: skip


def test_the_four_conditions_and_their_gaps():
  tasks = Team(budget=60)
  under = {c: dataclasses.replace(tasks, condition=c) for c in CONDITIONS}
  told = {c: collected(t, ideal(t)) for c, t in under.items()}
  report = information_report(told)
  assert report.accuracy == {"team": 1.0, "solo": 0.0, "pool": 1.0, "piu": 1.0}
  assert (report.retrieval, report.communication, report.total, report.normalised_communication) == (0, 0, 0, 0)
  assert (report.tasks, report.failed, report.coverage["piu_recall"]) == (8, 0, 1.0)
  assert 0 < report.coverage["message_waste"] < 1
  mute = information_report({**told, "team": collected(tasks, ideal(tasks, mute=True))})
  assert (mute.accuracy["team"], mute.communication, mute.total, mute.normalised_communication) == (0, 1, 1, 1)
  assert mute.coverage["piu_unsurfaced"] == 1.0 and mute.coverage["piu_recall"] == pytest.approx(1 / 3, abs=1e-6)
  short = information_report({**told, "team": collected(dataclasses.replace(tasks, budget=4), ideal(tasks))})
  assert short.communication == 1.0 and short.coverage["piu_undelivered"] > 0.9


def row(task, rollout=0, agent=0, outcome=1.0, right=(1.0, 0.0), status="done"):
  coverage = dict.fromkeys(("piu_recall", "piu_unsurfaced", "piu_undelivered", "message_waste"), 0.5)
  columns = {} if status == "failed" else {"right": list(right), **coverage}
  return Trajectory(task, 0, rollout, agent=agent, outcome=outcome, status=status, columns=columns)


def test_the_report_golden():
  rows = {
    "team": [row(0), row(0, agent=1), row(0, 1, outcome=0.0), row(1, 2, outcome=0.0), row(1, 3, status="failed")],
    "solo": [row(0, right=(1, 0)), row(1, right=(0, 1)), row(1, 1, right=(0, 1))],
    "pool": [row(0), row(1, outcome=0.5)], "piu": [row(0), row(1)],
  }  # fmt: skip
  report = information_report(rows)
  assert report.accuracy == {"team": 0.25, "solo": 0.5, "pool": 0.75, "piu": 1.0}
  assert (report.retrieval, report.communication, report.total) == (0.25, 0.5, 0.75)
  assert report.normalised_communication == pytest.approx(2.0) and (report.tasks, report.failed) == (2, 1)
  for broken, message in [
    ({"team": rows["team"]}, "must be given for team, solo, pool, piu"),
    ({**rows, "piu": [row(0)]}, "must have the same tasks"),
    ({**rows, "pool": [row(0), row(1, status="failed")]}, "all rollouts of task 1 under 'pool' failed"),
    ({**rows, "pool": []}, "no rollouts under 'pool'"),
  ]:
    with pytest.raises(ValueError, match=message):
      information_report(broken)


def test_rollouts_of_a_team_share_a_reward_and_train_with_its_preset():
  tasks = Team(budget=60)
  good, bad = ideal(tasks), ideal(tasks, mute=True)
  choose = lambda text, rng: (good if rng.random() < 0.8 else bad)(text, rng)  # noqa: E731
  rows = collected(tasks, choose, samples=6, indices=[0, 1])
  assert [r.agent for r in rows[:3]] == [0, 1, 2] and [r.turns for r in rows[:3]] == [2, 2, 3]
  batch = to_rollouts(rows, tokens=max(len(r.tokens) for r in rows), turns=7)
  assert batch.columns["right"].shape == (36, 3) and batch.columns["piu_recall"].shape == (36,)
  assert all(len(set(batch.reward[batch.rollout == r])) == 1 for r in range(12)) and set(batch.reward) == {0.0, 1.0}
  credited, _ = credit(teamgym(), dataclasses.replace(batch, logp_old=batch.logp_rollout))
  advantage = np.asarray(credited.columns["advantage"])
  of_rollout = [np.unique(advantage[batch.mask & (batch.rollout == r)[:, None]]) for r in range(12)]
  assert all(len(found) == 1 for found in of_rollout) and len({float(found[0]) for found in of_rollout}) > 1


def test_a_limit_on_turns_truncates_and_leaves_the_columns():
  rows = collected(Team(), lambda text, rng: "-", samples=1, indices=[0], max_turns=2)
  assert {(r.status, r.cause, r.outcome) for r in rows} == {("truncated", "max_turns", 0.0)}
  assert to_rollouts(rows, tokens=800, turns=6).columns["right"].tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("condition", ["team", "pool", "piu"])
def test_demonstrations_are_what_a_team_that_solves_it_writes(condition):
  tasks = Team(condition=condition, budget=40)
  seats = len(tasks.rules.seats)
  for task in range(3):
    shown = [tasks.demonstration(task * seats + seat)[0] for seat in range(seats)]
    said = [iter([m["content"] for m in messages if m["role"] == "assistant"]) for messages in shown]
    seat_of = {messages[0]["content"]: said[seat] for seat, messages in enumerate(shown)}
    write = lambda text, rng: next(seat_of[text.split("<|im_end|>")[0].removeprefix("<|im_start|>user\n")])  # noqa: B023, E731
    rows = collected(tasks, write, samples=1, indices=[task])
    assert all(r.outcome == 1.0 for r in rows)
    streams = [CHAT.demonstration(messages) for messages in shown]
    assert [(r.tokens, r.action) for r in rows] == [(ids, action) for ids, action in streams]


def test_tiny_teams_fit_small_byte_level_models():
  tasks = Team(agents=2, options=3, keys=2, shared=0, private=0, rounds=1, budget=16)
  batch = demonstrations_batch(tasks, CHAT, range(8), 500)
  assert (batch.prefix_length < 280).all()


def test_an_index_is_the_same_instance_under_every_condition_and_in_one_split():
  tasks = Team()
  found = {split: [tasks.instance(split, task_seed(split, i)) for i in range(150)] for split in ("train", "eval")}
  again = dataclasses.replace(tasks, condition="pool", budget=8, rounds=1)
  assert [again.instance("train", task_seed("train", i)) for i in range(150)] == found["train"]
  texts = {split: {repr((m.start, m.facts)) for m in made} for split, made in found.items()}
  assert len(texts["train"]) == len(texts["eval"]) == 150 and not texts["train"] & texts["eval"]


def test_a_split_without_instances_says_so(monkeypatch):
  monkeypatch.setattr("jaxagent.envs.team.tasks.split_of", lambda text, held_out: "train")
  with pytest.raises(ValueError, match="no instance of the eval split"):
    Team().instance("eval", 1)


def test_solo_demonstrations_decide_by_what_is_known():
  tasks = Team(condition="solo")
  made = tasks.instance("train", task_seed("train", 0))
  for seat in range(3):
    messages, tools = tasks.demonstration(seat)
    assert [m["role"] for m in messages] == ["user", "assistant"] and tools == ()
    assert messages[1]["content"] == made.decide(made.pack(seat)) != made.answer


def test_what_is_told_of_a_meeting_does_not_depend_on_the_order_of_the_seats():
  one, two = (Meeting(GOLDEN, Team(agents=2, rounds=1).rules) for _ in range(2))
  assert one.talk({0: "fir age +4", 1: "b"}) == two.talk({1: "b", 0: "fir age +4"})
  assert one.columns() == two.columns()


@pytest.mark.parametrize(
  "options, message",
  [
    ({"agents": 1}, "agents must be in 2..8"),
    ({"options": 2}, "options must be in 3..8"),
    ({"keys": 1}, "keys must be at least 2"),
    ({"shared": -1}, "shared must be"),
    ({"private": -1}, "private must be"),
    ({"private": 9}, "must be at most 26 facts"),
    ({"rounds": 0}, "condition 'solo'"),
    ({"budget": 0}, "budget must be"),
    ({"decision": "boss"}, "decision must be"),
    ({"condition": "all"}, "condition must be one of team, solo, pool, piu"),
    ({"roles": ("a", "b")}, "roles must be 3 different names"),
    ({"roles": ("a", "b", "a")}, "roles must be 3 different names"),
    ({"tokenizer": "no/such/folder"}, "no/such/folder"),
    ({"round": 1}, "did you mean 'rounds'"),
  ],
)
def test_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    resolve(Env("team", options))


def test_its_name_in_a_config():
  tasks = resolve(Env("team", {"agents": 2, "roles": ["a", "b"], "condition": "pool"}))
  assert tasks == Team(agents=2, roles=("a", "b"), condition="pool") and tasks.size("eval") is None
