"""Streams that begin alike share their keys; sessions that wait give up their rows. The log-probs stay exact."""

import asyncio
import random

import jax
import numpy as np
import pytest
from streams import STEPS, VOCABULARY, Letters, built, prompts_of, rescore

from jaxagent.sampling import Engine, Sampling

CAPACITY = 200


def engine_for(name, slots=6, **options):
  """An engine, and the list of (first position, tokens) of every piece of a stream that its prefill calls process."""
  engine = Engine(*built(name), slots=slots, capacity=CAPACITY, steps_per_call=STEPS, tokenizer=Letters(), **options)
  prefilled, plan = [], engine._plan

  def recorded():
    job = plan()
    prefilled.extend((start, size) for _, _, start, size in job.call.work if job.call.prefills)
    return job

  engine._plan = recorded
  return engine, prefilled


def tokens_of(prefilled):
  return sum(size for _, size in prefilled)


def assert_exact(name, prompt, completion, temperature=1.0, params=None, before=()):
  """`completion`, which follows `prompt` and `before`, has the log-probs and the routing of a full forward."""
  start = len(prompt) + len(before)
  stream = [*prompt, *before, *completion.ids.tolist()]
  logp, _, aux = rescore(name, stream, temperature, params, prefix_length=len(prompt))
  np.testing.assert_allclose(completion.logp_rollout, logp[start - 1 :], atol=1e-5 * max(1, 1 / temperature))
  if completion.routing is not None:
    stop = len(stream) - 1
    want = [[[token, at]] for at, token in enumerate(stream[:stop])] if name == "toy" else aux["routing"][:stop]
    np.testing.assert_array_equal(completion.routing, np.asarray(want)[stop - len(completion.routing) :])


@pytest.mark.parametrize("name, length", [("toy", 40), ("dense", 150), ("moe", 40), ("sliding", 20), ("mixed moe", 20)])
def test_the_prompt_of_a_group_is_processed_once(name, length):
  engine, prefilled = engine_for(name)
  prompts = prompts_of(length, length - 1, 5)
  out = engine.generate(prompts, n=6, sampling=Sampling(temperature=2.0, max_tokens=12))
  for prompt, group in zip(prompts, out):
    for completion in group:
      assert_exact(name, prompt, completion, 2.0)
      if completion.routing is not None:
        assert len(completion.routing) == len(prompt) + len(completion.ids) - 1
  assert any(len({tuple(x.ids.tolist()) for x in group}) > 1 for group in out)
  shared = 1 if name in ("toy", "dense", "moe") else 2  # rows that slide cannot be copied once they have gone on
  assert tokens_of(prefilled) <= shared * (2 * length - 3) + 6 * 4


def test_a_common_beginning_is_processed_once_whoever_comes_first():
  engine, prefilled = engine_for("toy", slots=16)
  system, *questions = prompts_of(60, 3, 9, 4, 1, 7)
  prompts = [system + question for question in questions]
  for prompt, group in zip(prompts, engine.generate(prompts, n=2, sampling=Sampling(max_tokens=5))):
    for completion in group:
      assert_exact("toy", prompt, completion)
  # each question once more than its group's leader where it is too short to be worth a copy of its own
  assert tokens_of(prefilled) <= len(system) + 2 * sum(map(len, questions))


def test_ended_streams_are_shared_only_out_of_lockstep_and_never_after_new_weights():
  prompt = prompts_of(50)[0]
  other = jax.tree.map(lambda x: 0.8 * x, built("toy")[1])

  def processed(engine, prefilled, params=None):
    prefilled.clear()
    for completion in engine.generate([prompt], sampling=Sampling(max_tokens=4))[0]:
      assert_exact("toy", prompt, completion, params=params)
    return tokens_of(prefilled)

  assert [processed(*engine) for engine in [engine_for("toy")] * 2] == [49, 49]
  free = engine_for("toy", lockstep=False)
  assert [processed(*free) for _ in range(2)] == [49, 0]
  for way in ("recompute", "keep"):
    free[0].load(other, on_load=way)
    assert processed(*free, params=other) == 49
    assert processed(*free, params=other) == 0
    free[0].load(built("toy")[1], on_load=way)
    assert processed(*free) == 49


def test_keys_that_live_through_a_load_are_nobody_elses():
  async def run():
    engine, prefilled = engine_for("toy", lockstep=False)
    prompt = prompts_of(50)[0]
    first = engine.open(prompt)
    await first.sample(Sampling(max_tokens=3))
    engine.load(jax.tree.map(lambda x: 0.8 * x, built("toy")[1]), on_load="keep")
    await first.sample(Sampling(max_tokens=3))
    prefilled.clear()
    completion = await engine.open(prompt).sample(Sampling(max_tokens=3))
    assert tokens_of(prefilled) == 49
    assert_exact("toy", prompt, completion, params=jax.tree.map(lambda x: 0.8 * x, built("toy")[1]))

  asyncio.run(run())


