"""Train step, scorer, prefill and decode of a configuration, compiled for a topology, and what each of them takes."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.config import Config
from jaxagent.models.config import DecoderConfig
from jaxagent.models.moe import routing_dtype
from jaxagent.plan.chips import Chip, chip_of, topology_devices
from jaxagent.plan.hlo import Collective, collectives
from jaxagent.sampling import calls, programs
from jaxagent.training.build import abstract_parts, engine_capacity, updates_per_step
from jaxagent.training.loop import abstract_state
from jaxagent.training.sharding import batch_sharding, make_mesh
from jaxagent.training.step import make_scorer, make_train_step
from jaxagent.types import TokenBatch

PROGRAMS = ("train", "score", "prefill", "decode")
KNOBS = {
  "train": "training.microbatch_rows or row_tokens lower, model.remat true, logprob_chunk lower, mesh.fsdp higher",
  "score": "training.microbatch_rows or row_tokens lower, training.logprob_chunk lower, mesh.fsdp higher",
  "prefill": "rollout.slots or rollout.max_tokens lower, mesh.tensor or mesh.expert higher",
  "decode": "rollout.slots or rollout.max_tokens lower, mesh.tensor or mesh.expert higher",
}


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
  """One program on one device; bytes, operations and seconds.

  `arguments` by kind; `temporary` is what the program needs beside them; `peak` what the compiler says that it holds
  at once. `unit` is what operations, bytes of collectives and seconds are for. `fault`: why it was not compiled.
  """

  name: str
  arguments: dict[str, float]
  unit: str
  flops: float
  traffic: float
  temporary: float = math.nan
  peak: float = math.nan
  collectives: tuple[Collective, ...] = ()
  compile_seconds: float = math.nan
  fault: str | None = None

  def seconds(self, chip: Chip) -> tuple[float, float, float]:
    """A roofline: operations at the chip's peak, memory at its bandwidth, collectives at that of all its links."""
    moved = sum(c.bytes for c in self.collectives)
    return self.flops / chip.flops, self.traffic / chip.bandwidth, moved / chip.link


@dataclasses.dataclass(frozen=True)
class Plan:
  topology: str
  chip: Chip
  mesh: dict[str, int]
  parameters: int
  programs: tuple[ProgramPlan, ...]

  def fits(self, program: ProgramPlan) -> bool:
    return program.fault is None and program.peak <= self.chip.memory


def plan(
  config: Config, topology: str, *, only: Sequence[str] = PROGRAMS, say: Callable[[str], None] = lambda line: None
) -> Plan:
  """Nothing is allocated or run. `only` names programs; `say` hears of each as it is compiled.

  ValueError: a topology or a mesh that is not possible; a model that is not the built-in decoder.
  """
  if unknown := sorted(set(only) - set(PROGRAMS)):
    raise ValueError(f"no program {unknown[0]!r} to plan; they are {', '.join(PROGRAMS)}")
  chip, mesh = chip_of(topology), make_mesh(config.mesh, devices=topology_devices(topology))
  parts = abstract_parts(config, mesh)
  makers = {"train": _train, "score": _score, "prefill": _prefill, "decode": _decode}
  planned = []
  for name in PROGRAMS:
    if name in only:
      say(f"compiling {name} for {topology}")
      planned.append(makers[name](config, parts, mesh))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(parts.params))
  sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
  return Plan(topology, chip, sizes, count, tuple(planned))


def _train(config: Config, parts, mesh) -> ProgramPlan:
  state, batch = abstract_state(parts).train, abstract_batch(config, parts, mesh)
  chunk = config.training.logprob_chunk
  step = make_train_step(parts.policy, parts.method, parts.tx, mesh=mesh, chunk=chunk)
  held = {"parameters": per_device(state.params), "optimizer": per_device(state.opt_state), "batch": per_device(batch)}
  model, tokens, devices = parts.policy.config, _microbatch_tokens(config), mesh.size
  passes = 4 if model.remat else 3
  compute = held["parameters"] if model.dtype == "float32" else held["parameters"] / 2
  empty = ProgramPlan(
    "train", held, "a microbatch", passes * forward_flops(model, tokens, config.rollout.max_tokens / 2) / devices,
    passes * compute + 2 * held["parameters"],
  )  # fmt: skip
  return _compiled(empty, lambda: step.lower(state, batch, jax.ShapeDtypeStruct((), jnp.int32)))


def _score(config: Config, parts, mesh) -> ProgramPlan:
  params, batch = abstract_state(parts).train.params, abstract_batch(config, parts, mesh)
  scorer = make_scorer(parts.policy, mesh=mesh, chunk=config.training.logprob_chunk)
  held = {"parameters": per_device(params), "batch": per_device(batch)}
  flops = forward_flops(parts.policy.config, _microbatch_tokens(config), config.rollout.max_tokens / 2) / mesh.size
  empty = ProgramPlan("score", held, "a microbatch", flops, held["parameters"])
  return _compiled(empty, lambda: scorer.lower(params, batch, jax.ShapeDtypeStruct((), jnp.int32)))


