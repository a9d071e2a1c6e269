"""Experience Funnel: edits of a state of text and updates of the policy, each behind its gate."""

import asyncio
import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
from scripted import ScriptedEngine

from jaxagent import config as configuration
from jaxagent.envs.base import Observation, Step
from jaxagent.envs.instructions import NONE, Instructed, Instructions, instructed
from jaxagent.judges import Panel, Rules
from jaxagent.judges.replies import Unparsed
from jaxagent.methods import grpo
from jaxagent.training import funnel, loop, reflection
from jaxagent.training.build import build
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.phases import OutOfMemory
from jaxagent.types import Completion, Trajectory

TINY = {
  "model.shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16},
  "method.name": "experience_funnel",
  "rollout.prompts": 2,
  "rollout.samples": 4,
  "rollout.max_turns": 1,
  "rollout.max_tokens": 128,
  "rollout.max_turn_tokens": 4,
  "rollout.slots": 8,
  "optimizer.learning_rate": 1e-2,
  "evaluation.tasks": 2,
  "evaluation.every": 1,
  "funnel.max_tokens": 48,
  "funnel.gate_tasks": 4,
  "run.steps": 3,
  "run.checkpoint_every": 1,
  "tracking.gap_warning": 100.0,
}
GOOD, BAD = "say ok", "say no"


class Episode:
  """Outcome 1 for "ok"."""

  tool_format = None

  async def reset(self, seed):
    return {0: Observation(({"role": "user", "content": f"{seed % 10}?"},))}

  async def step(self, actions):
    return Step(outcome=float(actions[0].text == "ok"), status="done")

  async def close(self):
    pass


class Odd(Episode):
  """Outcome 1 for an odd sum of letters: what a random policy does half the time."""

  async def step(self, actions):
    return Step(outcome=float(sum(map(ord, actions[0].text)) % 2), status="done")


class Pool:
  def __init__(self, episode=Episode):
    self.episode = episode

  def size(self, split):
    return None

  def environment(self, split, index):
    return self.episode(), index + 100 * (split == "eval")


class Obedient(ScriptedEngine):
  """Says what the last skill says; without one "no", until weights of `learned` or later are loaded."""

  def __init__(self, parts, version=0, learned=10**9):
    super().__init__(parts.chat.tokenizer, parts.chat.eot, self.obey)
    self.version, self.learned, self.loads = version, learned, []

  def load(self, params, version=None):
    self.version = version
    self.loads.append((version, flat(params)))

  def obey(self, text, rng):
    if BAD in text:
      return "no"
    return "ok" if GOOD in text or self.version >= self.learned else "no"


def config_of(changes):
  return configuration.load(None, {**TINY, **changes})


def scripted(monkeypatch, changes, learned=10**9, engine=Obedient, checkpointer=None):
  """A run with an engine that obeys: the states, records, what the observer saw, and the engine."""
  config, records, told, made = config_of(changes), [], [], []
  parts = build(config, env=Pool())

  def build_engine(config, parts, params, *, version=0):
    made.append(engine(parts, version, learned))
    return made[-1]

  monkeypatch.setattr(funnel, "build_engine", build_engine)
  hooks = loop.Hooks(record=records.append, checkpointer=checkpointer)
  observers = funnel.Observers(state=lambda step, record: told.append((step, record)))
  state, text = funnel.train(config, parts, hooks=hooks, observers=observers)
  return parts, state, text, records, told, made[-1]


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


def test_a_skill_that_helps_is_taken_and_what_it_gains_is_learned_without_it(monkeypatch):
  """Three rounds: a bad skill is refused, a good one taken, then there is no other; the free policy comes to say ok."""
  parts, state, text, records, told, _ = scripted(monkeypatch, {"funnel.candidates": [BAD, GOOD]})
  assert text.skills == (GOOD,) and text.refused == (BAD,) and text.version == 1
  assert [r["funnel/state_accepted"] for r in records] == [0, 1, 0]
  assert [r["funnel/proposed"] for r in records] == [1, 1, 0]
  assert [r["funnel/distilled_rows"] for r in records] == [0, 8, 8]
  assert [(r["funnel/new"], r["funnel/persistent"], r["funnel/inactive"]) for r in records] == [
    (0, 0, 1), (1, 0, 0), (0, 1, 0),
  ]  # fmt: skip
  assert [(r["funnel/outcome_free"], r["funnel/outcome_updated"]) for r in records] == [(0, 0), (0, 1), (0, 1)]
  assert records[1]["funnel/validation_state"] == 0 and records[1]["funnel/validation_proposed"] == 1
  assert all(np.isfinite(v) for r in records for v in r.values() if isinstance(v, float))
  assert [step for step, _ in told] == [1, 2, 3] and Instructions.from_json(told[-1][1]["state"]) == text
  json.dumps(told)
  before, after = (log_prob_of_ok(parts, params) for params in (parts.params, state.train.params))
  assert after > before + 0.5