@pytest.mark.parametrize("name, offload, again", [
  ("toy", None, False), ("toy", 1, True), ("toy", 0, True), ("sliding", None, False), ("mixed moe", 2, True),
])  # fmt: skip
def test_sessions_that_wait_give_up_their_rows_and_go_on_as_if_they_had_not(name, offload, again):
  """Six sessions of three turns in two rows; what is offloaded is never processed again."""
  engine, prefilled = engine_for(name, slots=2, **({} if offload is None else {"offload": offload}))
  if offload is None:
    engine._offload = 6
  prompts = prompts_of(*[18] * 6)

  async def run():
    sessions = [engine.open(prompt, index=i) for i, prompt in enumerate(prompts)]
    streams = [[] for _ in prompts]
    for _ in range(3):
      for prompt, session, stream in zip(prompts, sessions, streams):
        completion = await session.sample(Sampling(temperature=0.7, max_tokens=7))
        assert_exact(name, prompt, completion, 0.7, before=stream)
        session.append([1, 2, 3])
        stream += [*completion.ids.tolist(), 1, 2, 3]

  asyncio.run(run())
  once = 6 * (17 + 2 * 3)  # each prompt and what was appended, all but the last token
  assert (tokens_of(prefilled) > 1.5 * once) == again
  assert again or tokens_of(prefilled) == once


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["toy", pytest.param("sliding", marks=pytest.mark.slow)])
def test_any_mixture_of_sessions_stays_exact(name, seed):
  """Common beginnings, stop strings, cancelled and timed-out turns, closing, new weights, more sessions than rows."""
  rng = random.Random(seed)
  roots = prompts_of(18, 18, seed=seed)
  params = [built(name)[1], jax.tree.map(lambda x: 0.8 * x, built(name)[1])]
  engine, _ = engine_for(name, slots=3, lockstep=False, offload=2)
  turns = 0

  async def session(i):
    nonlocal turns
    root = rng.choice(roots)
    cut = rng.choice([0, 0, 1, 5])
    prompt = root[: len(root) - cut] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, cut))] or [1]
    stream, before, end = engine.open(prompt), [], rng.choice(["close", "leave"])
    for _ in range(rng.randint(1, 4)):
      stop = rng.choice([(), ("a",), ("de", "j")])
      rules = Sampling(temperature=rng.choice([0.7, 1.0]), max_tokens=rng.randint(1, 12), stop=stop)
      action = rng.choice(["sample"] * 4 + ["cancel", "stream"])
      version = engine.version
      if action == "cancel":
        task = asyncio.ensure_future(stream.sample(rules))
        await asyncio.sleep(rng.random() * 0.02)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        before += [] if isinstance(result, asyncio.CancelledError) else result.ids.tolist()
        assert stream.tokens == prompt + before
        continue
      if action == "stream":
        pieces = [piece async for piece in stream.stream(rules)]
        completion = stream.completion
        np.testing.assert_array_equal(np.concatenate([p.ids for p in pieces]), completion.ids)
        np.testing.assert_array_equal(np.concatenate([p.logp_rollout for p in pieces]), completion.logp_rollout)
      else:
        completion = await stream.sample(rules)
      if (completion.version == version).all() and engine.version == version:
        assert_exact(name, prompt, completion, rules.temperature, params[version % 2], before)
        turns += 1
      extra = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
      stream.append(extra)
      before += completion.ids.tolist() + extra
    if end == "close":
      stream.close()

  async def run():
    for wave in range(4):
      await asyncio.wait_for(asyncio.gather(*(session(i) for i in range(10))), 120)
      engine.load(params[(wave + 1) % 2])

  asyncio.run(run())
  assert turns > 40


def test_a_stream_ends_with_the_completion_and_leaving_it_takes_the_turn_back():
  async def run():
    engine, _ = engine_for("toy", slots=1)
    session = engine.open([1, 2, 3])
    pieces = [piece async for piece in session.stream(Sampling(max_tokens=12))]
    assert [len(piece.ids) for piece in pieces] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate([piece.ids for piece in pieces]), session.completion.ids)
    before = list(session.tokens)
    turn = session.stream(Sampling(max_tokens=30))
    async for _ in turn:
      break
    await turn.aclose()
    assert session.tokens == before
    assert len((await session.sample(Sampling(max_tokens=3))).ids) == 3
    with pytest.raises(ValueError, match="fill the engine's capacity"):
      session.append([1] * session.room)
      async for _ in session.stream():
        pass

  asyncio.run(run())


def test_a_request_that_runs_out_of_time_is_taken_back():
  async def run():
    engine, _ = engine_for("toy", slots=1)
    session = engine.open([1, 2, 3])
    with pytest.raises(TimeoutError):
      await session.sample(Sampling(max_tokens=100), timeout=0.0)
    assert session.tokens == [1, 2, 3]
    assert len((await session.sample(Sampling(max_tokens=4), timeout=60)).ids) == 4

  asyncio.run(run())
