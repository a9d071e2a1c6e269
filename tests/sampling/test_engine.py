import asyncio
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streams import VOCABULARY, Letters, built, prompts_of, rescore, toy_policy

from jaxagent.sampling import Engine, Sampling
from jaxagent.types import Trajectory


@functools.cache
def engine_of(name, slots=3, steps=5):
  """Shared: compiling is what these tests take time for."""
  capacity = 48 if name == "toy" else 200
  return Engine(*built(name), slots=slots, capacity=capacity, steps_per_call=steps, tokenizer=Letters())


def fresh_engine(params=None, **options):
  """A new toy engine with the compiled programs of the shared one."""
  policy, default = built("toy")
  engine = Engine(policy, default if params is None else params, slots=3, capacity=48, steps_per_call=5, **options)
  for program in ("_prefill", "_decode", "_copy", "_read", "_write"):
    setattr(engine, program, getattr(engine_of("toy"), program))
  return engine


def flat(out):
  return [completion.ids.tolist() for group in out for completion in group]


def assert_same(a, b):
  for x, y in zip(a, b, strict=True):
    for field in ("ids", "logp_rollout", "logp_sampled", "entropy", "version", "routing"):
      np.testing.assert_array_equal(getattr(x, field), getattr(y, field), err_msg=field)
    assert x.finish == y.finish


# exactness


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_log_probs_equal_a_full_forward(name):
  engine = engine_of(name)
  prompts = prompts_of(1, 2, 15, 16, 17, 18, 40, 129, 150, 3)
  temperatures = [1.0, 0.3, 2.0, 0.7, 0.0, 1.0, 1.5, 1.0, 0.5, 1.0]
  rules = [Sampling(temperature=t, max_tokens=12 + i, top_k=3 * (i % 2)) for i, t in enumerate(temperatures)]
  for _ in range(2):  # the second time every row holds what earlier sequences left
    out = engine.generate(prompts, n=2, sampling=rules)
    for prompt, group, rule in zip(prompts, out, rules):
      for completion in group:
        logp, _, _ = rescore(name, prompt + completion.ids.tolist(), rule.temperature)
        scale = max(1.0, 1 / rule.temperature) if rule.temperature else 1.0
        np.testing.assert_allclose(completion.logp_rollout, logp[len(prompt) - 1 :], atol=1e-5 * scale)
        assert len(completion.ids) == rule.max_tokens and completion.finish == "length"
        assert (completion.logp_sampled >= completion.logp_rollout).all()
        assert completion.ids.dtype == np.int32 and completion.logp_rollout.dtype == np.float32


@pytest.mark.parametrize("name", ["toy", "dense", "moe"])
def test_later_turns_are_exact_and_routing_has_one_row_for_each_processed_token(name):
  engine = engine_of(name)

  async def episode(i):
    record = Trajectory(0, 0, i)
    prompt, *more = prompts_of(7 + i, 1, 17, seed=i)
    record.append_context(prompt)
    async with engine.participant():
      session = engine.open(prompt, index=i)
      for ids in (*more, []):
        record.append_action(await session.sample(Sampling(max_tokens=6, stop_ids=(1,))))
        if ids:
          record.append_context(ids)
          session.append(ids)
      assert session.tokens == record.tokens
    return record

  async def everyone():
    return await asyncio.gather(*map(episode, range(5)))

  for record in asyncio.run(everyone()):
    logp, _, aux = rescore(name, record.tokens)
    action = np.array(record.action)[1:]
    np.testing.assert_allclose(np.array(record.logp_rollout)[1:][action], logp[action], atol=1e-5)
    if name == "dense":
      assert record.routing == []
      continue
    routing = np.stack(record.routing)
    assert routing.dtype == (np.int8 if name == "moe" else np.int16) and len(routing) == len(record.tokens) - 1
    if name == "toy":
      np.testing.assert_array_equal(routing[:, 0, 0], record.tokens[:-1])
      np.testing.assert_array_equal(routing[:, 0, 1], np.arange(len(routing)))
    else:
      np.testing.assert_array_equal(np.sort(routing, -1), np.sort(aux["routing"][:-1], -1))


@pytest.mark.parametrize("name", ["toy", "dense"])
def test_greedy_equals_an_argmax_loop(name):
  prompts = prompts_of(5, 19)
  out = engine_of(name).generate(prompts, sampling=Sampling(temperature=0.0, max_tokens=15))
  for prompt, (completion,) in zip(prompts, out):
    tokens = list(prompt)
    for _ in range(15):
      tokens.append(int(rescore(name, tokens)[1][-1]))
    assert tokens == prompt + completion.ids.tolist()
    assert (completion.logp_sampled == 0).all() and (completion.logp_rollout < 0).all()


