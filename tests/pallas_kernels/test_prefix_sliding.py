"""Forward and gradients of every implementation that runs here, against the dense definition and a loop."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from thinned import thinned

from pallas_kernels.prefix_sliding import prefix_sliding_attention, xla
from pallas_kernels.prefix_sliding.mask import dense_mask, segment_start, visible
from pallas_kernels.prefix_sliding.softmax import Options

WIDTH, LENGTH = 16, 83
PREFIXES = {"none": 0, "unaligned": 13, "long": 2 * LENGTH}
GROUPS = {"one": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
WINDOWS = {"1": 1, "tile": 16, "tile+1": 17, "row-1": LENGTH - 1, "row": LENGTH}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  """Blocks of 24 queries and tiles of 16 keys, so that a short row has several of each and divides into none."""
  monkeypatch.setattr(xla, "block_sizes", lambda length, window: (24, 16))


def rows(packed: bool, prefix: int, length: int = LENGTH):
  """segment and prefix_end of two rows; packed ones begin and end with padding and have prefixes of their own."""
  segment, end = np.zeros((2, length), np.int32), np.full((2, length), prefix, np.int32)
  if packed:
    for b, cuts in enumerate(([3, 20, 21, 60, length - 4], [0, 40, 47, length])):
      segment[b] = -1
      for n, (low, high) in enumerate(itertools.pairwise(cuts)):
        segment[b, low:high], end[b, low:high] = n, low + (prefix * (n + 2)) // 3
  return jnp.asarray(segment), jnp.asarray(end)


def arrays(heads: int, kv_heads: int, dtype=jnp.float32, length: int = LENGTH, seed: int = 0):
  """q, k, v and the cotangent of the output."""
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(2, h, length, WIDTH)), dtype) for h in (heads, kv_heads, kv_heads, heads))


@partial(jax.jit, static_argnames=("implementation", "window", "soft_cap"))
def value_and_gradients(q, k, v, g, segment, prefix_end, **static):
  def attend(q, k, v):
    return prefix_sliding_attention(q, k, v, segment=segment, prefix_end=prefix_end, scale=0.3, **static)

  out, pullback = jax.vjp(attend, q, k, v)
  return out, *pullback(g)


def relative(got, want):
  want = np.asarray(want, np.float32)
  return np.abs(np.asarray(got, np.float32) - want).max() / max(np.abs(want).max(), 1.0)


def agree(arguments, tolerance, **static):
  got = value_and_gradients(*arguments, implementation="xla", **static)
  exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments]
  want = value_and_gradients(*exact, implementation="reference", **static)
  for name, x, y, like in zip(("out", "dq", "dk", "dv"), got, want, (arguments[0], *arguments)):
    assert x.dtype == like.dtype
    assert relative(x, y) < tolerance, name


@thinned("window, prefix, packed", WINDOWS, PREFIXES, [False, True], every=7)
def test_float32(packed, prefix, window):
  agree((*arrays(4, 2), *rows(packed, PREFIXES[prefix])), 1e-5, window=WINDOWS[window])


@thinned("prefix, packed", PREFIXES, [False, True], every=3)
def test_bfloat16_within_a_hundredth_of_float32(packed, prefix):
  agree((*arrays(4, 2, jnp.bfloat16), *rows(packed, PREFIXES[prefix])), 1e-2, window=16)


@pytest.mark.parametrize("group, soft_cap", [("one", None), ("mqa", None), ("gqa", 1.5)])
def test_heads_and_soft_cap(group, soft_cap):
  agree((*arrays(*GROUPS[group]), *rows(True, 13)), 1e-5, window=9, soft_cap=soft_cap)


@pytest.mark.parametrize("length", [1, 24, 25, 96])
def test_rows_of_any_length(length):
  agree((*arrays(2, 1, length=length), *rows(False, 3, length)), 1e-5, window=5)


def test_the_definition_in_a_loop():
  (q, k, v, _), (segment, end) = arrays(4, 2), rows(True, 13)
  out = prefix_sliding_attention(q, k, v, segment=segment, prefix_end=end, window=5, scale=0.3)
  for b, h, t in np.random.default_rng(1).integers(0, (2, 4, LENGTH), (60, 3)):
    keys = [s for s in range(t + 1) if segment[b, s] == segment[b, t] >= 0 and (s < end[b, t] or t - s < 5)]
    weight = np.exp([0.3 * float(q[b, h, t] @ k[b, h // 2, s]) for s in keys])
    want = sum((w * v[b, h // 2, s] for w, s in zip(weight / weight.sum(), keys)), np.zeros(WIDTH))
    np.testing.assert_allclose(out[b, h, t], want, atol=1e-5)


def test_the_mask_by_hand():
  """A prefix of 2 and a window of 3: the picture of the paper."""
  want = """1000000000 1100000000 1110000000 1111000000 1111100000
            1101110000 1100111000 1100011100 1100001110 1100000111"""
  mask = dense_mask(jnp.zeros((1, 10), jnp.int32), jnp.full((1, 10), 2), 3)[0]
  assert [("".join("01"[int(x)] for x in row)) for row in mask] == want.split()


@pytest.mark.parametrize("window", [1, 4, None])
def test_starts_say_what_segments_say(window):
  segment, end = rows(True, 13)
  t = jnp.arange(LENGTH)
  got = visible(t[None, None], t[None, :, None], segment_start(segment)[..., None], end[..., None], window)
  np.testing.assert_array_equal(got, dense_mask(segment, end, window))
  assert (np.diff(segment_start(segment), axis=1) >= 0).all()


def test_padding_gives_zeros_in_the_output_and_the_gradients():
  segment, end = rows(True, 13)
  for x, name in zip(value_and_gradients(*arrays(4, 2), segment, end, window=5, implementation="xla"), "oqkv"):
    assert (np.moveaxis(np.asarray(x), 2, 1)[np.asarray(segment) < 0] == 0).all(), name
    assert np.isfinite(x).all()
  nothing = value_and_gradients(*arrays(4, 2), jnp.full_like(segment, -1), end, window=5, implementation="xla")
  assert all((np.asarray(x) == 0).all() for x in nothing)


@pytest.mark.slow
def test_one_packed_row_equals_its_sequences_alone():
  (q, k, v, _), (segment, end) = arrays(4, 2), rows(True, 13)
  attend = partial(prefix_sliding_attention, window=5, scale=0.3)
  packed = attend(q, k, v, segment=segment, prefix_end=end)
  for low, high in ((3, 20), (20, 21), (21, 60)):
    part = [x[:1, :, low:high] for x in (q, k, v)]
    alone = attend(*part, segment=segment[:1, low:high] * 0, prefix_end=end[:1, low:high] - low)
    np.testing.assert_allclose(packed[:1, :, low:high], alone, atol=1e-6)


def test_large_scores_stay_finite():
  q, k, v, g = arrays(2, 1)
  out = value_and_gradients(1e3 * q, 1e3 * k, v, g, *rows(True, 13), window=5, implementation="xla")
  assert all(np.isfinite(x).all() for x in out)


def test_batch_and_key_heads_over_a_mesh():
  """Under shard_map each device has its rows and key heads; the result is that of one device."""
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(auto, auto), devices=jax.devices()[:4])
  heads, row = PartitionSpec("data", "tensor"), PartitionSpec("data")
  arguments = (*arrays(4, 2), *rows(True, 13))
  run = partial(value_and_gradients, window=5, implementation="xla")
  sharded = jax.shard_map(run, mesh=mesh, in_specs=(*(heads,) * 4, row, row), out_specs=(heads,) * 4, check_vma=False)
  for got, want in zip(jax.jit(sharded)(*arguments), run(*arguments)):
    np.testing.assert_allclose(got, want, atol=1e-5)


def temporary(length, window, monkeypatch):
  """Bytes of temporaries of forward and backward of one row."""
  monkeypatch.setattr(xla, "block_sizes", lambda length, window: (64, 64))
  q, k = (jax.ShapeDtypeStruct((1, h, length, WIDTH), jnp.float32) for h in (2, 1))
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
  run = jax.jit(partial(value_and_gradients.__wrapped__, window=window, implementation="xla"))
  return run.lower(q, k, k, q, ids, ids).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("window", [128, None])
def test_memory_is_linear_in_the_row(window, monkeypatch):
  short, middle, long = (temporary(n, window, monkeypatch) for n in (1024, 2048, 4096))
  assert long - middle < 2.2 * (middle - short)


def walked(length, window, prefix):
  """Tiles that the blocks of a row walk."""
  q, k = (jnp.zeros((1, 1, length, WIDTH)) for _ in range(2))
  start, end = jnp.zeros((1, length), jnp.int32), jnp.full((1, length), prefix)
  walk = xla.Walk(q, k, start, end, Options(window, 1.0, None))
  blocks = [walk.block(i) for i in range(walk.blocks)]
  return sum(int(block.prefix_tiles + block.window_tiles) for block in blocks)


def test_tiles_are_linear_in_the_row_for_a_finite_window():
  """(prefix 1 tile) + (window and block: ceil(39 / 16) = 3 tiles) for each block of 24, but near the row's start."""
  assert walked(24 * 100, 16, 10) == 4 * 100 - 2
  assert walked(24 * 200, 16, 10) == 4 * 200 - 2
  assert walked(24 * 20, None, 0) == sum(-(-24 * (i + 1) // 16) for i in range(20))


ids = jnp.zeros((2, LENGTH), jnp.int32)
REFUSED = {
  "window": (dict(window=0), r"window must be an int of at least 1 .* got 0; None is causal"),
  "window of float": (dict(window=4.0), "window must be an int"),
  "heads": (dict(q=arrays(3, 2)[0]), "key heads must divide query heads, got 3 query and 2"),
  "dtype": (dict(q=arrays(4, 2)[0].astype(jnp.bfloat16)), "q, k and v must have one float dtype"),
  "rank": (dict(q=jnp.zeros((4, LENGTH, WIDTH))), r"q must be \[B, H, T, D\]"),
  "values": (dict(v=jnp.zeros((2, 2, LENGTH, 2 * WIDTH))), "k and v must have one shape"),
  "width": (dict(q=jnp.zeros((2, 4, LENGTH, 2 * WIDTH))), "agree in batch and head width"),
  "length": (dict(q=jnp.zeros((2, 4, 9, WIDTH))), "must have one length, got 9 and 83; use prefix_sliding_decode"),
  "prefix": (dict(prefix_end=ids - 1), "prefix_end must not be negative, got -1; 0 is no prefix"),
  "segment": (dict(segment=ids[:, 1:]), r"segment must be integers of shape \[2, 83\]"),
  "prefix of float": (dict(prefix_end=ids * 1.0), "prefix_end must be integers of shape"),
  "soft_cap": (dict(soft_cap=0.0), "soft_cap must be above 0, got 0.0; None is no cap"),
  "implementation": (dict(implementation="cuda"), "one of tpu, xla, gpu, reference or None, got 'cuda'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_tracing(case):
  changed, said = REFUSED[case]
  q, k, v, _ = arrays(4, 2)
  arguments = dict(q=q, k=k, v=v, segment=ids, prefix_end=ids, window=4, scale=1.0) | changed
  with pytest.raises(ValueError, match=said):
    prefix_sliding_attention(**arguments)
