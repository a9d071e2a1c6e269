"""Plans: reading compiled programs, counting operations, what is said where something does not fit, and a whole one."""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import config as configuration
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.plan import Chip, Plan, ProgramPlan, chip_of, collectives, plan, programs, table, topology_devices
from jaxagent.plan.programs import active_weights, forward_flops, needed, per_device
from jaxagent.training.build import abstract_parts
from jaxagent.training.sharding import make_mesh

libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no TPU compiler: pip install 'jax[tpu]' brings libtpu"
)
SHAPE = {"vocab_size": 64, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}


def test_collectives_of_a_program_that_was_compiled_here():
  """8 devices: 5 trips with a sum of [8] float32 over all of them, and one gather of what was split."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

  def body(_, carry):
    return carry + jax.lax.psum(jnp.tanh(carry), "x")

  def local(x):
    summed = jax.lax.fori_loop(0, 5, body, x[0])
    return jax.lax.all_gather(summed, "x")

  spec = jax.sharding.PartitionSpec
  run = jax.shard_map(local, mesh=mesh, in_specs=spec("x"), out_specs=spec(), check_vma=False)
  text = jax.jit(run).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)).compile().as_text()
  found = {c.kind: (c.count, c.bytes) for c in collectives(text)}
  assert found == {"all-reduce": (5, 5 * 32), "all-gather": (1, 8 * 32)}


ASYNC = """\
HloModule m

%body.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %s = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %d = bf16[16,8]{1,0} all-gather-done(%s)
  %r = (bf16[16,8]{1,0}, bf16[16,8]{1,0}, u32[], u32[]) collective-permute-start(%d), source_target_pairs={{0,1}}
}

%cond.1 (p: (s32[], bf16[4,8])) -> pred[] {
  %c = pred[] constant(true)
}

%below.1 (p: (s32[], bf16[4,8])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %five), direction=LT, metadata={}
}

%never.1 (p: f32[2]) -> f32[2] {
  %a = f32[2]{0} all-reduce(%p), to_apply=%add
}

ENTRY %main.1 (a: f32[8]) -> f32[8] {
  %w = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"7"}}
  %v = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond.1, body=%body.1
  %u = (s32[], bf16[4,8]{1,0}) while(%t), condition=%below.1, body=%body.1
  ROOT %o = f32[8]{0} add(%a, %a)
}
"""


def test_collectives_that_are_started_and_loops_of_known_and_unknown_length():
  gathered = 16 * 8 * 2
  assert [(c.kind, c.count, c.bytes) for c in collectives(ASYNC)] == [
    ("all-gather", 13, 13 * gathered), ("collective-permute", 13, 13 * gathered),
  ]  # fmt: skip


@pytest.mark.parametrize("more", [{"mlp_width": 48}, {"experts": 4, "experts_per_token": 2, "expert_width": 24}])
def test_weights_that_a_token_meets(more):
  """All matrices, of a mixture only the chosen experts', and the head."""
  config = DecoderConfig(**SHAPE, **more)
  shapes = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
  matrices = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes["layers"]) if len(x.shape) > 2)
  if config.experts:
    experts = sum(math.prod(shapes["layers"]["mlp"][name].shape) for name in ("gate", "up", "down"))
    matrices -= experts - experts * 2 // 4
  assert active_weights(config) == matrices + 64 * 32
  dense = 2 * 10 * active_weights(config)
  assert forward_flops(config, 10, 100) == dense + 10 * 4 * 4 * 8 * 100 * 3
  sliding = dataclasses.replace(config, attention="sliding", window=20)
  assert forward_flops(sliding, 10, 100) == dense + 10 * 4 * 4 * 8 * 20 * 3


def test_bytes_on_a_device():
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = jax.sharding.PartitionSpec
  shapes = [((8, 6), jnp.float32, spec("a", "b")), ((8,), jnp.bfloat16, spec())]
  tree = [jax.ShapeDtypeStruct(s, t, sharding=jax.sharding.NamedSharding(mesh, p)) for s, t, p in shapes]
  assert per_device(tree) == 8 * 6 * 4 / 8 + 8 * 2


CHIP = Chip("a chip", 2.0**30, 1e12, 1e11, 1e10)


def one(**changed):
  program = ProgramPlan("train", {"parameters": 2.0**20}, "a microbatch", 1e9, 2e8, temporary=0.0, peak=2.0**29)
  program = dataclasses.replace(program, compile_seconds=1.0, **changed)
  return Plan("v5e:2x2", CHIP, {"fsdp": 4}, 10**9, (program,))