def test_frequencies_of_the_engine_equal_the_softmax():
  prompt, count = [3, 1, 4], 2000
  out = engine_of("toy", slots=16).generate([prompt], n=count, sampling=Sampling(temperature=2.0, max_tokens=1))
  seen = np.bincount([completion.ids[0] for completion in out[0]], minlength=VOCABULARY)
  expected = count * np.exp([rescore("toy", [*prompt, token], 2.0)[0][-1] for token in range(VOCABULARY)])
  assert (expected >= 5).all()
  assert ((seen - expected) ** 2 / expected).sum() < 39.25  # 16 degrees of freedom, 1 in 1000


# randomness


def test_tokens_do_not_depend_on_slots_order_or_steps():
  prompts = prompts_of(4, 30, 1, 17, 9)
  rules = [Sampling(max_tokens=size, stop_ids=(2,)) for size in (9, 20, 3, 12, 16)]
  key = jax.random.key(5)
  expected = engine_of("toy").generate(prompts, n=2, sampling=rules, key=key)
  for engine in (engine_of("toy", slots=1, steps=1), engine_of("toy", slots=16), fresh_engine(seed=9)):
    assert flat(engine.generate(prompts, n=2, sampling=rules, key=key)) == flat(expected)

  async def one(i, sample):
    with engine_of("toy").open(prompts[i], key=jax.random.fold_in(jax.random.fold_in(key, i), sample)) as session:
      return await session.sample(rules[i])

  async def reversed_order():
    return await asyncio.gather(*(one(i, j) for i in reversed(range(5)) for j in (1, 0)))

  assert [x.ids.tolist() for x in asyncio.run(reversed_order())] == flat(expected)[::-1]


def test_samples_and_calls_differ_and_a_seed_repeats_them():
  runs = []
  for seed in (0, 0, 1):
    engine = fresh_engine(seed=seed)
    runs.append([flat(engine.generate([[1], [1]], n=3, sampling=Sampling(max_tokens=20))) for _ in range(2)])
  assert runs[0] == runs[1]
  everything = [tuple(ids) for run in (runs[0], runs[2]) for call in run for ids in call]
  assert len(set(everything)) == len(everything)


def test_sessions_differ_by_default_and_by_index_under_one_key():
  async def first_turns():
    engine = fresh_engine()
    key = jax.random.key(0)
    ways = [{}, {}, {"index": 0}, {"index": 0}, {"index": 1}, {"key": key}, *({"key": key, "index": i} for i in (0, 1))]
    turns = []
    for way in ways:
      with engine.open([1, 2], **way) as session:
        turns.append(tuple((await session.sample(Sampling(max_tokens=20))).ids.tolist()))
    return turns

  turns = asyncio.run(first_turns())
  assert len(set(turns)) == len(turns)
  assert asyncio.run(first_turns()) == turns


def test_raw_keys_are_taken_too():
  engine, rules = engine_of("toy"), Sampling(max_tokens=5)
  typed, raw = (engine.generate([[1]], sampling=rules, key=make(3)) for make in (jax.random.key, jax.random.PRNGKey))
  assert flat(typed) == flat(raw)


# how turns end


@pytest.mark.parametrize("slots, steps", [(1, 1), (3, 5)])
def test_stop_strings_end_the_turn_on_the_token_that_completes_them(slots, steps):
  engine, key = engine_of("toy", slots, steps), jax.random.key(1)
  free = engine.generate([[1, 2]], sampling=Sampling(max_tokens=30), key=key)[0][0]
  text = Letters().decode(free.ids)
  stop = text[7:10]
  end = text.index(stop) + 3
  out = engine.generate([[1, 2]], sampling=Sampling(max_tokens=30, stop=("!", stop)), key=key)[0][0]
  assert out.ids.tolist() == free.ids[:end].tolist() and out.finish == "stop"
  np.testing.assert_array_equal(out.logp_rollout, free.logp_rollout[:end])
  assert len(out.entropy) == len(out.version) == len(out.logp_sampled) == end
  np.testing.assert_array_equal(out.routing[:, 0, 0], [1, 2, *out.ids[:-1]])


