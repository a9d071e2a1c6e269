"""The policy as its own judge."""

import dataclasses

import jax

from jaxagent.judges.base import JudgeError, Question, Reply, digest
from jaxagent.models.chat import Chat
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyJudge:
  """Asks the engine, under the weights that it holds. With several votes `temperature` must be above 0 to tell apart.

  The key of an answer is folded from `seed`, the question and the vote, so that it does not depend on what else is
  asked. Answers are not kept on disk: they belong to the weights, and come again under the same ones.
  """

  chat: Chat
  engine: Engine
  temperature: float = 0.1
  max_tokens: int = 2048
  timeout: float | None = None
  seed: int = 0

  def request(self, question: Question, vote: int) -> dict:
    return {"messages": list(question.messages), "vote": vote, "version": self.engine.version}

  async def reply(self, question: Question, vote: int) -> Reply:
    name = digest({"messages": list(question.messages), "vote": vote})
    ids = self.chat.render(question.messages)
    room = self.engine.capacity - len(ids)
    if room < 1:
      raise JudgeError(
        f"the question has {len(ids)} tokens, the engine holds {self.engine.capacity}; raise judge.context"
      )
    rules = Sampling(self.temperature, max_tokens=min(self.max_tokens, room), stop_ids=(self.chat.eot,))
    session = self.engine.open(ids, key=self._key(name))
    try:
      completion = await session.sample(rules, timeout=self.timeout)
    except TimeoutError:
      raise JudgeError(f"no answer within {self.timeout:g} s") from None
    finally:
      session.close()
    words = completion.ids[:-1] if completion.finish == "stop" else completion.ids
    return Reply(self.chat.tokenizer.decode(words), len(ids) + len(completion.ids))

  def _key(self, name: str) -> jax.Array:
    key = jax.random.key(self.seed)
    for i in range(0, 16, 8):
      key = jax.random.fold_in(key, int(name[i : i + 8], 16))
    return key
