"""What holds for every registered environment. A new one is a row of `ROWS` (its smallest options), and no more."""

import asyncio
import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from scripted import ScriptedEngine

from jaxagent.config import Env
from jaxagent.envs.base import Action, Malformed, ToolCall
from jaxagent.envs.registry import ENVIRONMENTS, resolve
from jaxagent.evaluation.evaluate import evaluate
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.request import Sampling

WORDS = Path(__file__).parents[2] / "configs" / "words.jsonl"
HARMLESS = "x"  # what is written in the games that end by themselves


@dataclasses.dataclass(frozen=True)
class Row:
  """`package` or `program`: to be installed, else the row is skipped. `turns`: within which garbage ends an episode."""

  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  package: str | None = None
  program: str | None = None
  turns: int = 8


ROWS = {
  "calculator": Row({"digits": 1}),
  "reasoning_gym": Row({"dataset": "chain_sum", "size_per_split": 50}, package="reasoning_gym", turns=1),
  "dataset": Row({"path": str(WORDS), "held_out": 0.3}, turns=1),
  "search": Row({"max_calls": 4}, package="bm25s"),
  "hybrid_reasoning": Row({"env": "calculator", "options": {"digits": 1}, "think": "?", "no_think": "="}, turns=1),
  "team": Row({"agents": 2, "keys": 2, "rounds": 1}, turns=2),
  "terminal": Row({"level": "tiny", "max_turns": 4}, program="bwrap", turns=4),
  "workflow": Row({"rows": 8, "max_calls": 4, "domains": ["cleaning"]}),
  "textarena": Row({"game": "GuessTheNumber-v0"}, package="textarena", turns=32),
  "text_gym": Row({"make": "adapted_tasks:Corridor", "max_turns": 6}, turns=6),
  "verifiers": Row({"taskset": "adapted_tasks:sums"}, package="verifiers.v1", turns=1),
}
GARBAGE = (
  Action("\x00\ud7ff <tool_call>", (Malformed("no end"),)),
  Action("", (ToolCall("", {}), ToolCall("nope", {"input": None, "x": [1, {"y": float("inf")}]}))),
  Action("</think></answer><answer>" * 50, ()),
  Action("[" * 400 + "9" * 400, (), truncated=True),
  Action("", ()),
)


@pytest.fixture(autouse=True)
def fixtures(monkeypatch):
  monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fixtures")


def installed(package: str) -> bool:
  return importlib.util.find_spec(package.partition(".")[0]) is not None


@pytest.fixture(params=list(ROWS))
def row(request):
  row = ROWS[request.param]
  if row.package is not None and not installed(row.package):
    pytest.skip(f"{row.package} is not installed")
  if row.program is not None and shutil.which(row.program) is None:
    pytest.skip(f"{row.program} is not installed")
  return row, resolve(Env(request.param, row.options))


def test_every_environment_has_a_row():
  assert set(ROWS) == set(ENVIRONMENTS)


def said(observations) -> bytes:
  return json.dumps({a: dataclasses.astuple(o) for a, o in observations.items()}, sort_keys=True).encode()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_seed_is_an_episode_and_closing_twice_is_harmless(row, split):
  _, tasks = row

  async def opening():
    environment, seed = tasks.environment(split, 1)
    read = said(await environment.reset(seed))
    await environment.close()
    await environment.close()
    return seed, read

  assert asyncio.run(opening()) == asyncio.run(opening())
  assert tasks.size(split) is None or tasks.size(split) > 1


@pytest.mark.parametrize("first", range(len(GARBAGE)))
def test_garbage_ends_an_episode_and_breaks_nothing(row, first):
  facts, tasks = row

  async def run():
    environment, seed = tasks.environment("train", 0)
    agents = list(await environment.reset(seed))
    try:
      for turn in range(facts.turns):
        action = GARBAGE[min(first + turn, len(GARBAGE) - 1)]
        step = await environment.step({agent: action for agent in agents})
        assert step.status in ("running", "done", "truncated"), step.cause
        assert 0 <= step.outcome <= 1 and set(step.turn_rewards) <= set(agents)
        if step.status != "running":
          return True
        agents = list(step.observations)
      return False
    finally:
      await environment.close()

  assert asyncio.run(run())


class OneSplit:
  """The held-out tasks, whatever split is asked for."""

  def __init__(self, tasks):
    self.tasks = tasks

  def size(self, split):
    return self.tasks.size("eval")

  def environment(self, split, index):
    return self.tasks.environment("eval", index)


@pytest.mark.parametrize("tool_format", ["plain", "qwen_xml"])
def test_training_and_evaluation_read_the_same_bytes(row, tool_format):
  """Prompts and what follows them, for the same tasks and the same words of the policy."""
  _, tasks = row
  tokenizer = byte_tokenizer()
  chat = Chat(tokenizer, tool_format=tool_format)
  limits, sampling, key = Limits(max_turns=3, max_tokens=50_000), Sampling(max_tokens=64), jax.random.key(0)

  def streams(play):
    engine = ScriptedEngine(tokenizer, chat.eot, lambda text, rng: HARMLESS, capacity=50_000)
    play(engine)
    return sorted(bytes(tokenizer.decode(session.stream), "utf-8") for session in engine.sessions)

  def train(engine):
    collect(
      engine, chat, OneSplit(tasks), split="train", indices=range(2), samples=1, sampling=sampling, limits=limits,
      key=key,
    )  # fmt: skip

  def held_out(engine):
    evaluate(engine, chat, OneSplit(tasks), count=2, samples=1, sampling=sampling, limits=limits, key=key)

  read = streams(train)
  assert read == streams(held_out) and len(read) >= 2 and all(len(text) > 8 for text in read)


def test_the_documentation_has_every_environment_and_every_option():
  text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
  for name, made in ENVIRONMENTS.items():
    rows = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 2, name
    missing = [f.name for f in dataclasses.fields(made) if f"`{f.name}`" not in rows[1]]
    assert not missing, f"docs/environments.md: {name} lacks {missing}"
