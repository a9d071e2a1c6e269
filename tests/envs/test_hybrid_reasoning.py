import asyncio
import json

import jax
import numpy as np
import pytest
import yaml
from scripted import ScriptedEngine

from jaxagent import cli, methods
from jaxagent.config import Config, Env
from jaxagent.envs.base import Action
from jaxagent.envs.hybrid_reasoning import HybridReasoning, answer_of, write_statistics
from jaxagent.envs.registry import resolve
from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling

WORDS = {"env": "calculator", "options": {"digits": 1}, "think": "?", "no_think": "="}
SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16}


@pytest.mark.parametrize(
  "text, thought, answer",
  [
    ("<think>so</think>42", True, "42"), ("</think>42", False, "42"), ("</think>4</think>2", False, "4</think>2"),
    ("<think>a</think>b</think>42", True, "42"), ("<think>so 42", True, None), ("so</think>42", True, "42"),
    ("42", True, None), ("", True, None), ("</think>", False, ""),
  ],
)  # fmt: skip
def test_the_first_word_decides(text, thought, answer):
  assert answer_of(text, "<think>", "</think>") == (thought, answer)


def played(text, split="train", truncated=False, **options):
  async def run():
    environment, seed = HybridReasoning(**{**WORDS, **options}).environment(split, 3)
    opening = (await environment.reset(seed))[0]
    value = str(eval(opening.messages[-1]["content"]))
    step = await environment.step({0: Action(text.replace("RIGHT", value), truncated=truncated)})
    await environment.close()
    return opening, step

  return asyncio.run(run())


@pytest.mark.parametrize(
  "text, outcome, thought",
  [
    ("=RIGHT", 1, 0), ("?3+4=RIGHT", 1, 1), ("?3=1=RIGHT", 1, 1), ("=RIGHT1", 0, 0), ("?RIGHT", 0, 1), ("RIGHT", 0, 1),
    ("==RIGHT", 0, 0),
  ],
)  # fmt: skip
def test_what_follows_the_thinking_is_scored(text, outcome, thought):
  _, step = played(text)
  assert step.status == "done" and step.outcome == outcome and step.info["columns"] == {"thought": thought}


def test_a_cut_thought_is_truncated():
  assert played("?3+", truncated=True)[1].status == "truncated"
  assert played("=RIGHT", truncated=True)[1].status == "truncated"


@pytest.mark.parametrize(
  "mode, openings", [("coin", ("?", "=")), ("free", ()), ("think", ("?",)), ("no_think", ("=",))]
)
def test_who_draws_the_first_token(mode, openings):
  train, held = (played("=1", split, mode=mode)[0] for split in ("train", "eval"))
  assert train.openings == openings and held.openings == ()
  assert not train.tools


def test_the_prompt_is_that_of_the_inner_tasks():
  inner, seed = resolve(Env("calculator", {"digits": 1})).environment("train", 3)
  assert played("=1")[0].messages == asyncio.run(inner.reset(seed))[0].messages
  assert played("=1", system="Think.")[0].messages[0] == {"role": "system", "content": "Think."}


@pytest.mark.parametrize(
  "option",
  [
    {"mode": "both"}, {"env": "hybrid_reasoning"}, {"think": "=?"}, {"think": ""}, {"no_think": ""},
    {"reference": "/no/such/file.json"},
  ],
)  # fmt: skip
def test_wrong_options(option):
  with pytest.raises(ValueError, match="hybrid_reasoning: "):
    HybridReasoning(**{**WORDS, **option})


def test_the_kind_of_a_task_is_the_inner_ones():
  assert HybridReasoning(**{**WORDS, "env": "workflow", "options": {}}).kind("train", 1) == "pipeline"
  assert HybridReasoning(**WORDS).kind("train", 1) == ""


def test_tasks_of_several_agents_are_refused():
  with pytest.raises(ValueError, match="one agent"):
    played("=1", env="team", options={})


def rows(n, accuracy=0.5, tokens=7.0):
  return [{"reference_accuracy": accuracy, "reference_tokens": tokens + i} for i in range(n)]


