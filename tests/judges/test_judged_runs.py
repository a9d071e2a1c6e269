"""Runs of two steps through a config, judged by the environment's own rules; a scripted policy wins and loses."""

import dataclasses
import functools
import json
import random

import jax
import numpy as np
import pytest
import test_policy
from small_encoder import small_folder

from jaxagent import config as configuration
from jaxagent.envs.base import Action, ToolCall
from jaxagent.envs.calculator import Calculator
from jaxagent.envs.splits import task_seed
from jaxagent.envs.workflow import Workflow, reference_calls
from jaxagent.envs.workflow import judge as workflow_rules
from jaxagent.judges import FirstError, Guidance, Matches, Progress, Question, Rubric
from jaxagent.methods import PRESETS
from jaxagent.training import loop
from jaxagent.training.build import build

SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16}
TINY = {
  "model.shape": SHAPE, "rollout.prompts": 2, "rollout.samples": 4, "rollout.max_turns": 3, "rollout.max_tokens": 128,
  "rollout.max_turn_tokens": 24, "training.microbatch_rows": 8, "evaluation.tasks": 0, "run.steps": 2,
  "run.checkpoint_every": 2, "optimizer.learning_rate": 1e-3, "tracking.gap_warning": 1e9,
  "env.name": "calculator", "env.options": {"digits": 1, "operators": "+"},
}  # fmt: skip
PROVIDED = {"draco": Rubric, "cliff": FirstError, "taspo": Guidance, "shaping": Progress, "scpo": Matches}


class Scripted(test_policy.Scripted):
  """A policy that calls rightly, calls wrongly, or guesses; weights are not its affair."""

  def load(self, params, version=None):
    self.version = version


def wrote(text, rng):
  if "Reply with one JSON object" in text:
    return rng.choice(["well", *3 * [json.dumps({"progress": rng.choice([0, 0.25, 0.5, 1])})]])
  problem = text.split("user\n")[1].split("<|im_end|>")[0]
  if "tool\n" in text:
    return text.rsplit("tool\n", 1)[1].split("<|im_end|>")[0]
  right, wrong = f"<calc>{problem}</calc>", [f"<calc>{problem}+1</calc>", "<calc>", "7", "<think>a</think>8"]
  return rng.choice([right, right, right, *wrong])


def scripted(config, parts, params, *, version=0):
  return Scripted(parts.chat.tokenizer, parts.chat.eot, wrote, capacity=5000)


def run(monkeypatch, changes):
  monkeypatch.setattr(loop, "build_engine", scripted)
  config, records, batches = configuration.load(None, {**TINY, **changes}), [], []
  hooks = loop.Hooks(record=records.append, rollouts=lambda step, r, t: batches.append((r, t)))
  state = loop.train(config, build(config), hooks=hooks)
  return records, batches, jax.device_get(state.train.params)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
  return str(small_folder(tmp_path_factory.mktemp("encoder"))[0])


@pytest.mark.parametrize("name", PROVIDED)
def test_two_steps(monkeypatch, name, encoder):
  judge = {"judge.encoder": encoder} if name == "scpo" else {"judge.backend": "rules"}
  records, batches, _ = run(monkeypatch, {"method.name": name, **judge})
  seen = [(r["loss"], r["grad_norm"], r["success/mean"]) for r in records]
  assert len(seen) == 2 and np.isfinite(seen).all() and any(norm > 0 for _, norm, _ in seen), seen
  assert any(0 < r["success/mean"] < 1 for r in records)
  for record, (batch, trajectories) in zip(records, batches):
    if name != "scpo":
      assert record["judge/calls"] > 0 and record["judge/failed"] == record["judge/unparsed"] == 0
      assert record["judge/invalid"] == 0 and batch.valid.sum() == 8
    check(name, batch, trajectories)
  assert any(r["groups/equal_reward_share"] < 1 for r in records)


