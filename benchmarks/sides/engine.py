"""The engine as a side of benchmarks/sampler.py: `generate`, or decoding at the end of a long stream by two kinds of
attention."""

import asyncio
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import answering
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.sampling import Engine, Sampling


def model(work: dict, **attention):
  """A policy and its parameters, and how many of these are operands of products for each token."""
  if "path" in work["model"]:
    from jaxagent.models.loading import load

    loaded = load(work["model"]["path"], dtype=work["dtype"], tokenizer="bytes")
    policy, params = decoder_policy(loaded.config), jax.tree.map(jnp.asarray, loaded.params)
  else:
    policy = decoder_policy(DecoderConfig(**work["model"], dtype=work["dtype"], qk_norm=True, **attention))
    params = random(jax.eval_shape(policy.init, jax.random.key(0)))
  return policy, params, sum(x.size for x in jax.tree.leaves(params))


def random(shapes):
  """Values drawn by NumPy, which compiles nothing."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), shapes)


def batch_way(work: dict) -> tuple[dict, int]:
  policy, params, size = model(work)
  longest = max(len(prompt) + new for prompt, new in zip(work["prompts"], work["new"]))
  engine = Engine(policy, params, slots=work["slots"], capacity=longest)
  rules = [Sampling(max_tokens=new) for new in work["new"]]

  def generate() -> None:
    out = engine.generate(work["prompts"], n=work["n"], sampling=rules)
    assert [len(x.ids) for group in out for x in group] == [new for new in work["new"] for _ in range(work["n"])]

  return {"engine": generate}, size


def stream_ways(work: dict) -> tuple[dict, int]:
  """`slots` streams that are `context` tokens long, each way from its own engine; a run samples `new` more of each."""
  ways = {}
  for name, attention in work["attention"].items():
    policy, params, size = model(work, **attention)
    capacity = work["context"] + work["room"]
    engine = Engine(policy, params, slots=work["slots"], capacity=capacity, prefill_tokens=128)
    ways[name] = Streams(engine, work)
  return ways, size


class Streams:
  def __init__(self, engine: Engine, work: dict):
    (prompt,), (self.new,) = work["prompts"], work["new"]
    rest = np.random.default_rng(0).integers(3, engine.policy.vocab_size, work["context"] - len(prompt)).tolist()
    self.sessions = [engine.open(prompt) for _ in range(work["slots"])]
    for session in self.sessions:
      session.append(rest)

  def __call__(self) -> None:
    asyncio.run(self._sample())

  async def _sample(self) -> None:
    out = await asyncio.gather(*(session.sample(Sampling(max_tokens=self.new)) for session in self.sessions))
    assert [len(x.ids) for x in out] == [self.new] * len(out)


def product_rate(dtype: str, size: int = 1024) -> float:
  """Operations a second of the best of 16 square products."""
  x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
  multiply, seconds = jax.jit(lambda a, b: a @ b), []
  for _ in range(17):
    start = time.perf_counter()
    multiply(x, x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds[1:])


def main() -> None:
  work = answering.work()
  ways, size = stream_ways(work) if "attention" in work else batch_way(work)
  facts = {"jax": jax.__version__, "parameters": size}
  if work["warm"]:
    for run in ways.values():
      run()
    facts["products_per_s"] = product_rate(work["dtype"])
  answering.answer(ways, **facts)


if __name__ == "__main__":
  main()