def test_a_turn_after_a_stop_string_is_exact_although_tokens_beyond_it_were_processed():
  async def turns():
    record, lengths = Trajectory(0, 0, 0), []
    record.append_context([1, 2])
    with engine_of("toy").open([1, 2], key=jax.random.key(1)) as session:
      while session.room > 20:
        turn = await session.sample(Sampling(max_tokens=15, stop=tuple("abcdefgh")))
        record.append_action(turn)
        record.append_context([5, 6, 7])
        session.append([5, 6, 7])
        lengths.append(len(turn.ids) if turn.finish == "stop" else 0)
      record.append_action(await session.sample(Sampling(max_tokens=15)))
    return record, lengths

  record, lengths = asyncio.run(turns())
  assert sum(length % 5 != 0 for length in lengths) >= 2  # ended within a call of 5 steps
  logp, _, _ = rescore("toy", record.tokens)
  action = np.array(record.action)[1:]
  np.testing.assert_allclose(np.array(record.logp_rollout)[1:][action], logp[action], atol=1e-5)
  np.testing.assert_array_equal(np.stack(record.routing)[:, 0, 0], record.tokens[:-1])


def test_exactly_one_stop_id_ends_a_turn_and_belongs_to_it():
  stop_ids = (0, 3, 11)
  out = engine_of("toy").generate([[1, 0, 3]], n=20, sampling=Sampling(max_tokens=40, stop_ids=stop_ids))[0]
  assert {completion.finish for completion in out} == {"stop"}
  for completion in out:
    assert completion.ids[-1] in stop_ids and not set(completion.ids[:-1].tolist()) & set(stop_ids)
    logp, _, _ = rescore("toy", [1, 0, 3, *completion.ids.tolist()])
    np.testing.assert_allclose(completion.logp_rollout, logp[2:], atol=1e-5)


@pytest.mark.parametrize(
  "length, limit, sampled, finish",
  [(40, 100, 8, "capacity"), (40, 8, 8, "length"), (40, 7, 7, "length"), (47, 1, 1, "length"), (47, 2, 1, "capacity")],
)
def test_limits(length, limit, sampled, finish):
  (prompt,) = prompts_of(length)
  ((out,),) = engine_of("toy").generate([prompt], sampling=Sampling(max_tokens=limit))
  assert (len(out.ids), out.finish, len(out.routing)) == (sampled, finish, length + sampled - 1)
  np.testing.assert_allclose(out.logp_rollout, rescore("toy", prompt + out.ids.tolist())[0][length - 1 :], atol=1e-5)


# compiles


def test_a_mixed_workload_compiles_few_programs_and_then_none():
  engine = Engine(*built("toy"), slots=16, capacity=300, tokenizer=Letters())
  rng = random.Random(0)

  def mixed(lengths):
    prompts = prompts_of(*lengths)
    rules = [
      Sampling(
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_k=rng.choice([0, 2]),
        top_p=rng.choice([0.5, 1.0]),
        min_p=rng.choice([0, 0.1]),
        max_tokens=rng.randint(1, 9),
        stop_ids=tuple(rng.sample(range(VOCABULARY), rng.randint(0, 8))),
        stop=rng.choice([(), ("ab",)]),
        logit_bias=rng.choice([(), ((3, 2.5),)]),
        allowed=rng.choice([None, tuple(range(2, 9))]),
      )
      for _ in prompts
    ]
    engine.generate(prompts, n=2, sampling=rules)

  for lengths in (range(1, 201), [1], [40], range(16, 26)):
    mixed(lengths)
  compiles = engine.compiles
  assert compiles <= 6
  mixed([5, 290, 150, 33])
  mixed([rng.randint(1, 250) for _ in range(40)])
  engine.load(built("toy")[1])
  mixed([10, 100])
  assert engine.compiles == compiles


# the asynchronous front


def play(engine, delays):
  """Six participants of two or three turns that wait at random between them; completions by participant."""

  async def participant(i, barrier):
    rng = random.Random(delays * 100 + i)
    async with engine.participant():
      await barrier.wait()
      turns = []
      await asyncio.sleep(rng.uniform(0, 0.02))
      session = engine.open(prompts_of(3 + 2 * i, seed=i)[0], key=jax.random.fold_in(jax.random.key(0), i))
      for turn in range(2 + i % 2):
        turns.append(await session.sample(Sampling(max_tokens=4 + i, stop_ids=(3,), temperature=0.7)))
        await asyncio.sleep(rng.uniform(0, 0.02))
        session.append([i, turn])
      return turns

  async def everyone():
    barrier = asyncio.Barrier(6)
    return await asyncio.wait_for(asyncio.gather(*(participant(i, barrier) for i in range(6))), 60)

  return [completion for turns in asyncio.run(everyone()) for completion in turns]


