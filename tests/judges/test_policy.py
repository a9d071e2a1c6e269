"""The policy as its own judge: told its words by a scripted engine, and a tiny one over our own endpoint."""

import asyncio
import json

import jax
import numpy as np
import pytest
from scripted import ScriptedEngine

from jaxagent.judges import Endpoint, JudgeError, Panel, PolicyJudge, Question
from jaxagent.judges.replies import read_object
from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.sampling.engine import Engine

CHAT = Chat(byte_tokenizer())
QUESTION = Question("test", ({"role": "user", "content": "how many?"},))


class Scripted(ScriptedEngine):
  version = 0

  def open(self, ids, *, key, index=0):
    return Kept(super().open(ids, key=key, index=index))


class Kept:
  def __init__(self, session):
    self.session = session

  async def sample(self, sampling, *, timeout=None):
    async with asyncio.timeout(timeout):
      return await self.session.sample(sampling)

  def append(self, ids):
    self.session.append(ids)

  def close(self):
    self.session.close()


def engine(write, **named):
  return Scripted(CHAT.tokenizer, CHAT.eot, write, **named)


def poll(judge, votes=1):
  panel = Panel(judge, votes=votes)

  async def run():
    async with panel:
      return await panel.poll(QUESTION, lambda text: read_object(text, "n")["n"])

  return asyncio.run(run()), panel


def test_votes_have_keys_of_their_own_and_come_again():
  made = engine(lambda text, rng: json.dumps({"n": rng.randint(0, 99)}))
  first, panel = poll(PolicyJudge(CHAT, made, max_tokens=50, seed=3), votes=3)
  assert len(set(first)) == 3 and panel.metrics()["judge/tokens"] > 0
  assert poll(PolicyJudge(CHAT, made, max_tokens=50, seed=3), votes=3)[0] == first
  assert poll(PolicyJudge(CHAT, made, max_tokens=50, seed=4), votes=3)[0] != first
  assert "how many?" in CHAT.tokenizer.decode(made.sessions[0].stream) and all(s.closed for s in made.sessions)
  assert {a.temperature for s in made.sessions for a in s.asked} == {0.1}


def test_a_question_that_is_too_long_a_reply_that_is_cut_and_one_that_does_not_come():
  with pytest.raises(JudgeError, match=r"tokens, the engine holds 20; raise judge\.context"):
    asyncio.run(PolicyJudge(CHAT, engine(lambda text, rng: "x", capacity=20)).reply(QUESTION, 0))
  verdict, panel = poll(PolicyJudge(CHAT, engine(lambda text, rng: '{"n": 1}'), max_tokens=4))
  assert verdict is None and panel.metrics()["judge/unparsed"] == 1
  slow = engine(lambda text, rng: "x", delay=1000)
  with pytest.raises(JudgeError, match="no answer within"):
    asyncio.run(PolicyJudge(CHAT, slow, timeout=0.01).reply(QUESTION, 0))
  assert all(s.closed for s in slow.sessions)


@pytest.fixture(scope="module")
def tiny():
  policy = decoder_policy(DecoderConfig(vocab_size=259, width=16, layers=1, heads=2, mlp_width=16, init_scale=0.5))
  return Engine(policy, jax.jit(policy.init)(jax.random.key(0)), tokenizer=CHAT.tokenizer, slots=4, capacity=128)


def test_a_real_engine_answers_the_same_whatever_else_it_does(tiny):
  judge = PolicyJudge(CHAT, tiny, temperature=1.0, max_tokens=6)

  async def run(*others):
    asked = [judge.reply(QUESTION, 0), *(judge.reply(QUESTION, vote) for vote in others)]
    return [reply.text for reply in await asyncio.gather(*asked)]

  (alone,) = asyncio.run(run())
  together = asyncio.run(run(1, 2, 3, 4, 5))
  assert together[0] == alone and len(set(together)) > 1
  np.testing.assert_equal(asyncio.run(run(1, 2, 3, 4, 5)), together)


@pytest.mark.slow
def test_our_own_endpoint_judges(tiny):
  pytest.importorskip("uvicorn")
  import sys
  from pathlib import Path

  sys.path.append(str(Path(__file__).parents[1] / "serve"))
  from running import Live

  from jaxagent.serve.app import Served

  policy, params = tiny.policy, jax.jit(tiny.policy.init)(jax.random.key(0))
  served = Engine(policy, params, tokenizer=CHAT.tokenizer, slots=4, capacity=128, max_pending=16, lockstep=False)
  with Live(Served(served, CHAT, "tiny")) as live:
    judge = Endpoint(f"{live.url}", "tiny", temperature=1.0, max_tokens=6, votes=2, timeout=60.0)

    async def run():
      async with judge:
        return await asyncio.gather(*(judge.reply(QUESTION, vote) for vote in (0, 1, 0)))

    first, second, again = asyncio.run(run())
    assert first == again and first.text != second.text and first.tokens > 6
    wrong = Endpoint(f"{live.url}", "other", max_tokens=6, timeout=60.0)
    with pytest.raises(JudgeError, match="404"):
      asyncio.run(wrong.reply(QUESTION, 0))
