import asyncio
import gc
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import ScriptedEngine

from jaxagent.envs.base import Observation, Step
from jaxagent.envs.calculator import Calculator
from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.collect import collect, collect_async
from jaxagent.rollout.episode import Limits
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling

CHAT = Chat(byte_tokenizer())


def unsure(text, rng):
  """Calls the tool, sometimes wrongly, then gives the result, sometimes wrongly."""
  last = text.rsplit("<|im_start|>", 2)[-2]
  role, _, body = last.partition("\n")
  body = body.removesuffix("<|im_end|>\n")
  wrong = rng.random() < 0.3
  return f"<calc>{body}{'+' * wrong}</calc>" if role == "user" else body + "1" * wrong


class Flaky(Calculator):
  """Every third episode breaks; environments answer after a random while."""

  def environment(self, split, index):
    environment, seed = super().environment(split, index)
    step = environment.step

    async def slow(actions):
      await asyncio.sleep(0.02 * random.random())
      if index % 3 == 2:
        raise ConnectionError("gone")
      return await step(actions)

    environment.step = slow
    return environment, seed


def run(indices, samples=2, *, tasks=None, key=0, delay=0.0, split="train", call=collect, **options):
  engine = ScriptedEngine(CHAT.tokenizer, CHAT.eot, unsure, delay=delay)
  trajectories = call(
    engine, CHAT, tasks or Calculator(), split=split, indices=indices, samples=samples, key=jax.random.key(key),
    sampling=Sampling(max_tokens=40), limits=Limits(max_tokens=300), **options,
  )  # fmt: skip
  return trajectories, engine


def told(trajectories):
  return {(t.task, t.rollout - t.group * 2): (t.tokens, t.logp_rollout, t.status, t.outcome) for t in trajectories}


def test_ids_are_dense_and_in_order():
  trajectories, engine = run([4, 9, 1], samples=2)
  assert [(t.task, t.group, t.rollout) for t in trajectories] == [
    (4, 0, 0), (4, 0, 1), (9, 1, 2), (9, 1, 3), (1, 2, 4), (1, 2, 5),
  ]  # fmt: skip
  assert engine.most == 6 and engine.participants == 0 and all(s.closed for s in engine.sessions)
  assert {t.outcome for t in run(range(8))[0]} == {0.0, 1.0}


def test_samples_of_a_task_and_calls_with_other_keys_differ():
  one, two = run([5], samples=8)[0], run([5], samples=8, key=1)[0]
  assert len({tuple(t.logp_rollout) for t in one + two}) == 16


def test_results_do_not_depend_on_order_company_or_timing():
  quick = told(run([0, 1, 3, 4])[0])
  slow = told(run([4, 0, 3, 1, 7], delay=0.03)[0])
  assert all(slow[k] == quick[k] for k in quick) and len(quick) == 8
  again = told(run([0, 1, 3, 4], tasks=Flaky(), delay=0.03, lockstep=False)[0])
  assert again == quick


def test_a_broken_environment_leaves_the_others_alone():
  healthy, broken = told(run(range(6))[0]), told(run(range(6), tasks=Flaky())[0])
  failed = {k for k, v in broken.items() if v[2] == "failed"}
  assert {task for task, _ in failed} == {2, 5} and len(failed) == 4
  assert all(broken[k] == healthy[k] for k in set(healthy) - failed)


def test_splits_have_their_own_problems():
  a, b = run(range(20), 1)[0], run(range(20), 1, split="eval")[0]
  assert not {t.transcript[0]["content"] for t in a} & {t.transcript[0]["content"] for t in b}


def test_inside_a_running_loop():
  async def notebook():
    awaited, _ = run([1, 2], call=collect_async)
    return await awaited, run([1, 2])[0]

  awaited, blocking = asyncio.run(notebook())
  assert told(awaited) == told(blocking) == told(run([1, 2])[0])


def test_finished_hears_of_every_episode():
  heard = []
  trajectories, _ = run([1, 2], finished=heard.append)
  assert sorted(t.rollout for episode in heard for t in episode) == [t.rollout for t in trajectories]


def test_without_lockstep_nobody_waits_for_anybody():
  assert run([1, 2], lockstep=False)[1].most == 0