@pytest.mark.parametrize("name, slots", [("toy", 3), ("toy", 16), ("moe", 3)])
def test_lockstep_is_deterministic_bit_for_bit(name, slots, monkeypatch):
  engine = engine_of(name, slots)
  calls, plan = [], engine._plan

  def recorded():
    call = plan()
    calls.append([(at, start, size, tuple(turn.session.tokens)) for at, turn, start, size in call.call.work])
    return call

  monkeypatch.setattr(engine, "_plan", recorded)
  first, planned = play(engine, 0), calls.copy()
  for delays in (1, 2):
    calls.clear()
    assert_same(play(engine, delays), first)
    assert calls == planned


def test_without_lockstep_the_tokens_are_the_same():
  first = [x.ids.tolist() for x in play(engine_of("toy"), 0)]
  assert [x.ids.tolist() for x in play(fresh_engine(lockstep=False), 1)] == first


def test_lockstep_waits_for_the_participant_between_turns():
  engine, started = engine_of("toy"), []

  async def fast():
    async with engine.participant():
      with engine.open([1]) as session:
        await session.sample(Sampling(max_tokens=3))
        started.append("fast")

  async def slow():
    async with engine.participant():
      await asyncio.sleep(0.1)
      started.append("slow")
      with engine.open([2]) as session:
        await session.sample(Sampling(max_tokens=3))

  async def both():
    await asyncio.gather(fast(), slow())

  asyncio.run(both())
  assert started == ["slow", "fast"]


def test_more_sessions_than_rows_in_one_task_do_not_deadlock():
  engine = engine_of("toy", slots=1, steps=1)

  async def alternate():
    sessions = [engine.open(prompt, key=jax.random.key(i)) for i, prompt in enumerate(prompts_of(5, 8, 3))]
    turns = [await session.sample(Sampling(max_tokens=6)) for _ in range(3) for session in sessions]
    streams = [session.tokens for session in sessions]
    for session in sessions:
      session.close()
    return turns, streams

  turns, streams = asyncio.run(asyncio.wait_for(alternate(), 60))
  for i, tokens in enumerate(streams):
    mine = np.concatenate([turn.logp_rollout for turn in turns[i::3]])
    np.testing.assert_allclose(mine, rescore("toy", tokens)[0][-18:], atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([t.routing for t in turns[i::3]])[:, 0, 0], tokens[:-1])


def test_cancelling_frees_the_row_and_the_session_goes_on():
  engine = engine_of("toy", slots=1, steps=1)

  async def cancel():
    session, other = (engine.open([1, 2, 3], key=jax.random.key(4)) for _ in range(2))
    long = asyncio.create_task(session.sample(Sampling(max_tokens=40)))
    while len(session.tokens) < 6:
      await asyncio.sleep(0)
    waiting = asyncio.create_task(other.sample(Sampling(max_tokens=5)))
    await asyncio.sleep(0)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
      await long
    assert session.tokens == [1, 2, 3]
    result = await waiting
    other.close()
    again = await session.sample(Sampling(max_tokens=5))
    session.close()
    return result, again

  result, again = asyncio.run(asyncio.wait_for(cancel(), 60))
  assert_same([result], [again])
  assert len(again.routing) == 7 and engine.step() is False


def test_a_timeout_cancels_one_request_and_harms_no_neighbour():
  async def run():
    sessions = [engine_of("toy").open([1, 2], key=jax.random.key(i)) for i in range(2)]
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0):
        await sessions[0].sample()
    out = await sessions[1].sample(Sampling(max_tokens=9))
    for session in sessions:
      session.close()
    return out

  out = asyncio.run(run())
  np.testing.assert_allclose(out.logp_rollout, rescore("toy", [1, 2, *out.ids.tolist()])[0][1:], atol=1e-5)


def test_closing_ends_a_turn_in_flight_with_an_error():
  async def run():
    session = engine_of("toy").open([1])
    turn = asyncio.create_task(session.sample())
    await asyncio.sleep(0)
    session.close()
    session.close()
    with pytest.raises(ValueError, match="closed while it sampled"):
      await turn
    with pytest.raises(ValueError, match="closed session"):
      await session.sample()
    with pytest.raises(ValueError, match="closed session"):
      session.append([1])

  asyncio.run(run())