def log_prob_of_ok(parts, params):
  update = loop.Update(config_of({}), parts)
  ids = parts.chat.render(({"role": "user", "content": "7?"},))
  row = Trajectory(0, 0, 0, status="done", prefix_length=len(ids))
  row.append_context(ids)
  said = np.array([*parts.chat.tokenizer.encode("ok"), parts.chat.eot])
  row.append_action(completion(said, np.zeros(len(said))))
  rollouts = loop.as_batch(config_of({}), parts, [row])
  return float(update.score(params, rollouts)[rollouts.mask].sum())


def completion(ids, logp):
  return Completion(ids, logp, logp, np.zeros(len(ids)), "stop")


def test_what_the_policy_has_learned_is_retired(monkeypatch):
  _, _, text, records, _, _ = scripted(monkeypatch, {"funnel.candidates": [GOOD], "run.steps": 2}, learned=1)
  assert text == Instructions(retired=(GOOD,), version=2)
  assert records[0]["funnel/retired"] == 1 and records[0]["funnel/validation_residual"] == 1
  assert records[1]["funnel/proposed"] == 0 and records[1]["funnel/items"] == 0
  kept = scripted(monkeypatch, {"funnel.candidates": [GOOD], "run.steps": 1, "funnel.residual_every": 0}, learned=1)[2]
  assert kept.skills == (GOOD,)


class Forgetful(Obedient):
  """It is right three times of four until an update, and never after it."""

  def obey(self, text, rng):
    return "ok" if self.version == 0 and rng.random() < 0.75 else "no"

  def load(self, params, version=None):
    changed = len(self.loads) % 2 == 0  # an update, then the return to the weights before it
    super().load(params, version)
    self.version = version if changed else 0


def test_a_policy_that_lost_what_it_could_is_not_taken(monkeypatch):
  parts, state, text, records, _, engine = scripted(
    monkeypatch, {"funnel.candidates": [BAD], "run.steps": 2}, engine=Forgetful
  )
  assert [r["funnel/policy_accepted"] for r in records] == [0, 0] and text == Instructions(refused=(BAD,))
  np.testing.assert_array_equal(flat(state.train.params), flat(parts.params))
  assert int(state.train.updates) == 0 and int(state.schedule.drawn) == 2
  updated, restored, *_ = [weights for _, weights in engine.loads]
  assert records[0]["grad_norm"] > 0 and (updated != restored).any()
  np.testing.assert_array_equal(restored, flat(parts.params))
  assert all(r["funnel/validation_free"] > r["funnel/validation_free_after"] == 0 for r in records)


def test_a_state_that_is_too_long_is_refused(monkeypatch):
  long, longer = "say ok" + 50 * "!", "say ok" + 30 * "!"
  changes = {"funnel.candidates": [long, longer], "run.steps": 2, "rollout.max_tokens": 64, "funnel.max_tokens": 48}
  _, _, text, records, _, _ = scripted(monkeypatch, changes)
  assert text.refused == (long, longer) and [r["funnel/too_long"] for r in records] == [1, 1]


def test_rounds_of_several_steps(monkeypatch):
  changes = {"funnel.candidates": [GOOD], "run.steps": 4, "funnel.round_steps": 2, "optimizer.learning_rate": 0.0}
  _, _, _, records, told, _ = scripted(monkeypatch, changes)
  assert [r["step"] for r in records] == [1, 2, 3, 4] and [step for step, _ in told] == [2, 4]
  assert ["funnel/proposed" in r for r in records] == [True, False, True, False]
  assert ["funnel/policy_accepted" in r for r in records] == [False, True, False, True]
  assert [r["funnel/new"] for r in records] == [1, 1, 0, 0] and records[2]["funnel/persistent"] == 1


class Knocking(Obedient):
  """A signal arrives while the second round is validated, when the policy has been updated already."""

  def load(self, params, version=None):
    super().load(params, version)
    if version == 2:
      os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_saves_the_last_finished_round(tmp_path, monkeypatch):
  changes = {"funnel.candidates": [GOOD, BAD], "run.steps": 2}
  _, whole, text, _, _, _ = scripted(monkeypatch, {**changes, "run.steps": 1})
  with Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(KeyboardInterrupt):
      scripted(monkeypatch, changes, engine=Knocking, checkpointer=checkpointer)
    assert checkpointer.latest() == 1
    parts = build(config_of(changes), env=Pool())
    state, saved, step, _ = funnel.restore(parts, loop.Hooks(checkpointer=checkpointer))
  assert (saved, step) == (text, 1)
  np.testing.assert_array_equal(flat(whole), flat(state))