def test_statistics_are_read_and_bound_the_tasks(tmp_path):
  path = str(tmp_path / "stats.json")
  write_statistics(path, HybridReasoning(**WORDS), rows(5))
  tasks = HybridReasoning(**WORDS, reference=path)
  assert tasks.size("train") == 5 and tasks.size("eval") is None
  _, step = played("=RIGHT", reference=path)
  assert step.info["columns"] == {"thought": 0, "reference_accuracy": 0.5, "reference_tokens": 10.0}
  assert played("?", reference=path)[1].info["columns"]["reference_tokens"] == 10.0
  assert played("=1", "eval", reference=path)[1].info["columns"] == {"thought": 0}
  with pytest.raises(ValueError, match="has 5 tasks, got index 5"):
    tasks.environment("train", 5)
  with pytest.raises(ValueError, match="was made with options"):
    HybridReasoning(**{**WORDS, "options": {"digits": 2}}, reference=path)


@pytest.mark.parametrize("text", ["{", "[]", '{"tasks": [{}]}', '{"tasks": [], "identity": {}}'])
def test_a_file_that_is_none_is_named(text, tmp_path):
  (tmp_path / "s.json").write_text(text)
  with pytest.raises(ValueError, match=r"s.json"):
    HybridReasoning(**WORDS, reference=str(tmp_path / "s.json"))


def collected(engine, chat, tasks, *, samples=16, max_turn_tokens=6, split="train", count=2):
  return collect(
    engine, chat, tasks, split=split, indices=range(count), samples=samples, key=jax.random.key(0),
    sampling=Sampling(max_tokens=max_turn_tokens), limits=Limits(max_tokens=64),
  )  # fmt: skip


TOKENIZER = byte_tokenizer()
POLICY = decoder_policy(DecoderConfig(vocab_size=TOKENIZER.vocab_size, **SHAPE))
PARAMS = POLICY.init(jax.random.key(0))


@pytest.fixture(scope="module")
def model():
  return Engine(POLICY, PARAMS, tokenizer=TOKENIZER, slots=16, capacity=64), Chat(TOKENIZER)


def test_the_coin_is_fair_recorded_and_of_the_sample(model):
  engine, chat = model
  trajectories = collected(engine, chat, HybridReasoning(**WORDS))
  first = [chat.tokenizer.decode([t.tokens[t.prefix_length]]) for t in trajectories]
  assert set(first) == {"?", "="} and 4 < first.count("?") < 28  # of 32: 4 standard deviations
  assert set(first[:16]) == {"?", "="}  # within a group
  for t, word in zip(trajectories, first):
    at = t.prefix_length
    assert t.action[at] and t.turn[at] == 0 and t.columns["forced"].tolist() == [i == at for i in range(len(t.tokens))]
    assert t.logp_sampled[at] == pytest.approx(np.log(0.5)) and t.logp_rollout[at] < np.log(0.5)
    assert t.logp_sampled[at + 1 :] == t.logp_rollout[at + 1 :]
    assert t.columns["thought"] == (word == "?") and len(t.tokens) <= 64
  again = collected(engine, chat, HybridReasoning(**WORDS))
  assert [t.tokens for t in again] == [t.tokens for t in trajectories]
  held = collected(engine, chat, HybridReasoning(**WORDS), split="eval", samples=2)
  assert all("forced" not in t.columns for t in held)


def test_a_forced_word_has_the_log_prob_of_the_policy(model):
  """The log-probs of a turn with a drawn opening are those of one forward pass over it."""
  engine, chat = model
  (t,) = collected(engine, chat, HybridReasoning(**WORDS, mode="no_think"), samples=1, count=1)
  ids = np.array(t.tokens)[None]
  at = np.arange(ids.shape[1])[None]
  states = POLICY.forward(PARAMS, ids, at, np.zeros_like(ids)).states
  logits = POLICY.head(PARAMS, states)
  logp = np.asarray(jax.nn.log_softmax(logits))[0]
  for i, action in enumerate(t.action):
    if action:
      assert t.logp_rollout[i] == pytest.approx(logp[i - 1, ids[0, i]], abs=2e-5)


