"""The engine on eight simulated devices: the tokens of one, parts where the rules put them, weights between meshes."""

import asyncio
import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array as arrays
from jax.sharding import NamedSharding, PartitionSpec
from streams import prompts_of

from jaxagent import config
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.sharding import shard_params, transfer
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import make_scorer
from jaxagent.types import TokenBatch

V, SLOTS, CAPACITY = 24, 8, 48
SHAPE = {"vocab_size": V, "width": 16, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 4, "init_scale": 0.5}
EXPERTS, EXPERT_WIDTH = 8, 20  # no other size is a multiple of 10
SHAPES = {
  "dense": DecoderConfig(**SHAPE, mlp_width=24, qk_norm=True, qkv_bias=True),
  "moe": DecoderConfig(**SHAPE, experts=EXPERTS, experts_per_token=2, expert_width=EXPERT_WIDTH, tied=False),
}
MESHES = {
  "data 8": {"data": 8},
  "data 2 tensor 2 expert 2": {"data": 2, "tensor": 2, "expert": 2},
  "fsdp 4 tensor 2": {"data": 1, "fsdp": 4, "tensor": 2},
  "data 2 expert 4": {"data": 2, "expert": 4},
  "tensor 8": {"data": 1, "tensor": 8},
}
RULES = Sampling(temperature=0.8, max_tokens=9)


@functools.cache
def built(name):
  policy = decoder_policy(SHAPES[name])
  return policy, jax.jit(policy.init)(jax.random.key(3))


def mesh_of(name):
  return make_mesh(config.Mesh(**MESHES[name]))


MOVES = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
COLLECTIVE = rf"= \(?\w+\[([\d,]*)\]\S*(?: \S+\))? (?:{MOVES})"


def collected(hlo, kind=COLLECTIVE):
  """Shapes of what collectives yield."""
  return [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(kind, hlo)]


def engine_of(name, *, params=None, **options):
  policy, own = built(name)
  params = own if params is None else params
  return Engine(policy, params, **{"slots": SLOTS, "capacity": CAPACITY, "prefill_tokens": 64} | options)


PROMPTS = prompts_of(3, 25, 18, seed=1)


def sampled(engine):
  """Three prompts, four samples each: more than there are slots, prompts shared."""
  return [c for group in engine.generate(PROMPTS, n=4, sampling=RULES, key=jax.random.key(5)) for c in group]


@functools.cache
def on_one_device(name):
  return sampled(engine_of(name))


def assert_same(got, want):
  assert [c.ids.tolist() for c in got] == [c.ids.tolist() for c in want]
  for a, b in zip(got, want):
    np.testing.assert_allclose(a.logp_rollout, b.logp_rollout, atol=1e-5)
    np.testing.assert_array_equal(a.routing, b.routing)


def bytes_per_device(tree):
  return max(
    sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == d)
    for d in jax.tree.leaves(tree)[0].devices()
  )


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, mesh", [
  slow("dense", "data 8"), slow("moe", "data 8"), slow("dense", "data 2 tensor 2 expert 2"),
  ("moe", "data 2 tensor 2 expert 2"), ("dense", "fsdp 4 tensor 2"), slow("moe", "fsdp 4 tensor 2"),
  slow("moe", "data 2 expert 4"), slow("dense", "tensor 8"),
])  # fmt: skip
def test_the_tokens_of_one_device(name, mesh):
  engine = engine_of(name, mesh=mesh_of(mesh))
  assert_same(sampled(engine), on_one_device(name))
  compiles = engine.compiles
  engine.load(built(name)[1])
  assert_same(sampled(engine), on_one_device(name))
  assert engine.compiles == compiles


@functools.cache
def compiled_and_sampled(replaced=False):
  """Programs of the mixture's engine on data 2 x tensor 2 x expert 2, and what they sample."""
  with mock.patch("jaxagent.sampling.programs.on_mesh", lambda policy, mesh: policy) if replaced else mock.MagicMock():
    engine = engine_of("moe", mesh=mesh_of("data 2 tensor 2 expert 2"))
  programs = {}

  def compiling(which, program):
    def run(*arguments):
      if which not in programs:
        programs[which] = program.lower(*arguments).compile().as_text()
      return program(*arguments)

    return run

  for which in ("_prefill", "_decode"):
    setattr(engine, which, compiling(which, getattr(engine, which)))
  return programs, sampled(engine), engine


def expert_parts(hlo):
  return [shape for shape in collected(hlo) if any(size % 10 == 0 for size in shape)]


def test_no_device_gets_the_experts_of_another():
  programs, out, _ = compiled_and_sampled()
  assert_same(out, on_one_device("moe"))
  for hlo in programs.values():
    assert collected(hlo) and not expert_parts(hlo)


@pytest.mark.slow
def test_left_to_the_compiler_experts_would_travel():
  programs, *_ = compiled_and_sampled(replaced=True)
  assert expert_parts(programs["_decode"])


def test_a_device_holds_its_part():
  _, _, engine = compiled_and_sampled()
  whole = engine_of("moe")
  assert bytes_per_device(engine._cache) == bytes_per_device(whole._cache) // 4 + _positions(whole._cache) // 4
  assert bytes_per_device(engine._weights) < 0.35 * bytes_per_device(whole._weights)
  assert {x.sharding.spec[1] for x in engine._cache.keys + engine._cache.values} == {"tensor"}


def _positions(cache):
  return sum(x.nbytes for x in cache.position.values())