def test_a_participant_that_raises_leaves_its_row_and_the_others_go_on():
  engine = engine_of("toy", slots=1, steps=1)

  async def failing():
    async with engine.participant():
      session = engine.open([1])
      await session.sample(Sampling(max_tokens=2))
      raise ZeroDivisionError

  async def working():
    async with engine.participant():
      return await engine.open([2]).sample(Sampling(max_tokens=4))

  async def both():
    return await asyncio.wait_for(asyncio.gather(failing(), working(), return_exceptions=True), 60)

  failed, out = asyncio.run(both())
  assert isinstance(failed, ZeroDivisionError) and len(out.ids) == 4


def test_generate_works_while_a_loop_runs():
  async def notebook():
    return engine_of("toy").generate([[1]], sampling=Sampling(max_tokens=3))

  assert len(asyncio.run(notebook())[0][0].ids) == 3


# weights


def test_load_recomputes_live_sessions_and_every_token_keeps_its_version():
  policy, old = built("toy")
  new = policy.init(jax.random.key(8))
  engine = fresh_engine(version=4)

  async def run():
    session = engine.open([1, 2, 3])
    record = Trajectory(0, 0, 0)
    record.append_context([1, 2, 3])
    turn = asyncio.create_task(session.sample(Sampling(max_tokens=20)))
    while len(session.tokens) < 6:
      await asyncio.sleep(0)
    engine.load(new, version=9)
    record.append_action(await turn)
    session.append([4])
    record.append_context([4])
    record.append_action(await session.sample(Sampling(max_tokens=5)))
    return record

  record = asyncio.run(run())
  version, action = np.array(record.version), np.array(record.action)
  assert set(version[action]) == {4, 9} and (np.diff(version[action]) >= 0).all()
  for params, number in ((old, 4), (new, 9)):
    logp, _, _ = rescore("toy", record.tokens, params=params)
    mine = (version == number)[1:]
    np.testing.assert_allclose(np.array(record.logp_rollout)[1:][mine], logp[mine], atol=1e-5)
  np.testing.assert_array_equal(np.stack(record.routing)[:, 0, 0], record.tokens[:-1])


def test_load_can_keep_the_keys():
  policy, old = built("toy")
  engine = fresh_engine()

  async def second_turn(on_load):
    engine.load(old)
    with engine.open([1, 2, 3], key=jax.random.key(0)) as session:
      await session.sample(Sampling(max_tokens=6))
      engine.load(policy.init(jax.random.key(8)), on_load=on_load)
      await session.sample(Sampling(max_tokens=1))
      return session._processed, await session.sample(Sampling(max_tokens=3))

  (kept, a), (recomputed, b) = (asyncio.run(second_turn(way)) for way in ("keep", "recompute"))
  assert kept == recomputed == 9
  assert not np.allclose(a.logp_rollout, b.logp_rollout, atol=1e-4)


@pytest.mark.parametrize("change", ["shape", "dtype", "tree"])
def test_load_refuses_other_parameters(change):
  params = dict(built("toy")[1])
  head = params.pop("head")
  if change != "tree":
    params["head"] = head[:, :-1] if change == "shape" else head.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match="tree, shapes and dtypes"):
    fresh_engine().load(params)
  with pytest.raises(ValueError, match="on_load"):
    fresh_engine().load(built("toy")[1], on_load="drop")


@pytest.mark.parametrize("name", ["toy", pytest.param("dense", marks=pytest.mark.slow)])
def test_eight_devices_give_the_tokens_of_one(name):
  policy, params = built(name)
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  prompts, rules, key = prompts_of(3, 25, 11), Sampling(max_tokens=10), jax.random.key(0)
  expected = engine_of(name, slots=16).generate(prompts, n=4, sampling=rules, key=key)
  engine = Engine(policy, params, slots=16, capacity=48, mesh=mesh)
  out = engine.generate(prompts, n=4, sampling=rules, key=key)
  assert flat(out) == flat(expected)
  for a, b in zip(out, expected):
    np.testing.assert_allclose(a[0].logp_rollout, b[0].logp_rollout, atol=1e-5)
  compiles = engine.compiles
  engine.load(jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())))
  assert flat(engine.generate(prompts, n=4, sampling=rules, key=key)) == flat(expected)
  assert engine.compiles == compiles


# bad input