def test_a_turn_of_one_token_is_the_coins(model):
  engine, chat = model
  for t in collected(engine, chat, HybridReasoning(**WORDS), samples=4, max_turn_tokens=1):
    assert sum(t.action) == 1 and t.columns["forced"].sum() == 1 and t.status == "truncated"


def test_openings_with_one_first_token_are_refused(model):
  engine, chat = model
  with pytest.raises(ValueError, match="different tokens"):
    collected(engine, chat, HybridReasoning(**{**WORDS, "think": "<a>", "no_think": "<b>"}), samples=1)


def test_a_batch_has_what_the_presets_read(model, tmp_path):
  engine, chat = model
  path = str(tmp_path / "stats.json")
  write_statistics(path, HybridReasoning(**WORDS), rows(2))
  trajectories = collected(engine, chat, HybridReasoning(**WORDS, reference=path), samples=4)
  rollouts = to_rollouts(trajectories, tokens=64, turns=1)
  for name in ("when2think", "think_only"):
    assert set(methods.PRESETS[name]().columns) <= set(rollouts.columns)
  assert rollouts.columns["forced"].dtype == bool and (rollouts.columns["forced"].sum(1) == 1).all()
  assert (rollouts.columns["forced"] <= rollouts.mask).all()


def test_routing_of_a_turn_with_an_opening_is_whole():
  chat = Chat(TOKENIZER)
  engine = ScriptedEngine(TOKENIZER, chat.eot, lambda text, rng: "=12", experts=(2, 3))
  (t,) = collected(engine, chat, HybridReasoning(**WORDS, mode="no_think"), samples=1, count=1)
  assert len(t.routing) == len(t.tokens) - 1 and t.columns["forced"].sum() == 1


CONFIG = {
  "model": {"shape": SHAPE},
  "env": {"name": "hybrid_reasoning", "options": WORDS},
  "rollout": {"prompts": 2, "samples": 4, "max_turns": 1, "max_tokens": 64, "max_turn_tokens": 4, "slots": 8},
  "method": {"name": "when2think"},
  "run": {"steps": 1, "compilation_cache": None},
  "training": {"microbatch_rows": 8},
  "evaluation": {"tasks": 0},
}


def test_the_command_writes_what_training_reads(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  values = json.loads(json.dumps(CONFIG))
  values["env"]["options"]["reference"] = "stats.json"
  (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
  assert cli.main(["train", "c.yaml"]) == 2
  assert "jaxagent reference-stats CONFIG" in capsys.readouterr().err
  assert cli.main(["reference-stats", "c.yaml"]) == 2
  assert "endless: say how many" in capsys.readouterr().err
  assert cli.main(["reference-stats", "c.yaml", "--tasks", "4", "--samples", "3", "--seed=1"]) == 0
  assert "4 tasks: accuracy" in capsys.readouterr().out
  made = json.loads((tmp_path / "stats.json").read_text())
  assert len(made["tasks"]) == 4 and made["identity"]["env"] == "calculator"
  for row in made["tasks"]:
    assert row["think"]["samples"] == row["no_think"]["samples"] == 3
    assert row["reference_tokens"] == row["think"]["tokens"] and 1 <= row["reference_tokens"] <= 4
    assert row["reference_accuracy"] == row["think"]["accuracy"]
  assert cli.main(["reference-stats", "c.yaml", "--tasks", "4"]) == 2
  assert "exists" in capsys.readouterr().err
  assert cli.main(["train", "c.yaml"]) == 0
  record = json.loads((tmp_path / "runs" / "c-1" / "metrics.jsonl").read_text().splitlines()[-1])
  assert np.isfinite(record["loss"])


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--env.name=calculator", "--env.options={}"], "of env.name hybrid_reasoning"),
    ([], "nothing says where to write"),
    (["--output", "s.json", "--tasks", "0"], "at least 1"),
    (["--output", "s.json", "--tasks", "2", "--samples", "0"], "at least 1"),
  ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
  assert cli.main(["reference-stats", "c.yaml", *arguments]) == 2
  said = capsys.readouterr().err
  assert message in said and len(said.splitlines()) == 1 and not (tmp_path / "s.json").exists()


def test_the_schema_takes_it():
  assert Config(env=Env("hybrid_reasoning", WORDS)).env.options["think"] == "?"
