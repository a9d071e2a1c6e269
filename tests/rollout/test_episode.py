import asyncio
import dataclasses

import jax
import pytest
from scripted import ScriptedEngine

from jaxagent.envs.base import Action, Observation, Step
from jaxagent.envs.calculator import Calculator, evaluate
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import Tokenizer, byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.episode import Limits, run_episode
from jaxagent.sampling.request import Sampling

CHAT = Chat(byte_tokenizer())
KEY = jax.random.key(0)
LONG = Limits(max_turns=4, max_tokens=400)


def user(text):
  return {"role": "user", "content": text}


class Talk:
  """Says `lines` one after the other, to agent 0; the last one is followed by the end. A line may be an exception."""

  tool_format = None

  def __init__(self, lines, *, turn_rewards=(), outcome=1.0, info=None):
    self.lines, self.turn_rewards, self.outcome, self.info = list(lines), list(turn_rewards), outcome, info or {}
    self.actions, self.closed = [], 0

  async def reset(self, seed):
    return {0: Observation((user(self.say()),))}

  async def step(self, actions):
    self.actions.append(actions[0])
    rewards = {0: self.turn_rewards.pop(0)} if self.turn_rewards else {}
    if not self.lines:
      return Step(turn_rewards=rewards, outcome=self.outcome, status="done", info=self.info)
    line = self.say()
    return line if isinstance(line, Step) else Step({0: Observation((user(line),))}, rewards)

  def say(self):
    line = self.lines.pop(0)
    if isinstance(line, BaseException):
      raise line
    return line

  async def close(self):
    self.closed += 1


def episode(environment, write, *, limits=LONG, sampling=None, seed=0, chat=CHAT, **engine):
  engine = ScriptedEngine(chat.tokenizer, chat.eot, write, **engine)
  sampling = sampling or Sampling(max_tokens=100)
  run = run_episode(engine, chat, environment, seed, sampling=sampling, limits=limits, key=KEY, task=7, rollout=3)
  return asyncio.run(run), engine


def spans(trajectory):
  """[(is action, text)] of the stream."""
  out = []
  for i, action in zip(trajectory.tokens, trajectory.action):
    if not out or out[-1][0] != action:
      out.append((action, []))
    out[-1][1].append(i)
  return [(action, CHAT.tokenizer.decode(ids)) for action, ids in out]