ROOM = list(range(16)) * 3
ERRORS = [
  (lambda e: e.generate([[]]), "prompt 0 is empty"),
  (lambda e: e.generate([[1], ROOM]), "prompt 1 has 48 tokens.*capacity of 48"),
  (lambda e: e.generate([[VOCABULARY]]), r"17 is outside the model's vocabulary \[0, 17\)"),
  (lambda e: e.generate([[-1]]), "-1 is outside"),
  (lambda e: e.generate([[0.5]]), "integer token ids"),
  (lambda e: e.generate([[[1]]]), "flat sequence"),
  (lambda e: e.generate([[1]], n=0), "n >= 1"),
  (lambda e: e.generate([[1]], sampling=[Sampling()] * 2), "1 prompts and 2 samplings"),
  (lambda e: e.generate([[1]], sampling=Sampling(stop_ids=(VOCABULARY,))), "stop_ids.*outside"),
  (lambda e: e.generate([[1]], sampling=Sampling(stop_ids=tuple(range(9)))), "at most 8 stop_ids"),
  (lambda e: e.generate([[1]], sampling=Sampling(stop=("a",))), "need a tokenizer"),
  (lambda e: e.generate([[1]], sampling=Sampling(logit_bias=((VOCABULARY, 1.0),))), "logit_bias.*outside"),
  (lambda e: e.generate([[1]], sampling=Sampling(logit_bias=((1, 1.0), (1, 2.0)))), "logit_bias lists an id twice"),
  (lambda e: e.generate([[1]], sampling=Sampling(allowed=(-1,))), "allowed.*outside"),
  (lambda e: Sampling(allowed=()), "allowed must be None or at least one id"),
  (lambda e: Sampling(logit_bias=((1, float("nan")),)), "logit_bias must be pairs"),
  (lambda e: e.open([]), "prompt is empty"),
  (lambda e: e.open([1]).append([99]), "outside"),
  (lambda e: e.open([1]).append(ROOM), "exceed the engine's capacity.*Session.room"),
  (lambda e: Engine(*built("toy"), slots=0), "slots must be at least 1"),
  (lambda e: Engine(*built("toy"), capacity=1), "capacity must be at least 2"),
]


@pytest.mark.parametrize("call, message", ERRORS, ids=[message for _, message in ERRORS])
def test_errors_at_submission(call, message):
  engine = fresh_engine()
  with pytest.raises(ValueError, match=message):
    call(engine)
  assert engine.step() is False  # nothing was left in flight


def test_errors_of_sessions():
  engine = fresh_engine(max_pending=2)

  async def run():
    full = engine.open(ROOM[:47])
    await full.sample(Sampling(max_tokens=1))
    with pytest.raises(ValueError, match="nothing can be sampled"):
      await full.sample()
    one, two, three = (engine.open([1]) for _ in range(3))
    turns = [asyncio.create_task(s.sample(Sampling(max_tokens=4))) for s in (one, two)]
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="while it samples"):
      await one.sample()
    with pytest.raises(ValueError, match="while it samples"):
      one.append([1])
    with pytest.raises(RuntimeError, match="max_pending"):
      await three.sample()
    assert [len((await turn).ids) for turn in turns] == [4, 4]
    for session in (full, one, two, three):
      session.close()

  asyncio.run(run())


def test_logits_that_are_not_finite_are_an_error():
  _, params = built("toy")
  engine = fresh_engine({**params, "head": params["head"] * np.nan})
  with pytest.raises(FloatingPointError, match="not finite, under weights of version 0"):
    engine.generate([[1], [2], [3]])
  engine.load(params)
  assert len(flat(engine.generate([[1], [2], [3]], sampling=Sampling(max_tokens=3)))) == 3


def test_a_failed_device_call_ends_its_turns_and_the_engine_goes_on(monkeypatch):
  engine = fresh_engine()
  decode = engine._decode

  def out_of_memory(*arguments):
    decode(*arguments)  # donates the cache
    raise MemoryError("no memory")

  monkeypatch.setattr(engine, "_decode", out_of_memory)
  with pytest.raises(MemoryError):
    engine.generate([[1], [2]])

  async def sample():
    with engine.open([1]) as session:
      return await session.sample(Sampling(max_tokens=3))

  with pytest.raises(MemoryError):
    asyncio.run(sample())
  assert engine.step() is False
  monkeypatch.setattr(engine, "_decode", decode)
  out = asyncio.run(sample())
  np.testing.assert_allclose(out.logp_rollout, rescore("toy", [1, *out.ids.tolist()])[0], atol=1e-5)


def test_a_cache_without_rows_is_refused():
  policy = toy_policy()
  policy = dataclasses.replace(policy, cache=lambda rows, capacity: {"count": jnp.zeros(())})
  with pytest.raises(ValueError, match="axis that counts rows"):
    Engine(policy, built("toy")[1])