def play(config, folder=None, *, resume=False):
  records, told = [], []
  parts = build(config, env=Pool(Odd))
  with Checkpointer(folder) as checkpointer:
    hooks = loop.Hooks(record=records.append, checkpointer=checkpointer)
    observers = funnel.Observers(state=lambda step, record: told.append(record))
    state, text = funnel.train(config, parts, hooks=hooks, observers=observers, resume=resume)
  return flat(state), text, records, told


def test_two_n_rounds_equal_n_rounds_a_resume_and_n_rounds(tmp_path):
  changes = {"funnel.candidates": [f"rule {i}" for i in range(4)], "run.steps": 4, "funnel.gate_tasks": 7}
  whole, text, records, told = play(config_of(changes), tmp_path / "whole")
  play(config_of({**changes, "run.steps": 2}), tmp_path / "half")
  resumed, text_too, rest, told_rest = play(config_of(changes), tmp_path / "half", resume=True)
  np.testing.assert_array_equal(whole, resumed)
  assert text == text_too and told[2:] == told_rest and (text.version or text.refused)

  def kept(records):
    clock = ("time/", "tokens_per_second/")
    return [{k: v for k, v in r.items() if not k.startswith(clock)} for r in records]

  assert kept(records)[2:] == kept(rest)


def test_a_run_of_another_kind_is_not_resumed(tmp_path):
  config = config_of({})
  parts = build(config, env=Pool(), method=grpo)
  with Checkpointer(tmp_path) as checkpointer:
    hooks = loop.Hooks(checkpointer=checkpointer)
    checkpointer.save(0, loop.warm_start(config, parts, hooks, None)[0], {"evaluated": False})
    with pytest.raises(ValueError, match="not made by jaxagent funnel"):
      funnel.restore(parts, hooks)


def trajectory(rollout, group, outcome, words, *, status="done", prompt=(1, 2), opening=None):
  row = Trajectory(group, group, rollout, outcome=outcome, status=status)
  row.append_context(list(prompt))
  row.append_action(completion(np.array(words), np.full(len(words), -0.5)))
  row.transcript += [{"role": "user", "content": opening or f"task {group}"}, {"role": "assistant", "content": "x"}]
  return row


STATE = Instructions(skills=("rule",))


def rows(outcomes, *, text=NONE, prompt=(1, 2), failed=()):
  made = [
    trajectory(i, i // 2, x, [5, 6], prompt=prompt, status="failed" if i in failed else "done")
    for i, x in enumerate(outcomes)
  ]
  for row in made:
    row.transcript[:1] = instructed(row.transcript[:1], text.text)
  return made


def test_paired_distils_the_better_rollouts_of_the_tasks_that_the_state_helps():
  free, previous = rows([0, 0, 0, 0, 1, 1, 0, 1]), rows([0, 0, 0, 1, 1, 1, 0, 0], text=STATE)
  updated = rows([0, 1, 1, 1, 1, 1, 1, 0], text=STATE, prompt=(1, 9, 9, 2))
  made, metrics = funnel.paired(free, previous, updated, text=STATE, persistent=0.25)
  assert [t.columns["selection"] for t in made[:8]] == [-1.0] * 8
  # task 0 is newly helped, task 1 as before, task 2 was solved already, in task 3 nothing changed in the mean
  assert [(t.rollout, t.group, t.columns["selection"]) for t in made[8:]] == [(9, 4, 1.0), (10, 5, 0.25), (11, 5, 0.25)]
  assert all(t.tokens == [1, 2, 5, 6] and t.prefix_length == 2 for t in made[8:])
  np.testing.assert_allclose(made[8].columns["logp_privileged"], [0, 0, -0.5, -0.5])
  assert metrics["funnel/new"] == metrics["funnel/persistent"] == 0.25 and metrics["funnel/inactive"] == 0.5
  assert "selection" not in free[0].columns and updated[1].tokens == [1, 9, 9, 2, 5, 6]


def test_paired_leaves_out_failures_and_rows_without_a_prompt_to_stand_under():
  free, previous = rows([0, 0, 0, 0], failed=(1,)), rows([0, 0, 0, 0], text=STATE)
  updated = rows([1, 1, 1, 1], text=STATE, failed=(2,))
  updated[3].transcript[-2] = {"role": "user", "content": "another task"}
  made, metrics = funnel.paired(free, previous, updated, text=STATE, persistent=0.5)
  assert [t.rollout for t in made[4:]] == [4] and metrics["funnel/not_restated"] == 1
  broken, metrics = funnel.paired(rows([0, 0], failed=(0, 1)), rows([0, 0]), rows([1, 1]), text=STATE, persistent=0.5)
  assert len(broken) == 2 and np.isnan(metrics["funnel/new"])


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"method.name": "grpo"}, "set method.name to experience_funnel"),
    ({"scheduling.rounds": 2}, "scheduling.rounds"),
    ({"funnel.max_tokens": 128}, "funnel.max_tokens must be less than"),
    ({}, "funnel.candidates is empty"),
    ({"funnel.prompt": 49 * "x"}, "funnel.prompt has 49 tokens"),
    ({"funnel.reflect": "x"}, "funnel.reflect must be candidates, judge, or"),
    ({"funnel.reflect": "no_such_module:f"}, "funnel.reflect"),
    ({"funnel.reflect": "judge"}, "judge.backend"),
  ],
)
def test_mistakes_are_named(changes, said):
  with pytest.raises(ValueError, match=said):
    config = config_of(changes)
    funnel.train(config, build(config, env=Pool()))


