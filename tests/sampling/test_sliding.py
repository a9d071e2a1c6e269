"""The engine with layers that slide: fixed memory, prefixes that stay, rows that are used again and cut back."""

import asyncio
import functools

import jax
import numpy as np
import pytest
from streams import ROOM, STEPS, Letters, built, prompts_of, rescore
from streams import WINDOW as W

from jaxagent.sampling import Engine, Sampling

CAPACITY = 224
EVERY = pytest.mark.parametrize("name", ["sliding", "mixed moe"])


@functools.cache
def engine_of(name):
  """Shared: compiling is what these tests take time for."""
  return Engine(*built(name), slots=3, capacity=CAPACITY, steps_per_call=STEPS, tokenizer=Letters())


def assert_scored(name, tokens, prefix_length, turns, temperature):
  """The completions, each from a place in the stream on, have the log-probs of one full forward pass."""
  logp, *_ = rescore(name, tokens, temperature, prefix_length=prefix_length)
  for start, turn in turns:
    assert tokens[start : start + len(turn.ids)] == turn.ids.tolist()
    want = logp[start - 1 : start - 1 + len(turn.ids)]
    np.testing.assert_allclose(turn.logp_rollout, want, atol=1e-5 * max(1, 1 / temperature))


@EVERY
def test_log_probs_equal_the_full_forward_with_the_mask(name):
  """Prompts of 1 to 3W tokens, outputs of W - 1 to 3W and beyond the cache; twice as many as rows."""
  prompts = prompts_of(1, W - 1, W, W + 1, 3 * W, 2, ROOM)
  sizes = [W, W + 1, W - 1, 3 * W, 2 * W, 120, 40]
  assert max(sizes) > ROOM + W + STEPS
  sampling = [Sampling(temperature=0.5 if i % 2 else 1.0, max_tokens=size) for i, size in enumerate(sizes)]
  for prompt, rules, (out,) in zip(prompts, sampling, engine_of(name).generate(prompts, sampling=sampling)):
    assert len(out.ids) == rules.max_tokens
    stream = prompt + out.ids.tolist()
    assert_scored(name, stream, len(prompt), [(len(prompt), out)], rules.temperature)


async def conversation(engine, prompt, index, text, turns=3):
  """The stream of a session with `turns` turns and tool text between them, and where each turn began."""
  session, out = engine.open(prompt, index=index), []
  for turn in range(turns):
    out.append((len(session.tokens), await session.sample(Sampling(temperature=0.8, max_tokens=4 + 5 * turn))))
    if turn < turns - 1:
      session.append(text[turn])
  tokens = list(session.tokens)
  session.close()
  return tokens, out


@EVERY
def test_sessions_of_several_turns_that_take_rows_from_each_other(name):
  engine = engine_of(name)
  prompts, texts = prompts_of(2, W, 3 * W, 9, 1), prompts_of(19, 1, 7, 2 * W, 3, seed=1)

  async def run():
    return await asyncio.gather(
      *(conversation(engine, p, i, [texts[i], texts[-i]]) for i, p in enumerate(prompts))
    )

  for prompt, (tokens, turns) in zip(prompts, asyncio.run(run())):
    assert_scored(name, tokens, len(prompt), turns, 0.8)


@EVERY
def test_a_stop_string_cuts_a_row_back_and_the_session_goes_on(name):
  engine, cut = engine_of(name), 0
  for seed, prompt in enumerate(prompts_of(3, W, 2 * W, 3 * W)):
    key = jax.random.key(seed)
    (free,), *_ = engine.generate([prompt], sampling=Sampling(max_tokens=30), key=jax.random.key(99))
    stop = Letters().decode(free.ids[11:12].tolist())

    async def run(prompt=prompt, key=key, stop=stop):
      session, turns = engine.open(prompt, key=key), []
      for _ in range(3):
        turns.append((len(session.tokens), await session.sample(Sampling(max_tokens=60, stop=(stop,)))))
        session.append([1, 2])
      return list(session.tokens[:-2]), turns

    tokens, turns = asyncio.run(run())
    cut += sum(turn.finish == "stop" and len(turn.ids) % STEPS != 0 for _, turn in turns)
    assert_scored(name, tokens, len(prompt), turns, 1.0)
  assert cut > 1  # turns that ended inside a call: the rest of the call was taken back


def test_weights_that_change_during_a_session():
  engine = Engine(*built("sliding"), slots=3, capacity=CAPACITY, steps_per_call=STEPS)
  engine._prefill, engine._decode = engine_of("sliding")._prefill, engine_of("sliding")._decode
  prompt = prompts_of(11)[0]

  async def run():
    session = engine.open(prompt)
    await session.sample(Sampling(max_tokens=25))
    engine.load(jax.tree.map(lambda x: 0.9 * x, built("sliding")[1]))
    await session.sample(Sampling(max_tokens=9))
    engine.load(built("sliding")[1])
    start = len(session.tokens)
    return (start, await session.sample(Sampling(max_tokens=9))), list(session.tokens)

  turn, tokens = asyncio.run(run())
  assert_scored("sliding", tokens, len(prompt), [turn], 1.0)


def test_memory_does_not_grow_with_the_capacity():
  def bytes_of(name, capacity):
    shapes = jax.eval_shape(functools.partial(built(name)[0].cache, 3, capacity))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

  held = sum(x.nbytes for x in jax.tree.leaves(engine_of("sliding")._cache))
  assert held == bytes_of("sliding", 2) == bytes_of("sliding", 10**7) < bytes_of("mixed moe", 10**4)
  assert held == 3 * (ROOM + W + STEPS) * 4 * (2 * 2 * 2 * 8 + 1)  # rows, slots, bytes, layers, k and v, heads, width


@pytest.mark.parametrize("size", [ROOM + 1, ROOM + 2 * W])
def test_a_prompt_that_does_not_fit_is_refused(size):
  engine, (prompt,) = engine_of("sliding"), prompts_of(size)
  message = f"has {size} tokens, but the policy keeps a first prompt of at most {ROOM} .max_prefix"
  with pytest.raises(ValueError, match="prompt 1 " + message):
    engine.generate([[1], prompt])
  with pytest.raises(ValueError, match="prompt " + message):
    engine.open(prompt)


def test_a_call_of_more_steps_than_a_row_can_be_cut_back_is_refused():
  with pytest.raises(ValueError, match=f"steps_per_call must be at most {STEPS}.* got {STEPS + 1}.*larger rewind"):
    Engine(*built("sliding"), steps_per_call=STEPS + 1)