def test_the_table_says_what_fits_and_which_knob_to_turn():
  fits, over = one(), one(peak=2.0**31)
  text = table(fits)
  assert "train: fits, peak 512 MiB = 50% of the device" in text and "to make it fit" not in text
  assert "a microbatch: 1e+09 operations 1 ms, memory 2 ms, links 0 ms: at least 2 ms" in text
  assert "DOES NOT FIT" in table(over) and "training.microbatch_rows" in table(over)
  refused = table(one(fault="does not fit", peak=math.nan, temporary=math.nan))
  assert "train: DOES NOT FIT, peak unknown" in refused and "operations" not in refused.split("Bytes are")[0]


@pytest.mark.parametrize("topology, message", [
  ("v9:2x2", "no chip 'v9'; known are v4, v5e"),
  pytest.param("v5e:nonsense", "v5e:nonsense", marks=libtpu),
])  # fmt: skip
def test_topologies_that_are_none(topology, message):
  with pytest.raises(ValueError, match=message):
    topology_devices(topology)
  assert chip_of("v5p:2x2x4").memory == 95 * 2**30


def test_a_missing_compiler_is_said(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"v5e:2x2 needs the compiler in libtpu: pip install 'jaxagent\[tpu\]'"):
    topology_devices("v5e:2x2")


def test_a_program_that_is_not_there():
  with pytest.raises(ValueError, match="no program 'step' to plan; they are train, score, prefill, decode"):
    plan(configuration.load(None), "v5e:2x2", only=("step",))


TINY = {
  "model.shape": {**SHAPE, "vocab_size": 512, "width": 128, "head_dim": 64, "mlp_width": 256},
  "rollout.max_tokens": 128,
  "rollout.slots": 8,
}


def test_the_cache_of_a_policy_that_judges_holds_its_questions():
  def cache_of(**changes):
    config = configuration.load(None, {**TINY, **{k.replace("__", "."): v for k, v in changes.items()}})
    mesh = make_mesh(config.mesh, devices=jax.devices()[:1])
    return programs._engine(config, abstract_parts(config, mesh), mesh)[2]

  assert per_device(cache_of(judge__backend="policy", judge__context=4096)) == 32 * per_device(cache_of())


@pytest.mark.slow
@libtpu
@pytest.mark.parametrize("changes", [
  {"mesh.data": 2, "mesh.tensor": 2},
  {"model.shape": {**TINY["model.shape"], "mlp_width": 0, "experts": 4, "experts_per_token": 2, "expert_width": 128},
   "mesh.fsdp": 2, "mesh.expert": 2, "method.name": "gspo"},
])  # fmt: skip
def test_a_whole_plan_for_four_chips(changes):
  config = configuration.load(None, {**TINY, "mesh.data": 1, **changes})
  planned = plan(config, "v5e:2x2")
  assert [p.name for p in planned.programs] == ["train", "score", "prefill", "decode"]
  for program in planned.programs:
    assert planned.fits(program) and program.peak >= sum(program.arguments.values())
    assert program.collectives and program.flops > 0 and np.isfinite(program.temporary)
  assert "does not fit" not in table(planned).lower()


@pytest.mark.slow
@libtpu
def test_what_does_not_fit_is_said_with_the_bytes_it_would_take():
  shape = {"width": 8192, "layers": 24, "head_dim": 128, "heads": 64, "kv_heads": 8, "mlp_width": 28_672}
  changes = {"model.shape": {"vocab_size": 32_768, **shape}, "mesh.data": 1, "mesh.fsdp": 4}
  config = configuration.load(None, {**TINY, **changes})
  planned = plan(config, "v5e:2x2", only=("train",))
  (program,) = planned.programs
  assert not planned.fits(program) and program.peak > planned.chip.memory
  assert "DOES NOT FIT" in table(planned) and "mesh.fsdp" in table(planned)


@pytest.mark.parametrize("message, size", [
  ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded", 17.5),
  ("RESOURCE_EXHAUSTED: E1000: the total memory required for HLO temporaries (127.08G) exceeds available", 127.08),
])  # fmt: skip
def test_what_compilers_say_of_too_much(message, size):
  assert needed(message) == size * 2**30


def test_a_mesh_that_the_topology_does_not_have():
  with pytest.raises(ValueError, match="do not multiply to the 8 devices"):
    make_mesh(configuration.Mesh(data=3), devices=jax.devices())