def check(name, batch, trajectories):
  """The columns say of these rollouts what was written in them."""
  said = [[m["content"] for m in t.transcript if m["role"] == "assistant"] for t in trajectories]
  won = batch.outcome == 1
  if name == "draco":
    np.testing.assert_array_equal(batch.columns["verdict"][:, 1] == 1, won)
    assert batch.columns["verdict"].shape == (8, 24)
  elif name == "cliff":
    first = np.array([np.flatnonzero(t.action)[0] for t in trajectories])
    ended = ~won & ~batch.truncated  # a failure that was cut short is wrong from the start, and nobody is asked
    np.testing.assert_array_equal(batch.columns["first_error"][ended], first[ended])
    assert (batch.columns["first_error"][won] == 0).all()
  elif name == "shaping":
    np.testing.assert_array_equal(batch.columns["potential"][:, 0], 0)
    called = np.array(["<calc>" in words[0] and won[i] for i, words in enumerate(said)])
    np.testing.assert_allclose(batch.columns["potential"][called, 1:3], [[0.5, 1.0]] * called.sum())
  elif name == "taspo":
    gain = (batch.columns["logp_privileged"] != 0) & batch.columns["executable"]
    source = won & np.array(["<calc>" in words[0] for words in said])  # a lucky guess teaches nothing
    sources = np.array([source[batch.group == g].sum() for g in range(2)])[batch.group]
    mixed = np.array([0 < won[batch.group == g].mean() < 1 for g in range(2)])[batch.group]
    helped = mixed & (sources > source)
    np.testing.assert_array_equal(gain.any(1), helped)
  else:
    assert (batch.columns["step_credit"][won] == 0).all() and (batch.columns["anchor"][:, 0] >= 0).all()


class Mute(Calculator):
  """Its rules do not answer about one rollout in four."""

  def judge(self, question):
    said = question.facts["actions"][0].text if question.facts.get("actions") else ""
    return "hm" if said == "7" else super().judge(question)


def test_a_rollout_without_a_verdict_is_invalid_and_counted(monkeypatch):
  records, batches, _ = run(
    monkeypatch, {"method.name": "cliff", "judge.backend": "rules", "env.name": f"{__name__}:Mute"}
  )
  for record, (batch, trajectories) in zip(records, batches):
    mute = [t.transcript[1]["content"] == "7" and t.outcome != 1 for t in trajectories]
    np.testing.assert_array_equal(~batch.valid, mute)
    assert record["judge/unparsed"] == record["judge/invalid"] == sum(mute)
  assert sum(r["judge/invalid"] for r in records) > 0


def test_the_policy_as_its_own_judge(monkeypatch):
  changes = {"method.name": "shaping", "judge.backend": "policy", "judge.votes": 3, "judge.max_tokens": 40}
  records, batches, weights = run(monkeypatch, changes)
  assert all(r["judge/calls"] > 0 and r["judge/failed"] == 0 and r["judge/tokens"] > 0 for r in records)
  assert sum(r["judge/unparsed"] for r in records) > 0 and sum(r["judge/invalid"] for r in records) > 0
  for batch, _ in batches:
    assert batch.valid.any() and len(np.unique(batch.columns["potential"][batch.valid])) > 2
  again, _, same = run(monkeypatch, changes)
  assert [r["loss"] for r in records] == [r["loss"] for r in again]
  jax.tree.map(np.testing.assert_array_equal, weights, same)


def test_what_a_resumed_run_is_told(monkeypatch, tmp_path):
  """The endpoint's replies are read from the cache: the second run makes no call and ends with the same weights."""
  from test_judge_endpoint import Server, completion

  rng = random.Random(0)
  score = lambda body: completion(json.dumps({"progress": rng.choice([0, 0.25, 0.5, 1])}))  # noqa: E731
  changes = {
    "method.name": "shaping", "judge.backend": "endpoint", "judge.model": "m", "judge.cache": str(tmp_path),
  }  # fmt: skip
  with Server() as server:
    server.answers = score
    changes["judge.base_url"] = server.url
    first, _, weights = run(monkeypatch, changes)
    calls = len(server.seen)
    again, _, same = run(monkeypatch, changes)
    assert len(server.seen) == calls > 0
  assert sum(r["judge/calls"] for r in first) == calls and sum(r["judge/calls"] for r in again) == 0
  assert [r["loss"] for r in first] == [r["loss"] for r in again]
  jax.tree.map(np.testing.assert_array_equal, weights, same)


# configuration


@pytest.mark.parametrize("name", PROVIDED)
def test_a_method_that_needs_a_judge_says_so(name):
  with pytest.raises(ValueError, match=f"method {name} reads .* does not provide: set judge"):
    build(configuration.load(None, {**TINY, "method.name": name}))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"judge.backend": "rules"}, "judge.backend is set, but method grpo asks no judge"),
    ({"judge.encoder": "x"}, "judge.encoder is set, but method grpo asks no encoder"),
    ({"method.name": "cliff", "judge.encoder": "x"}, "set judge.backend"),
    ({"method.name": "scpo", "judge.backend": "rules"}, "set judge.encoder"),
  ],
)
def test_a_section_that_nobody_reads(changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    build(configuration.load(None, {**TINY, **changes}))
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"judge.model": "m"}, "judge.model is read by judge.backend endpoint, got backend null"),
    ({"judge.backend": "endpoint", "judge.model": "m"}, "needs judge.base_url"),
    ({"judge.backend": "rules", "judge.votes": 3}, "judge.votes is read by judge.backend endpoint or policy"),
    ({"judge.backend": "policy", "judge.votes": 3, "judge.temperature": 0.0}, "greedy votes"),
    ({"judge.backend": "policy", "judge.max_tokens": 4096}, "must be less than judge.context"),
    ({"judge.backend": "oracle"}, "one of rules, endpoint, policy or null"),
    ({"judge.timeout": 0}, "judge.timeout must be a number > 0"),
  ],
)
def test_keys_of_the_section(changes, message):
  with pytest.raises(configuration.ConfigError, match=message):
    configuration.load(None, {**TINY, **changes})