def _prefill(config: Config, parts, mesh) -> ProgramPlan:
  slots, capacity = config.rollout.slots, engine_capacity(config)
  made, weights, cache = _engine(config, parts, mesh)
  rows, chunk = max(calls.prefill_shapes(slots, capacity, calls.PREFILL_TOKENS), key=lambda shape: shape[0] * shape[1])
  row = None if rows == slots else np.zeros(rows, np.int32)
  tokens = np.zeros((rows, chunk), np.int32)
  held = {"weights": per_device(weights), "cache": per_device(cache)}
  flops = forward_flops(parts.policy.config, rows * chunk, config.rollout.max_tokens / 2) / _weight_ways(mesh)
  empty = ProgramPlan("prefill", held, f"{rows * chunk} tokens", flops, held["weights"] + held["cache"])
  return _compiled(empty, lambda: made.prefill.lower(weights, cache, row, tokens, tokens, np.zeros(rows, np.int32)))


def _decode(config: Config, parts, mesh) -> ProgramPlan:
  slots = config.rollout.slots
  made, weights, cache = _engine(config, parts, mesh)
  rows = calls.filler(slots)
  held = {"weights": per_device(weights), "cache": per_device(cache)}
  flops = forward_flops(parts.policy.config, slots, config.rollout.max_tokens / 2) / mesh.size
  empty = ProgramPlan("decode", held, f"a token of {slots} rows", flops, held["weights"] + held["cache"])
  return _compiled(empty, lambda: made.decode.lower(weights, cache, None, rows))


def _engine(config: Config, parts, mesh) -> tuple[programs.Programs, Any, Any]:
  shapes = {"slots": config.rollout.slots, "capacity": engine_capacity(config), "steps": calls.STEPS_PER_CALL}
  made = programs.programs_for(parts.policy, parts.params, mesh, **shapes)
  params = jax.tree.map(_placed, parts.params, made.params_sharding)
  weights = jax.tree.map(_placed, made.prepare.eval_shape(params), made.weights_sharding)
  return made, weights, jax.tree.map(_placed, made.new_cache.eval_shape(), made.cache_sharding)


def _placed(shape, sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _compiled(empty: ProgramPlan, lower: Callable[[], Any]) -> ProgramPlan:
  start = time.perf_counter()
  try:
    compiled = lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    peak = needed(str(error))
    return dataclasses.replace(empty, peak=peak, fault="does not fit", compile_seconds=time.perf_counter() - start)
  memory = compiled.memory_analysis()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return dataclasses.replace(
    empty,
    temporary=float(memory.temp_size_in_bytes),
    peak=float(getattr(memory, "peak_memory_in_bytes", 0) or held + memory.temp_size_in_bytes),
    collectives=tuple(collectives(compiled.as_text())),
    compile_seconds=time.perf_counter() - start,
  )


def needed(message: str) -> float:
  """Bytes that the compiler says the program would have used, at least."""
  found = re.search(r"([\d.]+)([KMGT])\)? (?:of|exceeds) ", message)
  return float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]] if found else math.nan


def abstract_batch(config: Config, parts, mesh) -> TokenBatch:
  """Shapes of the packed microbatches of a step, as many as its rollouts need at worst."""
  t, r = config.training, config.rollout
  shape = (-(-r.prompts * r.samples // t.microbatch_rows), t.microbatch_rows, t.row_tokens or r.max_tokens)
  where, needs, model = batch_sharding(mesh), parts.method.needs, parts.policy.config

  def column(dtype, *more):
    return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=where)

  real, whole, yes = column(jnp.float32), column(jnp.int32), column(jnp.bool_)
  old = updates_per_step(config) > 1 or "logp_old" in needs
  replays = model.experts and r.replay_routing
  return TokenBatch(
    tokens=whole, position=whole, segment=whole, turn=whole, prefix_end=whole, mask=yes, advantage=real, weight=real,
    aggregate=real, temperature=real, logp_rollout=real, logp_old=real if old else None,
    logp_ref=real if "logp_ref" in needs else None, value=real if "value" in needs else None,
    routing=column(routing_dtype(model), model.layers, model.experts_per_token) if replays else None,
    columns={name: real for name in parts.method.columns},
  )  # fmt: skip


def per_device(tree: Any) -> float:
  """Bytes of the arrays on one device."""

  def size(leaf):
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize

  return float(sum(size(leaf) for leaf in jax.tree.leaves(tree)))


def forward_flops(model: DecoderConfig, tokens: int, context: float) -> float:
  """2 operations for each weight that a token meets, head included, and 4 for each number of each key it attends to."""
  seen = [min(context, model.window + model.max_prefix) if kind != "full" else context for kind in model.kinds]
  attended = 4 * model.heads * model.head_dim * sum(seen)
  return tokens * (2 * active_weights(model) + attended)


def active_weights(model: DecoderConfig) -> int:
  attention = 2 * model.width * model.head_dim * (model.heads + model.kv_heads)
  mlp = 3 * model.width * (model.experts_per_token * model.expert_width if model.experts else model.mlp_width)
  router = model.width * model.experts
  return model.layers * (attention + mlp + router) + model.width * model.vocab_size


def _microbatch_tokens(config: Config) -> int:
  return config.training.microbatch_rows * (config.training.row_tokens or config.rollout.max_tokens)


def _weight_ways(mesh) -> int:
  """Devices over which the products of a few rows are split: not those that hold other rows."""
  return mesh.shape["tensor"] * mesh.shape["expert"]