def test_the_gate_needs_tasks_of_its_own():
  pool = Pool()
  pool.size = lambda split: 5
  config = config_of({"funnel.candidates": [GOOD]})
  with pytest.raises(ValueError, match=r"evaluation.tasks is 2 and funnel.gate_tasks 4"):
    funnel.train(config, build(config, env=pool))


def test_instructions_are_edited_as_records():
  first = Instructions(prompt="be short")
  second = first.edited(prompt="be short", skills=["a", "b", "a"])
  assert second.text == "be short\n- a\n- b" and second.version == 1 and second.items == ("be short", "a", "b")
  assert second.edited(prompt="be short", skills=["a", "b"]) == second
  third = second.without(["be short", "a"])
  assert (third.prompt, third.skills, third.retired, third.version) == ("", ("b",), ("be short", "a"), 2)
  assert first.refusing(second) == dataclasses.replace(first, refused=("a", "b"))
  assert Instructions.from_json(json.loads(json.dumps(third.to_json()))) == third and NONE.text == ""


def test_instructions_stand_in_the_first_observation_of_each_agent_alone():
  class Late(Episode):
    tool_format = "chat"

    async def step(self, actions):
      system = {"role": "system", "content": "rules"}
      said = ({"role": "user", "content": "again"},)
      return Step(observations={0: Observation(said), 1: Observation((system, *said))})

  async def seen():
    environment, seed = Instructed(Pool(Late), Instructions(skills=("a",))).environment("train", 3)
    assert environment.tool_format == "chat"
    return await environment.reset(seed), (await environment.step({})).observations

  first, later = asyncio.run(seen())
  assert first[0].messages == ({"role": "system", "content": "- a"}, {"role": "user", "content": "3?"})
  assert later[0].messages == ({"role": "user", "content": "again"},)
  assert later[1].messages[0]["content"] == "rules\n\n- a"


def test_a_judge_reads_failures_and_successes_and_its_edit_is_a_state():
  chat, asked = build(config_of({}), env=Pool()).chat, []

  def answer(question):
    asked.append(question)
    return json.dumps({"prompt": "", "skills": ["look\n twice", GOOD]})

  seen = rows([1, 1, 1, 0])
  judged = reflection.Judged(Panel(Rules(answer)), chat, attempts=3)
  state = asyncio.run(judged(Instructions(refused=(BAD,)), seen))
  assert state.skills == ("look twice", GOOD) and state.refused == (BAD,) and state.version == 1
  (question,) = asked
  assert [a["outcome"] for a in question.facts["attempts"]] == [0, 1, 1] and BAD in question.messages[0]["content"]
  silent = reflection.Judged(Panel(Rules(lambda question: "no idea")), chat)
  assert asyncio.run(silent(STATE, seen)) == STATE and silent.panel.metrics()["judge/unparsed"] == 1
  with pytest.raises(Unparsed, match="must be texts"):
    reflection.parse('{"prompt": 3, "skills": []}')


def test_what_does_not_fit_is_said_of_its_own_phase(monkeypatch):
  def full(self, state, rollouts, *, key, phases, step=0):
    with phases("update"):
      raise RuntimeError("RESOURCE_EXHAUSTED: 1 byte")

  monkeypatch.setattr(loop.Update, "__call__", full)
  with pytest.raises(OutOfMemory, match=r"^out of memory in the update phase; lower training\.microbatch_rows"):
    scripted(monkeypatch, {"funnel.candidates": [GOOD], "run.steps": 1})