def test_a_key_that_is_not_set_and_rules_that_are_not_there(monkeypatch):
  monkeypatch.delenv("NO_SUCH_KEY", raising=False)
  here = {"judge.base_url": "http://127.0.0.1:1/v1", "judge.model": "m", "judge.api_key_env": "NO_SUCH_KEY"}
  config = configuration.load(None, {**TINY, "method.name": "cliff", "judge.backend": "endpoint", **here})
  with pytest.raises(ValueError, match="NO_SUCH_KEY, which is not set"):
    loop.train(config, build(config))
  config = configuration.load(
    None, {**TINY, "method.name": "cliff", "judge.backend": "rules", "env.name": f"{__name__}:lawless"}
  )
  with pytest.raises(ValueError, match="has none"):
    loop.train(config, build(config))


class Lawless:
  def size(self, split):
    return None

  def environment(self, split, index):
    return Calculator().environment(split, index)


def lawless(digits=1, operators="+"):
  return Lawless()


def test_the_environments_own_progress_needs_no_judge():
  config = configuration.load(None, {**TINY, "env.name": "workflow", "env.options": {}, "method.name": "shaping"})
  assert build(config).method.annotators == PRESETS["shaping"]().annotators
  judged = build(dataclasses.replace(config, judge=configuration.Judge(backend="rules"))).method
  assert judged.annotators == (Progress(),)


# the rules of workflow


@functools.cache
def task():
  tasks = Workflow(("cleaning",), classes=2, rows=6)
  return tasks, tasks.task("cleaning", "train", task_seed("train", 0))


def asked(kind, calls, **facts):
  tasks, _ = task()
  actions = [Action("", (call,)) for call in calls] + [Action("done")]
  return json.loads(tasks.judge(Question(kind, (), {"task": 0, "actions": actions, **facts})))


def test_progress_of_the_reference_solution_rises_to_one():
  _, one = task()
  calls = reference_calls(one)
  found = [asked("shaping/progress", calls[:n])["progress"] for n in range(len(calls) + 1)]
  assert found[0] == 0 and found[-1] == 1 and found == sorted(found)


def test_the_first_wrong_step_is_the_one_that_was_put_in():
  _, one = task()
  calls = reference_calls(one)
  parts = list(range(len(calls) + 2))
  assert asked("cliff/first_error", calls, parts=parts) == {"first_error": 0}
  for at in range(len(calls)):
    for wrong in (ToolCall("read", {"path": "nothing"}), ToolCall("write", {"path": "archive.csv", "text": "x"})):
      broken = [*calls[:at], wrong, *calls[at:]]
      assert asked("cliff/first_error", broken, parts=parts) == {"first_error": at + 1}
  assert asked("cliff/first_error", calls[:1], parts=parts) == {"first_error": 2}  # "done" too early


def test_verdicts_and_who_is_responsible():
  _, one = task()
  calls = reference_calls(one)
  rules = asked("draco/task", [])["criteria"]
  assert len(rules) == len(one.contract.stages) + 3
  for given in (calls, calls[:-1], []):
    verdicts = [v["verdict"] for v in asked("draco/verdicts", given, criteria=rules)["verdicts"]]
    credits = asked("draco/credit", given, criteria=rules)["credits"]
    assert [c["verdict"] for c in credits] == verdicts
    assert all(c["steps"] for c in credits if c["verdict"] != "n/a")
    assert (verdicts.count("fail") == 0) == (given is calls)
  report = rules.index(workflow_rules._stage("report"))
  assert asked("draco/credit", calls, criteria=rules)["credits"][report]["steps"] == [len(calls)]


def test_guidance_is_the_rules_of_the_drawn_classes():
  _, one = task()
  items = asked("taspo/evidence", reference_calls(one))["items"]
  assert [i["guidance"] in one.rules for i in items] == [True] * len(one.contract.stages)
  pairs = [(i["guidance"], i["when"]) for i in items]
  assert asked("taspo/match", [], items=[("x", "elsewhere"), *pairs]) == {"applies": [2, 3]}