class Finite(Calculator):
  def size(self, split):
    return 3


@pytest.mark.parametrize(
  "indices, samples, message",
  [([], 1, "no task indices"), ([1], 0, "samples"), ([1, 2, 1], 1, "1 is listed twice"), ([0, 3], 1, "has 3 tasks")],
)
def test_wrong_arguments(indices, samples, message):
  with pytest.raises(ValueError, match=message):
    run(indices, samples, tasks=Finite())


def test_the_first_error_ends_all_episodes_and_closes_them():
  closed = []

  class Wide:
    tool_format = None

    def __init__(self, index):
      self.index = index

    async def reset(self, seed):
      return {0: Observation(({"role": "user", "content": "x" * (400 if self.index == 2 else 1)},))}

    async def step(self, actions):
      await asyncio.sleep(3600)
      return Step(status="done")

    async def close(self):
      closed.append(self.index)

  class Tasks:
    def size(self, split):
      return None

    def environment(self, split, index):
      return Wide(index), 0

  with pytest.raises(ValueError, match="prompt of task 2"):
    run(range(4), 1, tasks=Tasks())
  assert sorted(closed) == [0, 1, 2, 3]


def test_an_interrupt_inside_an_episode_is_raised_once_and_leaves_no_traceback(caplog):
  class Interrupting(Calculator):
    def environment(self, split, index):
      environment, seed = super().environment(split, index)

      async def step(actions):
        raise KeyboardInterrupt("stop")

      if index == 1:
        environment.step = step
      return environment, seed

  with pytest.raises(KeyboardInterrupt, match="stop"):
    run(range(4), tasks=Interrupting())
  gc.collect()
  assert not caplog.records


class Chatter:
  """Two lines, after a random while: what the model says plays no part."""

  tool_format = None

  def __init__(self, seed):
    self.turns = 0

  async def reset(self, seed):
    return {0: Observation(({"role": "user", "content": str(seed)},))}

  async def step(self, actions):
    self.turns += 1
    await asyncio.sleep(0.01 * random.random())
    if self.turns == 2:
      return Step(outcome=float(len(actions[0].text) % 2), status="done")
    return Step({0: Observation(({"role": "user", "content": "and"},))})

  async def close(self):
    pass


class Chats:
  def size(self, split):
    return None

  def environment(self, split, index):
    return Chatter(index), index


MODELS = {
  "dense": DecoderConfig(259, 32, 1, 2, mlp_width=32, init_scale=0.3),
  "moe": DecoderConfig(259, 32, 1, 2, experts=4, experts_per_token=2, expert_width=16, init_scale=0.3),
}


@pytest.mark.parametrize("model", MODELS)
def test_with_a_model_the_forward_pass_scores_what_was_sampled_and_timing_changes_nothing(model):
  policy = decoder_policy(MODELS[model])
  params = policy.init(jax.random.key(1))
  engine = Engine(policy, params, tokenizer=CHAT.tokenizer, slots=4, capacity=96, steps_per_call=4)

  def sample():
    return collect(
      engine, CHAT, Chats(), split="train", indices=[3, 5, 8], samples=2, sampling=Sampling(0.7, max_tokens=12),
      limits=Limits(max_tokens=96), key=jax.random.key(2),
    )  # fmt: skip

  rows, again = sample(), sample()
  assert [(t.tokens, t.logp_rollout, t.outcome) for t in rows] == [(t.tokens, t.logp_rollout, t.outcome) for t in again]
  r = to_rollouts(rows, tokens=96, turns=2, routing=model == "moe")
  segment = np.where(np.arange(96) < r.length[:, None], 0, -1)
  routing = None if r.routing is None else jnp.asarray(r.routing)
  hidden = jax.jit(policy.forward)(params, r.tokens, r.position, segment, routing=routing)
  logp = jax.nn.log_softmax(policy.head(params, hidden.states) / 0.7)
  scored = np.take_along_axis(np.asarray(logp)[:, :-1], r.tokens[:, 1:, None], 2)[..., 0]
  gap = np.abs(scored - r.logp_rollout[:, 1:])[r.mask[:, 1:]]
  assert r.mask.sum() > 60 and gap.max() < 2e-5
