"""A whole GRPO step on a small random model: sampling, scoring, one update. Times, tokens per second, peak memory.

    python benchmarks/grpo_step.py --steps 7 --json out.json

Qwen3-style dense decoder, 4 layers, width 256, MLP 768, 4 query and 2 key heads of 64, vocabulary 1024, tied; 8 prompts
x 8 samples, prompt 32, exactly 128 new tokens, no reference, one AdamW update. A peer with the same protocol is run
in turn with this one on an otherwise idle machine; report medians and the ratio, never one absolute time.
"""

import argparse
import json
import os
import resource
import statistics
import time

START = time.perf_counter()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from jaxagent import config as configuration  # noqa: E402
from jaxagent.methods import grpo  # noqa: E402
from jaxagent.models.config import DecoderConfig  # noqa: E402
from jaxagent.models.decoder import decoder_policy  # noqa: E402
from jaxagent.rollout.batch import to_rollouts  # noqa: E402
from jaxagent.sampling.engine import Engine  # noqa: E402
from jaxagent.sampling.request import Sampling  # noqa: E402
from jaxagent.training import loop  # noqa: E402
from jaxagent.training.build import Parts  # noqa: E402
from jaxagent.training.phases import Phases  # noqa: E402
from jaxagent.training.sharding import make_mesh  # noqa: E402
from jaxagent.training.step import init_state  # noqa: E402
from jaxagent.types import Trajectory  # noqa: E402


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=7)
  parser.add_argument("--warmup", type=int, default=2, help="steps left out of the medians")
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--samples", type=int, default=8)
  parser.add_argument("--prompt-len", type=int, default=32)
  parser.add_argument("--new-tokens", type=int, default=128)
  parser.add_argument("--microbatch-rows", type=int, default=4)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--json")
  return parser.parse_args()


def main() -> None:
  args = arguments()
  length = args.prompt_len + args.new_tokens
  shape = DecoderConfig(
    vocab_size=1024, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_width=768, qk_norm=True,
    dtype=args.dtype,
  )  # fmt: skip
  policy, mesh, tx = decoder_policy(shape), make_mesh(), optax.adamw(1e-4)
  config = configuration.Config(
    rollout=configuration.Rollout(prompts=args.prompts, samples=args.samples, max_tokens=length, max_turns=1),
    training=configuration.Training(microbatch_rows=args.microbatch_rows),
  )
  params = jax.jit(policy.init)(jax.random.key(0))
  parts = Parts(policy, params, None, None, grpo, tx, mesh)
  state = loop.RunState(init_state(policy, grpo, tx, params, mesh=mesh))
  engine = Engine(policy, state.train.params, slots=args.prompts * args.samples, capacity=length)
  update = loop.Update(config, parts)
  rng = np.random.default_rng(0)
  seconds: dict[str, list[float]] = {"step": [], "generate": [], "update": []}
  first = None
  for step in range(args.steps):
    start = time.perf_counter()
    prompts = rng.integers(3, 1024, (args.prompts, args.prompt_len))
    rollouts = sample(engine, prompts, args.samples, args.new_tokens)
    sampled = time.perf_counter()
    state, record = update(state, rollouts, key=jax.random.key(step), phases=Phases())
    engine.load(state.train.params, version=step + 1)
    end = time.perf_counter()
    first = first or end - START
    for name, value in (("step", end - start), ("generate", sampled - start), ("update", end - sampled)):
      seconds[name].append(value)
  report(args, seconds, first, record, sum(x.size for x in jax.tree.leaves(params)))


def sample(engine: Engine, prompts: np.ndarray, n: int, new_tokens: int):
  """Rollouts whose reward is the share of ids in the lower half of the vocabulary; nothing ends early."""
  groups = engine.generate(prompts.tolist(), n=n, sampling=Sampling(max_tokens=new_tokens))
  rows = []
  for g, (prompt, completions) in enumerate(zip(prompts, groups)):
    for completion in completions:
      row = Trajectory(task=g, group=g, rollout=len(rows), status="done")
      row.append_context(prompt)
      row.append_action(completion)
      row.outcome = float(np.mean(completion.ids < 512))
      rows.append(row)
  return to_rollouts(rows, tokens=prompts.shape[1] + new_tokens, turns=1)


def report(args: argparse.Namespace, seconds: dict[str, list[float]], first: float, record: dict, size: int) -> None:
  median = {k: statistics.median(v[args.warmup :]) for k, v in seconds.items()}
  tokens = args.prompts * args.samples * args.new_tokens
  out = {
    "jax": jax.__version__,
    "dtype": args.dtype,
    "parameters": size,
    "step_s": median["step"],
    "generate_s": median["generate"],
    "update_s": median["update"],
    "sampled_tokens_per_s": tokens / median["generate"],
    "first_step_from_process_start_s": first,
    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "logp_gap_max": record["logp_gap/max"],
    "all_step_s": seconds["step"],
  }
  print(json.dumps(out, indent=1))
  if args.json:
    with open(args.json, "w") as file:
      json.dump(out, file, indent=1)


if __name__ == "__main__":
  main()
