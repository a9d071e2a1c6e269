import asyncio
import dataclasses
import json
import random

import jax
import numpy as np
import pytest
from scripted import ScriptedEngine

from jaxagent.config import Env
from jaxagent.envs.base import Action, Malformed, ToolCall
from jaxagent.envs.registry import resolve
from jaxagent.envs.splits import task_seed
from jaxagent.envs.workflow import DOMAINS, Workflow, reference_calls
from jaxagent.envs.workflow.workspace import Workspace
from jaxagent.methods import credit, shaping, tev
from jaxagent.models.chat import Chat, write_calls
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rewards import progress_return
from jaxagent.rollout.batch import demonstrations_batch, to_rollouts
from jaxagent.rollout.episode import Limits, run_episode
from jaxagent.sampling.request import Sampling

PLAIN = Chat(byte_tokenizer())
TINY = {"rows": 3, "defects": 1, "classes": 1, "rules": "file", "arguments": "input"}


def played(tasks, turns, *, index=0, chat=PLAIN, max_turns=64, rollout=0, max_tokens=6000):
  """The trajectory of an episode in which the policy writes `turns`."""
  left = iter(turns)
  engine = ScriptedEngine(chat.tokenizer, chat.eot, lambda text, rng: next(left), capacity=max_tokens)
  environment, seed = tasks.environment("train", index)
  (trajectory,) = asyncio.run(
    run_episode(
      engine, chat, environment, seed, sampling=Sampling(max_tokens=800), limits=Limits(max_turns, max_tokens),
      key=jax.random.key(rollout), task=index, rollout=rollout,
    )
  )  # fmt: skip
  return trajectory


