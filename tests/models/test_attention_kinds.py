"""Full, sliding and prefix-sliding layers: a dense mask for each, one scan, a cache of fixed size, meshes, files."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from random_params import random_params
from thinned import thinned

from jaxagent import config as run_config
from jaxagent.models import attention as packed
from jaxagent.models.cache import grow, reset_rows
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import Layer, decoder_policy, pattern
from jaxagent.models.layers import attention, rms_norm, rotation
from jaxagent.models.loading import config_from_hf, config_to_hf, export, load
from jaxagent.models.policy import on_mesh
from jaxagent.models.sharding import shard_params
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.truncation import truncate_backprop
from jaxagent.training.sharding import make_mesh
from jaxagent.types import Rollouts

W, ROOM, ROWS, LENGTH = 5, 16, 4, 40
SIZES = {"vocab_size": 50, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
DENSE = {**SIZES, "mlp_width": 40}
PREFIX = {"attention": "prefix_sliding", "window": W, "max_prefix": ROOM}
MIXED = ("full", "sliding", "prefix_sliding", "full")
CONFIGS = {
  "sliding": DecoderConfig(**DENSE, attention="sliding", window=W, qkv_bias=True),
  "prefix": DecoderConfig(**DENSE, **PREFIX),
  "mixed": DecoderConfig(**DENSE | {"layers": 4} | PREFIX | {"attention": MIXED}, qk_norm=True, tied=False),
  "moe": DecoderConfig(**SIZES, **PREFIX, experts=4, experts_per_token=2, expert_width=16),
}
CACHED = ["prefix", "mixed", "moe"]
DECODED = pytest.mark.parametrize("config", [CONFIGS[name] for name in CACHED], ids=CACHED)
AS_SHIPPED = packed.DENSE
REWIND = 2  # so that chunks of 3 are read from the cache and chunks of 7 from beside it


@pytest.fixture(autouse=True)
def short_rows_go_by_blocks_too(monkeypatch):
  monkeypatch.setattr(packed, "DENSE", {**AS_SHIPPED, "sliding": 0, "prefix_sliding": 0})


@functools.cache
def built(config):
  """Policy, parameters that are all at random, prepared weights, and the jitted functions."""
  policy = decoder_policy(config, rewind=REWIND)
  params = random_params(policy)
  return policy, params, jax.jit(policy.prepare)(params), jax.jit(policy.forward), jax.jit(policy.extend)


def tokens_of(seed=2):
  return jax.random.randint(jax.random.key(seed), (ROWS, LENGTH), 0, SIZES["vocab_size"])


def packed_rows():
  """Segments and prefix ends: a prefix longer than the window, none, one beyond the segment, and padding."""
  segment, end = np.full((ROWS, LENGTH), -1), np.zeros((ROWS, LENGTH), int)
  parts = [[(40, 9)], [(3, 1), (20, 0), (17, 8)], [(12, 12), (25, 6)], [(1, 1), (6, 30), (30, 4)]]
  for row, row_parts in enumerate(parts):
    at = 0
    for i, (size, prefix) in enumerate(row_parts):
      segment[row, at : at + size], end[row, at : at + size] = i, at + prefix
      at += size
  return jnp.asarray(segment, jnp.int32), jnp.asarray(end, jnp.int32)


def seen(kind, segment, prefix_end):
  """mask[b, t, s] by a loop over the statement of it."""
  mask = np.zeros((*segment.shape, segment.shape[1]), bool)
  for b, t in np.ndindex(segment.shape):
    for s in range(t + 1):
      near = kind == "full" or t - s < W or (kind == "prefix_sliding" and s < prefix_end[b, t])
      mask[b, t, s] = near and segment[b, t] == segment[b, s] >= 0
  return jnp.asarray(mask)


def dense_states(config, params, tokens, position, segment, prefix_end):
  """The forward pass with a dense mask for each layer."""
  masks = {k: seen(k, np.asarray(segment), np.asarray(prefix_end)) for k in set(config.kinds)}
  turn = rotation(position, config.head_dim, config.rope_theta)
  graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))

  def step(x, ins):
    layer, mask = ins

    def attend(q, k, v):
      read = attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask)
      return jnp.where((segment >= 0)[..., None], read, 0), None

    return nnx.merge(graph, layer)(x, turn, attend)[0], None

  each = jnp.stack([masks[k] for k in config.kinds])
  x, _ = jax.jit(lambda params: jax.lax.scan(step, params["embed"][tokens], (params["layers"], each)))(params)
  return rms_norm(x, params["final_norm"], config.norm_eps)


def whole(tokens, prefix):
  """Position, segment and prefix end of rows that are one sequence each."""
  position = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
  return (position, jnp.zeros_like(tokens)), jnp.broadcast_to(jnp.asarray(prefix)[:, None], tokens.shape)


def full_states(config, tokens, prefix):
  _, params, _, forward, _ = built(config)
  rows, end = whole(tokens, prefix)
  return forward(params, tokens, *rows, prefix_end=end).states


# forward


@thinned("config", list(reversed(CONFIGS.values())), every=2)
def test_forward_equals_a_loop_over_layers_with_the_dense_mask(config):
  _, params, _, forward, _ = built(config)
  tokens, (segment, end) = tokens_of(), packed_rows()
  position = jnp.asarray(np.random.default_rng(1).integers(0, 90, tokens.shape))  # no matter for the mask
  got = forward(params, tokens, position, segment, prefix_end=end).states
  want = dense_states(config, params, tokens, position, segment, end)
  np.testing.assert_allclose(got, want, atol=1e-5)


@functools.cache
def trained():
  """A policy with parameters and packed rows, a loss of its states, and the gradient and the states on one device."""
  policy = decoder_policy(DecoderConfig(**DENSE | {"vocab_size": 48}, **PREFIX))
  params = jax.jit(policy.init)(jax.random.key(0))
  tokens, segment, end = (jnp.concatenate([x, x[::-1]]) for x in (tokens_of() % 48, *packed_rows()))
  rows = (tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), segment, end)
  run = jax.jit(jax.grad(functools.partial(loss, states_of(policy)), has_aux=True))
  return policy, params, rows, *run(params, *rows)


def loss(states, params, *rows):
  """Of what `states` gives for parameters and rows, with these as an extra."""
  states = states(params, *rows)
  return jnp.sum(jnp.where((rows[2] >= 0)[..., None], jnp.sin(states), 0)), states


def states_of(policy):
  return lambda params, *rows: policy.forward(params, *rows[:3], prefix_end=rows[3]).states


def assert_gradients_close(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


@pytest.mark.slow
def test_gradients_equal_those_of_the_dense_mask():
  policy, params, rows, gradient, _ = trained()
  dense = functools.partial(loss, functools.partial(dense_states, policy.config))
  assert_gradients_close(jax.grad(lambda p: dense(p, *rows)[0])(params), gradient)


@pytest.mark.slow
def test_a_window_of_the_row_is_full_attention_and_one_less_is_not():
  q, k, v = (jax.random.normal(jax.random.key(i), (ROWS, LENGTH, heads, 8)) for i, heads in enumerate((4, 2, 2)))
  segment = jnp.zeros((ROWS, LENGTH), jnp.int32)
  want = packed.packed_attention(DecoderConfig(**DENSE), "full", segment, None)(q, k, v)
  for window, close in ((LENGTH, True), (LENGTH - 1, False)):
    config = DecoderConfig(**DENSE, attention="sliding", window=window)
    got = packed.packed_attention(config, "sliding", segment, None)(q, k, v)
    assert (float(jnp.abs(got - want).max()) < 1e-5) == close


def test_long_rows_of_full_attention_go_by_blocks(monkeypatch):
  config = DecoderConfig(**DENSE)
  policy, params, _, forward, _ = built(config)
  (segment, _), tokens = packed_rows(), tokens_of()
  rows = (tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), segment)
  want = forward(params, *rows).states
  monkeypatch.setattr(packed, "DENSE", {**packed.DENSE, "full": LENGTH - 1})
  by_blocks = jax.jit(lambda *arguments: policy.forward(*arguments).states)
  np.testing.assert_allclose(by_blocks(params, *rows), want, atol=1e-5)
  assert ["custom_vjp_call" in str(jax.make_jaxpr(f)(params, *rows)) for f in (by_blocks, forward)] == [True, False]


@pytest.mark.parametrize("name", ["sliding", "prefix", "mixed"])
def test_short_rows_take_the_dense_mask(name, monkeypatch):
  policy, params, _, forward, _ = built(CONFIGS[name])
  (segment, end), tokens = packed_rows(), tokens_of()
  rows = (tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), segment)
  want = forward(params, *rows, prefix_end=end).states
  monkeypatch.setattr(packed, "DENSE", AS_SHIPPED)
  dense = jax.jit(lambda *arguments: policy.forward(*arguments, prefix_end=end).states)
  np.testing.assert_allclose(dense(params, *rows), want, atol=1e-5)
  assert "custom_vjp_call" not in str(jax.make_jaxpr(dense)(params, *rows))


def test_bfloat16_stays_close():
  config = dataclasses.replace(CONFIGS["prefix"], dtype="bfloat16", remat=True)
  policy, params, weights, forward, extend = built(config)
  tokens, prefix = tokens_of(), [4, 5, 6, 15]
  rows, end = whole(tokens, prefix)
  full, exact = forward(params, tokens, *rows, prefix_end=end).states, full_states(CONFIGS["prefix"], tokens, prefix)
  hidden, cache = extend(weights, policy.cache(ROWS, LENGTH), tokens, rows[0], prefix_length=jnp.asarray(prefix))
  assert full.dtype == jnp.float32 and {x.dtype for x in (*cache.keys, *cache.values)} == {jnp.dtype("bfloat16")}
  scale = float(jnp.abs(exact).max())
  assert 1e-5 < float(jnp.abs(full - exact).max()) < 0.05 * scale
  assert float(jnp.abs(hidden.states - full).max()) < 0.05 * scale


@pytest.mark.parametrize(
  "kinds, parts",
  [
    ("ffff", [(0, 4, "f")]),
    ("f", [(0, 1, "f")]),
    ("fsfsfs", [(0, 6, "fs")]),
    ("sssfsssfss", [(0, 8, "sssf"), (8, 10, "s")]),
    ("ffffss", [(0, 4, "f"), (4, 6, "s")]),
    ("fs", [(0, 1, "f"), (1, 2, "s")]),
    ("fspfs", [(0, 1, "f"), (1, 2, "s"), (2, 3, "p"), (3, 4, "f"), (4, 5, "s")]),
    ("fspfspf", [(0, 6, "fsp"), (6, 7, "f")]),
  ],
)
def test_layers_are_scanned_by_the_unit_that_repeats(kinds, parts):
  assert pattern(tuple(kinds)) == [(start, end, tuple(unit)) for start, end, unit in parts]


def test_the_program_does_not_grow_with_depth():
  def scans(layers, attention):
    policy = decoder_policy(DecoderConfig(**DENSE | {"layers": layers} | PREFIX | {"attention": attention}))
    params, tokens = jax.eval_shape(policy.init, jax.random.key(0)), tokens_of()
    rows, end = whole(tokens, [3] * ROWS)
    program = jax.make_jaxpr(policy.forward)(params, tokens, *rows, prefix_end=end)
    outer = [e.params["length"] for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    return outer, str(program).count("dot_general")

  for unit in (("prefix_sliding",), ("full", "prefix_sliding")):
    short, long = (scans(layers, unit * (layers // len(unit))) for layers in (4, 12))
    assert short == ([4 // len(unit)], long[1]) and long[0] == [12 // len(unit)]


# the cache


def decode(config, chunks, tokens, prefix, cache, start=0):
  """States of tokens from `start` on, processed in chunks of these sizes."""
  _, _, weights, _, extend = built(config)
  position, states = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), []
  for size in chunks:
    part = slice(start, start + size)
    hidden, cache = extend(weights, cache, tokens[:, part], position[:, part], prefix_length=jnp.asarray(prefix))
    states.append(hidden.states)
    start += size
  return jnp.concatenate(states, 1), cache


CHUNKS = {
  "one by one": [1] * LENGTH,
  "from the cache": [3] * 12 + [1] * 4,
  "beside the cache": [7, 7, 7, 3, 1, 7, 1, 7],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@DECODED
def test_decoding_with_eviction_equals_the_full_forward(config, chunks):
  """Prefixes of W - 1, W, W + 1 and 3W tokens; the rows are used again, with other prefixes, without being cleared."""
  cache = built(config)[0].cache(ROWS, LENGTH)
  for seed, prefix in ((2, [W - 1, W, W + 1, 3 * W]), (3, [3 * W, 0, W - 1, W + 1]), (4, [1, 2 * W, 3, 16])):
    tokens = tokens_of(seed)
    got, cache = decode(config, chunks, tokens, prefix, cache)
    np.testing.assert_allclose(got, full_states(config, tokens, prefix), atol=1e-5)


@DECODED
def test_rows_that_are_cut_back_have_lost_nothing(config):
  tokens, prefix = tokens_of(), [4, 5, 6, 15]
  for held in (7, 14, 21, 35):  # inside prefixes, and where everything slides
    back = held - REWIND
    _, cache = decode(config, [7] * (held // 7), tokens, prefix, built(config)[0].cache(ROWS, LENGTH))
    other = jnp.concatenate([tokens[:, :back], tokens_of(9)[:, back:]], 1)
    got, _ = decode(config, [1, 3], other, prefix, cache, back)
    np.testing.assert_allclose(got, full_states(config, other, prefix)[:, back : back + 4], atol=1e-5)


def test_more_tokens_taken_back_than_there_is_slack_are_missed():
  config, prefix = CONFIGS["prefix"], [4, 5, 6, 15]
  tokens = tokens_of()
  _, cache = decode(config, [7] * 4, tokens, prefix, built(config)[0].cache(ROWS, LENGTH))
  for back, exact in ((28 - REWIND, True), (28 - REWIND - 2, False)):
    got, _ = decode(config, [1], tokens, prefix, cache, back)
    error = jnp.abs(got - full_states(config, tokens, prefix)[:, back : back + 1]).max()
    assert (float(error) < 1e-5) == exact


def test_padding_writes_nothing():
  """Rows of one call end, and begin, at different places."""
  config, prefix = CONFIGS["mixed"], jnp.array([4, 5, 6, 15])
  policy, _, weights, _, extend = built(config)
  tokens, cache, states = tokens_of(), policy.cache(ROWS, LENGTH), {}
  done = np.zeros(ROWS, int)
  rng = np.random.default_rng(5)
  while (done < LENGTH).any():
    size = np.minimum(rng.integers(0, 8, ROWS), LENGTH - done)
    lead = rng.integers(0, 8 - size)  # padding before the tokens, and after
    offset = np.arange(7) - lead[:, None]
    real = (offset >= 0) & (offset < size[:, None])
    position = np.where(real, done[:, None] + offset, -1)
    row = np.where(real, np.take_along_axis(np.asarray(tokens), np.maximum(position, 0), 1), 7)
    hidden, cache = extend(weights, cache, jnp.asarray(row), jnp.asarray(position), prefix_length=prefix)
    states |= {(b, position[b, i]): hidden.states[b, i] for b, i in zip(*np.nonzero(real))}
    done += size
  got = np.stack([[states[b, t] for t in range(LENGTH)] for b in range(ROWS)])
  np.testing.assert_allclose(got, full_states(config, tokens, prefix), atol=1e-5)


def bytes_of(policy, capacity):
  shapes = jax.eval_shape(functools.partial(policy.cache, ROWS, capacity))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name, slots", [("sliding", W + REWIND), ("prefix", ROOM + W + REWIND)])
def test_the_cache_of_layers_that_slide_does_not_grow(name, slots):
  policy, c = built(CONFIGS[name])[0], CONFIGS[name]
  want = ROWS * slots * (c.layers * 2 * c.kv_heads * c.head_dim + 1) * 4
  assert {bytes_of(policy, capacity) for capacity in (1, 64, 10**6)} == {want}
  cache = policy.cache(ROWS, 8)
  assert cache.capacity is None and grow(cache, 10**6) is cache


def test_only_layers_of_full_attention_grow():
  config = CONFIGS["mixed"]
  policy = built(config)[0]
  one = ROWS * (2 * 2 * config.kv_heads * config.head_dim + 1) * 4  # a slot in the two full layers, and its position
  assert bytes_of(policy, 100) - bytes_of(policy, 60) == 40 * one
  tokens, prefix = tokens_of(), [4, 5, 6, 15]
  _, cache = decode(config, [7, 7], tokens, prefix, policy.cache(ROWS, 14))
  cache = grow(cache, LENGTH)
  assert cache.capacity == LENGTH
  got, _ = decode(config, [7, 1], tokens, prefix, cache, 14)
  np.testing.assert_allclose(got, full_states(config, tokens, prefix)[:, 14:22], atol=1e-5)
  bucket = jax.jit(policy.extend, static_argnames="slots")
  arguments = (built(config)[2], cache, tokens[:, 14:15], jnp.full((ROWS, 1), 14))
  hidden, _ = bucket(*arguments, prefix_length=jnp.asarray(prefix), slots=16)
  np.testing.assert_allclose(hidden.states, full_states(config, tokens, prefix)[:, 14:15], atol=1e-5)
  emptied = reset_rows(cache, jnp.arange(ROWS) < 1).position
  assert all((held[0] == -1).all() and (held[1] >= 0).any() for held in emptied.values())


# meshes


def on_devices(sizes):
  """The policy that knows the mesh, with recomputed activations too, and parameters and rows on it."""
  policy, params, rows, *_ = trained()
  policy = decoder_policy(dataclasses.replace(policy.config, remat=True))
  mesh = make_mesh(run_config.Mesh(**sizes))
  placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
  return on_mesh(policy, mesh), shard_params(params, policy.axes, mesh=mesh), placed


@pytest.mark.slow
def test_rows_over_a_mesh_change_nothing():
  policy, params, rows = on_devices({"data": 8})
  np.testing.assert_allclose(jax.jit(states_of(policy))(params, *rows), trained()[-1], atol=1e-5)


def test_heads_over_a_mesh_change_nothing():
  """Attention runs on each device for its rows and heads; two key heads serve four devices."""
  policy, params, rows = on_devices({"data": 1, "fsdp": 2, "tensor": 4})
  run = jax.grad(functools.partial(loss, states_of(policy)), has_aux=True)
  assert "shard_map" in str(jax.make_jaxpr(run)(params, *rows))
  gradient, states = jax.jit(run)(params, *rows)
  np.testing.assert_allclose(states, trained()[-1], atol=1e-5)
  assert_gradients_close(gradient, trained()[-2])


def test_rows_and_heads_that_do_not_divide_stay_whole():
  config = DecoderConfig(**DENSE | {"heads": 6, "kv_heads": 2}, **PREFIX)
  policy, params, _, forward, _ = built(config)
  tokens = tokens_of()[:3]
  rows, end = whole(tokens, [4, 5, 15])
  mesh = make_mesh(run_config.Mesh(data=2, tensor=4))
  placed = jax.device_put((params, tokens, *rows, end), NamedSharding(mesh, PartitionSpec()))
  got = jax.jit(lambda *x: on_mesh(policy, mesh).forward(*x[:-1], prefix_end=x[-1]).states)(*placed)
  np.testing.assert_allclose(got, forward(params, tokens, *rows, prefix_end=end).states, atol=1e-5)


# training on the end of a rollout


LAYERS_W, LAYERS_LENGTH = 4, 56


@functools.cache
def truncated_gradient(layers):
  config = DecoderConfig(**DENSE | {"layers": layers}, attention="prefix_sliding", window=LAYERS_W, max_prefix=9)
  policy, params, *_ = built(config)

  @jax.jit
  def gradient(tokens, position, mask, length, prefix):
    segment = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], 0, -1)
    end = jnp.broadcast_to(prefix[:, None], tokens.shape)

    def loss(params):
      states = policy.forward(params, tokens, position, segment, prefix_end=end).states
      logp = jax.nn.log_softmax(policy.head(params, states[:, :-1]))
      return -jnp.sum(jnp.where(mask[:, 1:], jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0], 0))

    return jax.flatten_util.ravel_pytree(jax.grad(loss)(params))[0]

  def of(rollouts):
    pad = ((0, 0), (0, LAYERS_LENGTH - rollouts.tokens.shape[1]))  # one shape: one program
    columns = (jnp.pad(x, pad) for x in (rollouts.tokens, rollouts.position, rollouts.mask))
    return gradient(*columns, jnp.asarray(rollouts.length), jnp.asarray(rollouts.prefix_length))

  return of


def rollouts_of(lengths, prefixes):
  n, t = len(lengths), max(lengths)
  rng, place = np.random.default_rng(3), np.arange(t)[None]
  length, prefix = np.array(lengths), np.array(prefixes)
  zero, mask = np.zeros(n), (place >= prefix[:, None]) & (place < length[:, None])
  return Rollouts(
    tokens=rng.integers(0, 50, (n, t)), position=np.broadcast_to(place, (n, t)), mask=mask, turn=np.where(mask, 0, -1),
    length=length, prefix_length=prefix, rollout=np.arange(n), agent=zero, group=zero, env=zero, task=zero,
    outcome=zero, reward=zero, turn_reward=zero[:, None], valid=zero == 0, truncated=zero > 0, temperature=zero + 1,
    logp_rollout=np.zeros((n, t)),
  )  # fmt: skip


LONG = rollouts_of([56, 51, 40], [3, 9, 6])


@thinned("layers", [2, 1, 3], every=3)
def test_truncated_backprop_is_exact_for_few_layers(layers):
  assert 3 * LAYERS_W - 1 >= layers * (LAYERS_W - 1)
  gradient, cut = truncated_gradient(layers), truncate_backprop(LONG, window=LAYERS_W, multiplier=4)
  assert cut.tokens.shape[1] == 9 + 4 * LAYERS_W < LONG.tokens.shape[1]
  want = gradient(truncate_backprop(LONG, window=LAYERS_W, multiplier=100))
  assert float(jnp.linalg.norm(gradient(cut) - want)) < 1e-5 * float(jnp.linalg.norm(want))


def test_the_error_of_truncated_backprop_falls_with_the_multiplier():
  gradient = truncated_gradient(6)
  want = gradient(truncate_backprop(LONG, window=LAYERS_W, multiplier=100))
  cuts = [gradient(truncate_backprop(LONG, window=LAYERS_W, multiplier=m)) for m in (1, 2, 3, 4, 5, 6)]
  errors = [float(jnp.linalg.norm(cut - want) / jnp.linalg.norm(want)) for cut in cuts]
  assert all(later < earlier for earlier, later in itertools.pairwise(errors)), errors
  assert errors[3] > 1e-5 > errors[5], errors  # 5 W - 1 >= 6 (W - 1)


def test_short_rollouts_are_trained_on_as_ever():
  short = rollouts_of([7, 13, 9], [3, 9, 6])
  cut = truncate_backprop(short, window=LAYERS_W)
  gradient = truncated_gradient(2)
  np.testing.assert_array_equal(gradient(cut), gradient(short))


# configs and files


@pytest.mark.parametrize(
  "change, message",
  [
    ({"attention": "local"}, "attention must be made of full, sliding, prefix_sliding, got 'local'"),
    ({"attention": None}, "attention must be a name or several, got None"),
    ({"attention": ("full",) * 3}, "one for each of the 2 layers, got 3"),
    ({"attention": ()}, "one for each of the 2 layers, got 0"),
    ({"attention": "sliding"}, "'sliding' needs a positive window, got 0; set window"),
    ({"attention": "sliding", "window": -1}, "needs a positive window, got -1"),
    ({"attention": "prefix_sliding", "window": 4}, "needs a positive max_prefix, got 0"),
    ({"window": 4}, "window is for sliding or prefix_sliding layers, got window=4 with attention 'full'"),
    ({"attention": "sliding", "window": 4, "max_prefix": 2}, "max_prefix is for prefix_sliding layers"),
    ({"attention": "sliding", "window": 4.0}, "window must be a number of tokens, got 4.0"),
  ],
)
def test_a_config_that_does_not_fit_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    DecoderConfig(**DENSE | change)


def test_kinds_of_a_config():
  assert DecoderConfig(**DENSE).kinds == ("full", "full")
  mixed = DecoderConfig(**DENSE, attention=["full", "sliding"], window=4)  # as YAML gives it
  assert mixed.kinds == mixed.attention == ("full", "sliding") and hash(mixed)
  assert DecoderConfig(**DENSE, attention=["full", "full"]) == DecoderConfig(**DENSE)


def test_what_is_missing_is_asked_for():
  policy, params, weights, *_ = built(CONFIGS["prefix"])
  tokens = tokens_of()
  (position, segment), _ = whole(tokens, [3] * ROWS)
  cache, length = policy.cache(ROWS, LENGTH), jnp.full(ROWS, 3)
  cases = [
    (lambda: policy.forward(params, tokens, position, segment), r"needs prefix_end of shape \(4, 40\)"),
    (lambda: policy.forward(params, tokens, position, segment, prefix_end=length), r"must have shape \(4, 40\)"),
    (lambda: policy.extend(weights, cache, tokens, position), r"needs prefix_length of shape \(4,\)"),
    (lambda: policy.extend(weights, cache, tokens, position, prefix_length=length + 14), "17 exceeds .* max_prefix 16"),
  ]
  for call, message in cases:
    with pytest.raises(ValueError, match=message):
      call()
  assert (policy.max_prefix, policy.rewind) == (ROOM, REWIND)
  sliding = decoder_policy(CONFIGS["sliding"])
  assert sliding.max_prefix is None and sliding.rewind > 0
  full = decoder_policy(DecoderConfig(**DENSE))
  assert (full.max_prefix, full.rewind) == (None, None)


QWEN = {"use_sliding_window": True, "sliding_window": 32}
HF = {
  "qwen2": config_to_hf(DecoderConfig(**DENSE, qkv_bias=True), "qwen2"),
  "qwen3_moe": config_to_hf(dataclasses.replace(CONFIGS["moe"], **{k: 0 for k in ("window", "max_prefix")}, attention="full", qk_norm=True), "qwen3_moe"),  # noqa: E501
  "llama": config_to_hf(DecoderConfig(**DENSE), "llama"),
}  # fmt: skip
HF["mistral"] = HF["llama"] | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
  "kind, change, want",
  [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}, ("full", 0)),
    ("qwen2", QWEN | {"max_window_layers": 1}, (("full", "sliding"), 32)),
    ("qwen2", QWEN | {"max_window_layers": 0}, ("sliding", 32)),
    ("qwen2", QWEN, ("full", 0)),  # transformers' default: from layer 28 on
    ("qwen2", QWEN | {"layer_types": TYPES}, (("sliding", "full"), 32)),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, ("sliding", 4096)),
    ("qwen3_moe", QWEN, ("sliding", 32)),
    ("qwen3_moe", QWEN | {"layer_types": TYPES}, "layer types of two kinds, which a Qwen3MoeForCausalLM"),
    ("mistral", {"sliding_window": 32}, ("sliding", 32)),
    ("mistral", {"sliding_window": None}, ("full", 0)),
    ("mistral", {}, ("sliding", 4096)),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "for no layer that slides"),
    ("llama", {"sliding_window": 32}, r"\(sliding_window 32\), which a LlamaForCausalLM does not have"),
    ("qwen2", {"layer_types": TYPES}, "layer types that slide, but for no sliding window"),
  ],
)
def test_windows_of_hugging_face_configs(kind, change, want):
  if isinstance(want, str):
    with pytest.raises(ValueError, match=want):
      config_from_hf(HF[kind] | change)
  else:
    config = config_from_hf(HF[kind] | change)
    assert (config.attention, config.window) == want


FILES = {
  "mistral": DecoderConfig(**DENSE | {"vocab_size": 261}, attention="sliding", window=7),
  "qwen2": DecoderConfig(**DENSE | {"vocab_size": 261}, attention=("full", "sliding"), window=7, qkv_bias=True),
  "qwen3": DecoderConfig(**DENSE | {"vocab_size": 261}, attention=("sliding", "full"), window=7, qk_norm=True),
  "qwen3_moe": DecoderConfig(
    **SIZES | {"vocab_size": 261}, attention="sliding", window=7, qk_norm=True, experts=3, experts_per_token=2,
    expert_width=16, mlp_width=0,
  ),
}  # fmt: skip


@pytest.mark.parametrize("kind, config", FILES.items(), ids=FILES)
def test_an_exported_window_is_loaded_again(kind, config, tmp_path):
  assert config.architecture == kind
  params = jax.tree.map(np.asarray, decoder_policy(config).init(jax.random.key(1)))
  loaded = load(export(tmp_path / "model", config, params, byte_tokenizer()))
  assert loaded.config == config
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_prefix_sliding_is_trained_from_a_model_that_saw_everything(tmp_path):
  config = dataclasses.replace(FILES["qwen2"], attention="prefix_sliding", max_prefix=9)
  params = jax.tree.map(np.asarray, decoder_policy(config).init(jax.random.key(1)))
  with pytest.raises(ValueError, match="no transformers architecture has prefix_sliding attention; export the weights"):
    export(tmp_path / "model", config, params, byte_tokenizer())
  full = dataclasses.replace(config, attention="full", window=0, max_prefix=0)
  path = export(tmp_path / "model", full, params, byte_tokenizer())
  assert load(path).config == full
  assert load(path, attention="prefix_sliding", window=7, max_prefix=9).config == config
  assert load(path, attention=["full", "sliding"], window=7).config == FILES["qwen2"]
  with pytest.raises(ValueError, match="window is for sliding"):
    load(path, window=7)
  with pytest.raises(ValueError, match="llama has both full and sliding layers"):
    _ = dataclasses.replace(FILES["mistral"], attention=("full", "sliding")).architecture


def test_yaml_and_the_command_line_say_it_too(tmp_path):
  file = tmp_path / "run.yaml"
  file.write_text("model:\n  shape: {attention: [full, sliding], window: 32}\n")
  shape = run_config.load(file, ["--model.shape.window", "64"]).model.shape
  assert DecoderConfig(**DENSE, **shape) == DecoderConfig(**DENSE, attention=("full", "sliding"), window=64)
  named = ["--model.shape.attention", "prefix_sliding", "--model.shape.window=64", "--model.shape.max_prefix=9"]
  config = DecoderConfig(**DENSE, **run_config.load(None, named).model.shape)
  assert (config.kinds, config.window, config.max_prefix) == (("prefix_sliding",) * 2, 64, 9)