def test_exactly_the_sampled_tokens_and_the_end_of_turn_are_actions():
  replies = iter(["yes", "no"])
  (t,), engine = episode(Talk(["a", "b"]), lambda text, rng: next(replies))
  assert spans(t) == [
    (False, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
    (True, "yes<|im_end|>"),
    (False, "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
    (True, "no<|im_end|>"),
  ]
  assert (t.status, t.outcome, t.turns, t.task, t.rollout) == ("done", 1.0, 2, 7, 3)
  assert t.tokens == engine.sessions[0].stream and engine.sessions[0].closed
  assert t.turn == [0 if a and i < 40 else 1 if a else -1 for i, a in enumerate(t.action)]
  lengths = {len(getattr(t, name)) for name in ("action", "turn", "logp_rollout", "logp_sampled", "entropy", "version")}
  assert lengths == {len(t.tokens)}
  assert [x < 0 for x in t.logp_rollout] == t.action and t.prefix_length == t.action.index(True)


def test_the_models_ids_are_kept_where_text_would_lose_them():
  odd = [0xFF, CHAT.tokenizer.pad_id, 0xC3, CHAT.tokenizer.special["<|im_start|>"], CHAT.eot]
  (t,), _ = episode(Talk(["a"]), lambda text, rng: odd)
  assert [i for i, action in zip(t.tokens, t.action) if action] == odd


def test_a_stream_extends_itself_and_equals_the_rendering_of_the_whole_conversation():
  environment = Talk(["a", "<|im_end|> b", "c"])
  replies = iter("xyz")
  (t,), _ = episode(environment, lambda text, rng: next(replies))
  said = [{"role": "assistant", "content": text} for text in "xyz"]
  turns = [user("a"), said[0], user("<|im_end|> b"), said[1], user("c"), said[2]]
  whole, action = CHAT.demonstration(turns)
  assert (t.tokens, t.action) == (whole, action)


def test_parallel_tool_results_are_rendered_together():
  class Two(Talk):
    tool_format = "chat"

    async def step(self, actions):
      self.actions.append(actions[0])
      if len(self.actions) > 1:
        return Step(outcome=1.0, status="done")
      return Step({0: Observation(tuple({"role": "tool", "content": c.arguments["input"]} for c in actions[0].calls))})

  environment, replies = Two(["a"]), iter(["<f>1</f><f>2</f>", "x"])
  (t,), _ = episode(environment, lambda text, rng: next(replies))
  both = "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
  assert spans(t)[2] == (False, both) and t.turns == 2
  assert [c.name for c in environment.actions[0].calls] == ["f", "f"]


def test_a_reward_sees_what_the_model_wrote_and_nothing_else():
  environment, replies = Talk(["a", "secret"]), iter(["x", "y"])
  episode(environment, lambda text, rng: next(replies))
  assert environment.actions == [Action("x"), Action("y")]


@pytest.mark.parametrize("index", range(3))
def test_an_episode_that_says_a_demonstrations_words_has_its_ids(index):
  tasks = Calculator()
  messages, tools = tasks.demonstration(index)
  ids, action = CHAT.demonstration(messages, tools)
  environment, seed = tasks.environment("train", index)
  problem = messages[0]["content"]
  replies = iter([f"<calc>{problem}</calc>", str(evaluate(problem))])
  (t,), _ = episode(environment, lambda text, rng: next(replies), seed=seed)
  assert (t.tokens, t.action, t.status, t.outcome) == (ids, action, "done", 1.0)


def test_a_cut_turn_is_told_and_the_end_of_turn_is_then_context():
  environment, replies = Talk(["a", "b"]), iter(["0123456789", "x"])
  (t,), _ = episode(environment, lambda text, rng: next(replies), sampling=Sampling(max_tokens=5))
  assert spans(t)[1] == (True, "01234") and spans(t)[2][1].startswith("<|im_end|>\n<|im_start|>user")
  assert environment.actions == [Action("01234", truncated=True), Action("x")]
  assert t.status == "done"


def test_a_cut_last_turn_truncates_and_keeps_the_outcome():
  (t,), _ = episode(Talk(["a"], outcome=0.5), lambda text, rng: "0123456789", sampling=Sampling(max_tokens=5))
  assert (t.status, t.outcome, t.cause) == ("truncated", 0.5, "the last turn was cut")


def test_a_stop_string_ends_a_turn_without_its_mark():
  environment = Talk(["a", "b"])
  replies = iter([list(b"x;"), "y"])
  (t,), _ = episode(environment, lambda text, rng: next(replies))
  assert environment.actions[0] == Action("x;") and spans(t)[2][1].startswith("<|im_end|>\n")


PROMPT = len(CHAT.render([user("a")]))
REPLY = len(CHAT.continuation([user("b")], ended=True))


@pytest.mark.parametrize(
  "room, said, cause",
  [
    (1, ["a"], "max_tokens"),
    (3, ["abc"], "max_tokens"),
    (4, ["abc<|im_end|>"], "max_tokens"),
    (4 + REPLY, ["abc<|im_end|>"], "max_tokens"),
    (4 + REPLY + 1, ["abc<|im_end|>", "a"], "the last turn was cut"),
    (4 + REPLY + 4, ["abc<|im_end|>", "abc<|im_end|>"], ""),
  ],
)
def test_an_episode_never_outgrows_its_row(room, said, cause):
  limits = Limits(max_tokens=PROMPT + room)
  (t,), engine = episode(Talk(["a", "b"]), lambda text, rng: "abc", limits=limits)
  assert [text for action, text in spans(t) if action] == said
  assert len(t.tokens) <= PROMPT + room and t.tokens == engine.sessions[0].stream
  assert (t.status, t.cause) == ("truncated" if cause else "done", cause)


def test_a_prompt_that_leaves_no_room_names_the_knob():
  environment = Talk(["a"])
  with pytest.raises(ValueError, match=rf"task 7 has {PROMPT} tokens.*rollout.max_tokens={PROMPT}"):
    episode(environment, lambda text, rng: "x", limits=Limits(max_tokens=PROMPT))
  assert environment.closed == 1


def test_limits_beyond_the_engine_name_both():
  with pytest.raises(ValueError, match=r"rollout.max_tokens=400 is more than the engine's capacity of 399"):
    episode(Talk(["a"]), lambda text, rng: "x", capacity=399)


def test_max_turns():
  (t,), _ = episode(Talk("abcdefgh"), lambda text, rng: "x", limits=Limits(max_turns=3, max_tokens=999))
  assert (t.status, t.cause, t.turns, t.outcome) == ("truncated", "max_turns", 3, 0.0)


@pytest.mark.parametrize(
  "lines, cause, turns",
  [
    ([RuntimeError("down")], "reset: RuntimeError: down", 0),
    (["a", RuntimeError("down")], "step: RuntimeError: down", 1),
    (["a", TimeoutError("remote")], "step: TimeoutError: remote", 1),
    (["a", Step(status="failed", outcome=0.5, cause="sandbox died")], "sandbox died", 1),
    (["a", Step(status="failed")], "the environment reported a failure", 1),
    (["a", Step()], "the environment is running but gave no observations", 1),
    (["a", Step(status="done", outcome=float("nan"))], "the environment's outcome is nan", 1),
    (["a", Step(status="done", turn_rewards={1: 1.0})], "rewarded agents [1], which did not act", 1),
  ],
)
def test_a_broken_environment_fails_the_episode_and_is_closed(lines, cause, turns):
  environment = Talk(lines)
  (t,), engine = episode(environment, lambda text, rng: "x")
  assert t.status == "failed" and cause in t.cause and t.turns == turns == len(t.turn_reward) and t.outcome == 0
  assert environment.closed == 1 and all(s.closed for s in engine.sessions)


class Slow(Talk):
  async def step(self, actions):
    await asyncio.sleep(0.05)
    return await super().step(actions)


@pytest.mark.parametrize("timeout, status", [(0.12, "failed"), (30, "done"), (None, "done")])
def test_the_environments_time_is_limited_over_the_episode(timeout, status):
  (t,), _ = episode(Slow("abcd"), lambda text, rng: "x", limits=dataclasses.replace(LONG, timeout=timeout))
  assert t.status == status
  if status == "failed":
    assert "longer than 0.12 s" in t.cause and 0 < t.turns < 4


def test_the_samplers_time_does_not_count():
  (t,), _ = episode(Talk("ab"), lambda text, rng: "x", limits=Limits(max_tokens=200, timeout=0.2), delay=0.6)
  assert t.status == "done"


def test_a_failure_to_close_is_reported_and_changes_nothing():
  class Stuck(Talk):
    async def close(self):
      raise OSError("busy")

  with pytest.warns(UserWarning, match=r"task 7 failed: OSError: busy"):
    (t,), _ = episode(Stuck(["a"]), lambda text, rng: "x")
  assert t.status == "done"


def test_errors_of_the_engine_are_not_the_environments():
  def broken(text, rng):
    raise MemoryError("device")

  environment = Talk(["a"])
  with pytest.raises(MemoryError):
    episode(environment, broken)
  assert environment.closed == 1


def test_turn_rewards_stand_at_their_turns():
  (t,), _ = episode(Talk("abc", turn_rewards=[0.1, 0.2, 0.3]), lambda text, rng: "x")
  assert t.turn_reward == [0.1, 0.2, 0.3]


def test_facts_of_the_environment_become_columns_and_are_shown():
  (t,), _ = episode(Talk(["a"], info={"columns": {"steps": 3}, "x": 1}), lambda text, rng: "y")
  assert t.columns == {"steps": 3}
  assert [m["role"] for m in t.transcript] == ["user", "assistant", "environment"]


def test_the_tool_format_of_an_environment_is_the_chats():
  class Hermes(Talk):
    tool_format = "hermes"

  with pytest.raises(ValueError, match=r"set model.tool_format to 'hermes'"):
    episode(Hermes(["a"]), lambda text, rng: "x")


def test_routing_has_one_row_for_every_processed_token():
  (t,), _ = episode(Talk("ab"), lambda text, rng: "x", experts=(2, 1))
  assert len(t.routing) == len(t.tokens) - 1 and t.routing[0].shape == (2, 1)


class Relay:
  """Agent 0 speaks, then agents 1 and 0 at once, then agent 1, who joined late; each reads what others said."""

  tool_format = None

  def __init__(self):
    self.acted = []

  async def reset(self, seed):
    return {0: Observation((user("start"),))}

  async def step(self, actions):
    self.acted.append(sorted(actions))
    said = user("+".join(actions[a].text for a in sorted(actions)))
    match len(self.acted):
      case 1:
        return Step({1: Observation((said,)), 0: Observation((said,))}, {0: 0.5})
      case 2:
        return Step({1: Observation((said,))})
    return Step(outcome=1.0, status="done", turn_rewards={1: 2.0})

  async def close(self):
    pass


def test_agents_have_a_stream_each_and_act_when_they_observe():
  environment = Relay()
  (a, b), engine = episode(environment, lambda text, rng: str(rng.randrange(10**6)), delay=0.01)
  assert environment.acted == [[0], [0, 1], [1]]
  assert (a.agent, b.agent, a.turns, b.turns, a.outcome, b.outcome) == (0, 1, 2, 2, 1.0, 1.0)
  assert (a.turn_reward, b.turn_reward) == ([0.5, 0.0], [0.0, 2.0])
  assert (a.turn_step, b.turn_step) == ([0, 1], [1, 2])
  r = to_rollouts([a, b], tokens=400, turns=3)
  assert [sorted({*row[row >= 0].tolist()}) for row in r.turn] == [[0, 1], [1, 2]]
  assert r.turn_reward.tolist() == [[0.5, 0, 0], [0, 0, 2]]
  said = [text for action, text in spans(a) if action]
  assert spans(b)[0][1].startswith("<|im_start|>user\n" + said[0].removesuffix("<|im_end|>"))
  assert engine.sessions[0].key != engine.sessions[1].key


def test_padding_may_be_the_end_of_turn():
  base = byte_tokenizer()
  chat = Chat(Tokenizer(base.inner, eos_id=258, pad_id=258))
  (t,), _ = episode(Talk("ab"), lambda text, rng: "x", chat=chat)
  assert [i for i, action in zip(t.tokens, t.action) if action] == [ord("x"), 258, ord("x"), 258]


@pytest.mark.parametrize("limits", [{"max_turns": 0}, {"max_tokens": 1}, {"timeout": 0.0}])
def test_wrong_limits(limits):
  with pytest.raises(ValueError, match=f"Limits.{next(iter(limits))}"):
    Limits(**limits)