def test_trainer_log_probs_under_replay_are_the_samplers():
  _, out, _ = compiled_and_sampled()
  policy, params = built("moe")
  mesh = mesh_of("fsdp 4 tensor 2")
  score = make_scorer(policy, mesh=mesh, chunk=64)
  rows, width = 16, CAPACITY
  tokens, mask, logp = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool), np.zeros((rows, width))
  routing = np.full((rows, width, 2, 2), -1, np.int8)
  for i, c in enumerate(out):
    prompt = PROMPTS[i // 4]
    start, end = len(prompt), len(prompt) + len(c.ids)
    tokens[i, :end] = [*prompt, *c.ids]
    mask[i, start:end], logp[i, start:end] = True, c.logp_rollout
    routing[i, : end - 1] = c.routing
  position = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
  zeros, segment = np.zeros(tokens.shape, np.float32), np.where(np.arange(rows)[:, None] < len(out), 0, -1) + 0 * tokens

  def scored(routing):
    batch = TokenBatch(
      tokens=tokens, position=position, segment=segment.astype(np.int32), turn=0 * tokens, prefix_end=0 * tokens,
      mask=mask, advantage=zeros, weight=zeros, aggregate=zeros, logp_rollout=zeros,
      temperature=zeros + np.float32(RULES.temperature), routing=routing,
    )  # fmt: skip
    batch = jax.tree.map(lambda x: x[None], batch)
    return np.asarray(score(shard_params(params, policy.axes, mesh=mesh), batch, 1).logp)[0]

  np.testing.assert_allclose(scored(routing)[mask], logp[mask], atol=1e-5)
  others = np.where(routing >= 0, (routing + 1) % EXPERTS, -1).astype(np.int8)
  assert np.abs(scored(others)[mask] - logp[mask]).max() > 1e-2


# weights between meshes


def no_host():
  def refuse(self):
    raise AssertionError("an array went through the host")

  return mock.patch.object(arrays.ArrayImpl, "_value", property(refuse))


FOUR = {"fsdp 2 tensor 2": {"data": 1, "fsdp": 2, "tensor": 2}, "data 2 expert 2": {"data": 2, "expert": 2}}


@pytest.mark.parametrize("name", [slow("dense"), "moe"])
def test_weights_come_from_devices_of_the_trainer(name):
  policy, params = built(name)
  here = make_mesh(config.Mesh(**FOUR["data 2 expert 2"]), devices=jax.devices()[:4])
  there = make_mesh(config.Mesh(**FOUR["fsdp 2 tensor 2"]), devices=jax.devices()[4:])
  trained = shard_params(params, policy.axes, mesh=there)
  engine = engine_of(name, params=jax.tree.map(jnp.zeros_like, params), mesh=here)
  with no_host():
    engine.load(trained)
  assert all(x.devices() == set(here.devices.flat) for x in jax.tree.leaves((engine._weights, engine._cache)))
  assert_same(sampled(engine), on_one_device(name))


def test_parts_move_between_any_meshes_that_divide():
  x = jnp.arange(16 * 24.0).reshape(16, 24)
  devices = jax.devices()
  meshes = [
    make_mesh(config.Mesh(data=1, fsdp=4, tensor=2)),
    make_mesh(config.Mesh(data=2, tensor=4), devices=devices[::-1]),
    make_mesh(config.Mesh(data=1, fsdp=2, tensor=2), devices=devices[:4]),
    make_mesh(config.Mesh(data=1, tensor=4), devices=devices[2:6]),
    make_mesh(config.Mesh(data=1, fsdp=2), devices=devices[6:]),
    make_mesh(config.Mesh(data=1), devices=devices[5:6]),
  ]
  places = [NamedSharding(mesh, PartitionSpec("fsdp", "tensor")) for mesh in meshes]
  for source in places:
    for target in places:
      placed = jax.device_put(x, source)
      with no_host():
        moved = jax.jit(lambda x: x, out_shardings=target)(transfer(placed, target))
      assert moved.sharding == target
      np.testing.assert_array_equal(moved, x)
  with no_host(), pytest.raises(AssertionError, match="through the host"):
    jax.device_put(jax.device_put(x, places[0]), places[3])


def test_waiting_sessions_leave_the_mesh_and_come_back():
  """Four sessions in two rows, two turns each."""

  async def run(engine):
    sessions = [engine.open(prompt, index=i, key=jax.random.key(i)) for i, prompt in enumerate(prompts_of(9, 5, 12, 7))]
    turns = []
    for _ in range(2):
      for session in sessions:
        turns.append(await session.sample(RULES))
        session.append([1, 2])
    for session in sessions:
      session.close()
    return turns

  options = {"slots": 2, "offload": 4, "lockstep": False}
  engine = engine_of("moe", mesh=mesh_of("data 2 tensor 2 expert 2"), **options)
  assert_same(asyncio.run(run(engine)), asyncio.run(run(engine_of("moe", **options))))
  assert engine._read._cache_size() and engine._write._cache_size()


@pytest.mark.parametrize("change, mesh, said", [
  ({"vocab_size": 25}, "fsdp 4 tensor 2", r"\['embed'\]: dimension 'vocab' of size 25 .* 'tensor' of size 2"),
  ({"experts": 6}, "data 2 expert 4", r"\['down'\]: dimension 'experts' of size 6 .* 'expert' of size 4"),
])  # fmt: skip
def test_sizes_that_do_not_divide(change, mesh, said):
  policy = decoder_policy(dataclasses.replace(SHAPES["moe"], **change))
  with pytest.raises(ValueError, match=said):
    Engine(policy, policy.init(jax.random.key(0)), mesh=mesh_of(mesh))