def solution(tasks, index=0, chat=PLAIN):
  messages, _ = tasks.demonstration(index)
  texts = []
  for message in messages:
    if message["role"] == "assistant":
      calls = [ToolCall(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
      texts.append(message["content"] + write_calls(calls, chat.tool_format))
  return texts


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("tool_format", ["plain", "hermes", "qwen_xml"])
def test_the_demonstration_played_is_a_pass_and_the_same_stream(index, tool_format):
  tasks = Workflow(arguments="input" if tool_format == "plain" else "named")
  chat = Chat(byte_tokenizer(), tool_format=tool_format)
  t = played(tasks, solution(tasks, index, chat), index=index, chat=chat, max_tokens=12_000)
  assert (t.status, t.outcome) == ("done", 1.0)
  potential = t.columns["potential"]
  assert len(potential) == t.turns + 1 and potential[0] == 0.0 and potential[-1] == 1.0
  np.testing.assert_allclose(t.turn_reward, 0.25 * np.diff(potential), rtol=1e-6)
  assert t.outcome + sum(t.turn_reward) == pytest.approx(progress_return(np.ones(1), np.ones(1))[0])
  assert (t.tokens, t.action) == chat.demonstration(*tasks.demonstration(index))


def group(tasks):
  """A pass, one repair, two repairs before it was cut short, and nothing."""
  whole = solution(tasks)
  reads = sum("<read>" in turn for turn in whole)
  turns = [whole, [*whole[: reads + 1], "done"], whole, ["done"]]
  return [played(tasks, t, rollout=i, max_turns=reads + 2 if i == 2 else 64) for i, t in enumerate(turns)]


def test_the_presets_for_progress_take_its_rollouts_as_they_are():
  tasks = Workflow(("cleaning",), classes=2, rows=6, arguments="input", rules="file")
  rows = group(tasks)
  assert [t.status for t in rows] == ["done", "done", "truncated", "done"]
  assert [t.outcome for t in rows] == [1, 0, 0, 0]
  batch = to_rollouts(rows, tokens=max(len(t.tokens) for t in rows), turns=max(t.turns for t in rows))
  assert batch.columns["potential"].shape == (4, batch.turn_reward.shape[1] + 1)
  batch = dataclasses.replace(batch, logp_old=batch.logp_rollout)
  credited, _ = credit(tev(), batch)
  np.testing.assert_allclose(credited.turn_reward, batch.turn_reward, atol=1e-7)  # tev's own are the environment's
  np.testing.assert_allclose(
    batch.reward + batch.turn_reward.sum(1),
    progress_return(batch.outcome, np.array([t.columns["potential"][-1] for t in rows])), rtol=1e-6,
  )  # fmt: skip
  advantage = np.asarray(credited.columns["advantage"])
  first = [advantage[i][batch.turn[i] == 0][0] for i in range(4)]
  assert np.isfinite(advantage).all() and first[0] > first[2] > first[1] > first[3]  # failures are told apart
  assert np.isfinite(credit(shaping(), batch)[0].columns["advantage"]).all()


def test_without_a_weight_turns_are_not_rewarded():
  tasks = Workflow(("cleaning",), progress_weight=0.0, **TINY)
  t = played(tasks, solution(tasks))
  assert t.turn_reward == [0.0] * t.turns and t.outcome == 1 and t.columns["potential"][-1] == 1


@pytest.mark.parametrize("domain", DOMAINS)
def test_tiny_tasks_fit_small_byte_level_models(domain):
  tasks = Workflow((domain,), **TINY)
  batch = demonstrations_batch(tasks, PLAIN, range(4), 2400, turns=12)
  assert (batch.prefix_length < 100).all() and batch.length.max() < 2400
  longer = dataclasses.replace(tasks, rules="prompt", arguments="named")
  assert all(len(longer.demonstration(i)[0][0]["content"]) < 500 for i in range(4))


def test_it_ends_truncated_after_its_calls_and_is_graded_on_what_is_left():
  tasks = Workflow(("cleaning",), max_calls=4, **TINY)
  whole = solution(tasks)
  t = played(tasks, ["<list></list><list></list><list></list>", "".join(whole[-3:-1])])
  assert (t.status, t.turns, t.outcome) == ("truncated", 2, 0.0) and "at most 4 calls" in t.cause
  assert t.columns["potential"][-1] == 0.5  # the first of the two calls was made
  t = played(Workflow(("cleaning",), max_calls=2, **TINY), whole[-3:])
  assert (t.status, t.outcome) == ("truncated", 1.0)
  t = played(tasks, ["<list></list>"] * 3, max_turns=2)
  assert (t.status, t.cause, t.columns["potential"]) == ("truncated", "max_turns", (0.0, 0.0, 0.0))


def test_a_cut_last_turn_is_truncated():
  async def run():
    environment, seed = Workflow(**TINY).environment("train", 0)
    await environment.reset(seed)
    return await environment.step({0: Action("do", truncated=True)})

  step = asyncio.run(run())
  assert (step.status, step.outcome, step.info["columns"]["potential"]) == ("truncated", 0.0, (0.0, 0.0))


def workspace():
  return Workspace({"a.csv": "k,v\n1,x\n", "empty": ""}, max_output=40)


@pytest.mark.parametrize(
  "call, reply",
  [
    (ToolCall("list", {}), "a.csv\nempty"),
    (ToolCall("list", {"input": ""}), "a.csv\nempty"),
    (ToolCall("read", {"path": "a.csv"}), "1: k,v\n2: 1,x"),
    (ToolCall("read", {"path": "a.csv", "line": 2}), "2: 1,x"),
    (ToolCall("read", {"input": "a.csv 2"}), "2: 1,x"),
    (ToolCall("read", {"path": "a.csv", "line": 9}), "nothing"),
    (ToolCall("read", {"path": "empty"}), "nothing"),
    (ToolCall("edit", {"path": "empty", "line": 1, "text": "x"}), "ok"),
    (ToolCall("edit", {"path": "a.csv", "line": "3", "text": "2,y"}), "ok"),
    (Malformed("not JSON"), "error: not JSON"),
    (ToolCall("rm", {"path": "a.csv"}), "error: no tool 'rm', only list, read, write, edit"),
    (ToolCall("_cut", {"text": "a"}), "error: no tool '_cut', only list, read, write, edit"),
    (ToolCall("read", {}), "error: read takes path, line"),
    (ToolCall("read", {"path": "b"}), "error: no file 'b'"),
    (ToolCall("read", {"path": ["a.csv"]}), "error: read takes texts, and a number as line"),
    (ToolCall("read", {"path": "a.csv", "of": "x"}), "error: read takes path, line"),
    (ToolCall("list", {"path": "x"}), "error: list takes nothing"),
    (ToolCall("write", {"path": "b"}), "error: write takes path, text"),
    (ToolCall("write", {"input": "b"}), "error: write takes path, text"),
    (ToolCall("write", {"path": "b c", "text": ""}), "error: a path has 1 to 64 characters and no spaces"),
    (ToolCall("write", {"path": "", "text": ""}), "error: a path has 1 to 64 characters and no spaces"),
    (ToolCall("write", {"path": "b", "text": "x" * 200_001}), "error: a file has at most 200000 characters"),
    (ToolCall("edit", {"path": "a.csv", "line": 4, "text": "x"}), "error: a.csv has 2 lines, got line 4"),
    (ToolCall("edit", {"path": "a.csv", "line": 3, "text": ""}), "error: a.csv has 2 lines, got line 3"),
    (ToolCall("edit", {"path": "a.csv", "line": 0, "text": "x"}), "error: a.csv has 2 lines, got line 0"),
    (ToolCall("edit", {"path": "a.csv", "line": "one", "text": "x"}), "error: line is a whole number"),
    (ToolCall("edit", {"path": "a.csv", "line": True, "text": "x"}), "error: line is a whole number"),
    (ToolCall("edit", {"path": "a.csv", "line": 1.5, "text": "x"}), "error: line is a whole number"),
    (ToolCall("edit", {"input": "a.csv"}), "error: edit takes path, line, text"),
    (ToolCall("edit", {"input": "a.csv ٣ x"}), "error: line is a whole number"),
  ],
)
def test_what_the_tools_say(call, reply):
  assert workspace().reply(call) == reply


@pytest.mark.parametrize(
  "call, text",
  [
    (ToolCall("edit", {"path": "a.csv", "line": 2, "text": "1,z"}), "k,v\n1,z\n"),
    (ToolCall("edit", {"path": "a.csv", "line": 2, "text": ""}), "k,v\n"),
    (ToolCall("edit", {"input": "a.csv 2 1,z z"}), "k,v\n1,z z\n"),
    (ToolCall("edit", {"input": "a.csv 2"}), "k,v\n"),
    (ToolCall("edit", {"input": "a.csv 2 "}), "k,v\n"),
    (ToolCall("edit", {"path": "a.csv", "line": 3, "text": "2,y"}), "k,v\n1,x\n2,y\n"),
    (ToolCall("write", {"path": "a.csv", "text": "new"}), "new"),
    (ToolCall("write", {"input": "a.csv\nnew\nlines\n"}), "new\nlines\n"),
    (ToolCall("write", {"input": "a.csv\n"}), ""),
    (ToolCall("read", {"path": "a.csv"}), "k,v\n1,x\n"),
  ],
)
def test_what_the_tools_do(call, text):
  w = workspace()
  w.reply(call)
  assert w.files["a.csv"] == text


def test_no_call_raises():
  rng, w = random.Random(0), workspace()
  values = ["a.csv", "", "b", 1, -1, 10**9, 1.5, True, None, [], {}, "2", "9" * 5000, "\ud800", "a.csv 1 x", "\n"]
  for _ in range(2000):
    names = rng.sample(["path", "line", "text", "input", "x"], rng.randint(0, 4))
    call = ToolCall(rng.choice(["list", "read", "write", "edit", ""]), {name: rng.choice(values) for name in names})
    assert isinstance(w.reply(call), str)


def test_a_long_reply_is_cut_and_a_full_workspace_says_so():
  w = Workspace({f"f{i}": "x" * 100 for i in range(64)}, max_output=40)
  assert w.reply(ToolCall("read", {"path": "f1"})) == "1: " + "x" * 37 + "\n(63 characters more)"
  assert w.reply(ToolCall("write", {"path": "g", "text": ""})) == "error: there are 64 files already"
  assert w.reply(ToolCall("write", {"path": "f1", "text": ""})) == "ok"


def test_errors_go_back_to_the_model_and_the_episode_goes_on():
  tasks = Workflow(("forensics",), **TINY)
  t = played(tasks, ["<read>", "<dance>x</dance>", *solution(tasks)])
  tools = [message["content"] for message in t.transcript if message["role"] == "tool"]
  assert tools[0].startswith("error: <read> has no partner") and tools[1].startswith("error: no tool 'dance'")
  assert t.outcome == 1.0 and t.columns["potential"][:3] == (0.0, 0.0, 0.0)


def test_tasks_of_different_splits_never_coincide():
  tasks = Workflow(("cleaning",), rows=2, classes=1)
  worlds = {
    split: {json.dumps(tasks.task("cleaning", split, task_seed(split, i)).truth) for i in range(60)}
    for split in ("train", "eval")
  }
  assert all(len(found) > 50 for found in worlds.values()) and not worlds["train"] & worlds["eval"]
  with pytest.raises(ValueError, match="split must be"):
    tasks.environment("test", 0)


def test_the_same_episode_again():
  tasks = Workflow(("pipeline",), **TINY)
  one, two = (played(tasks, solution(tasks)) for _ in range(2))
  assert one.tokens == two.tokens and one.turn_reward == two.turn_reward


def test_domains_take_turns_and_all_options_reach_the_task():
  tasks = Workflow(scale="small", rows=12, defects=2, classes=2, system="S")
  for index, domain in enumerate(DOMAINS):
    messages, tools = tasks.demonstration(index)
    task = tasks.task(domain, "train", task_seed("train", index))
    assert messages[0] == {"role": "system", "content": "S"} and messages[1]["content"].startswith(task.rules)
    assert tasks.kind("train", index) == domain
    assert len(task.contract.stages) == 2 and 3 <= len(task.contract.defects) <= 4
    assert [tool["function"]["name"] for tool in tools] == ["list", "read", "write", "edit"]
    assert len(messages) == 3 + 2 * (len(task.files) + len(reference_calls(task)))


@pytest.mark.parametrize(
  "options, message",
  [
    ({"domains": ()}, "domains must be different ones of cleaning, pipeline"),
    ({"domains": ("cleaning", "cooking")}, "domains must be"),
    ({"domains": ("cleaning", "cleaning")}, "domains must be"),
    ({"scale": "huge"}, "scale must be one of unit, small, full"),
    ({"rows": 1}, "rows must be in 2..1000"),
    ({"defects": 0}, "defects must be"),
    ({"classes": 5}, "classes must be in 1..4 for these domains"),
    ({"rows": 3, "defects": 2}, "rows must be at least classes"),
    ({"rules": "none"}, "rules must be"),
    ({"arguments": "json"}, "arguments must be"),
    ({"max_calls": 0}, "max_calls must be"),
    ({"max_output": 0}, "max_output must be"),
    ({"progress_weight": -1.0}, "progress_weight must be"),
    ({"scales": "unit"}, "did you mean 'scale'"),
  ],
)
def test_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    resolve(Env("workflow", options))


def test_its_name_in_a_config():
  tasks = resolve(Env("workflow", {"domains": ["cleaning"], "scale": "full", "classes": 5}))
  assert tasks == Workflow(("cleaning",), "full", classes=5) and tasks.size("train") is None
  assert resolve(Env("workflow", {"domains": "cleaning"})).domains == ("cleaning",)
