"""The Mosaic TPU kernels, interpreted on the CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from thinned import thinned

from pallas_kernels.backend import Implementation
from pallas_kernels.prefix_sliding import api, mask, plan, prefix_sliding_attention, tpu

WIDTH = 16


def interpreter(interpret):
  return Implementation(partial(tpu.forward, interpret=interpret), partial(tpu.backward, interpret=interpret))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """Tiles of 32, so that short rows have several."""
  monkeypatch.setattr(tpu, "tile_size", lambda length: 32)
  monkeypatch.setitem(api.IMPLEMENTATIONS, "interpreted", interpreter(True))
  monkeypatch.setitem(api.IMPLEMENTATIONS, "races", interpreter(pltpu.InterpretParams(detect_races=True)))


def rows(packed, prefix, length):
  segment, end = np.zeros((2, length), np.int32), np.full((2, length), prefix, np.int32)
  if packed:
    for b, cuts in enumerate(([3, 40, 41, 100, length - 4], [0, 95, 97, length])):
      segment[b] = -1
      for n, low in enumerate(cuts[:-1]):
        segment[b, low : cuts[n + 1]], end[b, low : cuts[n + 1]] = n, low + (prefix * (n + 1)) // 3
  return jnp.asarray(segment), jnp.asarray(end)


def arrays(heads, kv_heads, length, dtype=jnp.float32, batch=2):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.asarray(rng.normal(size=(batch, h, length, WIDTH)), dtype) for h in (heads, kv_heads, kv_heads, heads)
  )


@partial(jax.jit, static_argnames=("implementation", "window", "soft_cap"))
def value_and_gradients(q, k, v, g, segment, prefix_end, **static):
  def attend(q, k, v):
    return prefix_sliding_attention(q, k, v, segment=segment, prefix_end=prefix_end, scale=0.3, **static)

  out, pullback = jax.vjp(attend, q, k, v)
  return out, *pullback(g)


def agree(arguments, tolerance, implementation="interpreted", **static):
  got = value_and_gradients(*arguments, implementation=implementation, **static)
  exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments]
  want = value_and_gradients(*exact, implementation="reference", **static)
  for name, x, y in zip(("out", "dq", "dk", "dv"), got, want):
    x, y = np.asarray(x, np.float32), np.asarray(y)
    assert np.abs(x - y).max() < tolerance * max(np.abs(y).max(), 1.0), name


@thinned("window, prefix, packed", [1, 32, 33, None], [0, 45, 300], [False, True], every=5)
def test_float32(packed, prefix, window):
  agree((*arrays(4, 2, 150), *rows(packed, prefix, 150)), 1e-5, window=window)


@thinned("prefix, packed", [0, 45, 300], [False, True], every=3)
def test_bfloat16_within_a_hundredth_of_float32(packed, prefix):
  agree((*arrays(4, 2, 150, jnp.bfloat16), *rows(packed, prefix, 150)), 1e-2, window=32)


@thinned("heads, length", [(2, 2), (3, 1)], [20, 131], every=3)
def test_heads_lengths_and_soft_cap(heads, length):
  agree((*arrays(*heads, length), *rows(False, 7, length)), 1e-5, window=9, soft_cap=1.5)


@pytest.mark.slow
def test_no_races_forward_and_backward(capfd):
  """Prefix, window, packing and both passes of dkv, in the interpreter that watches memory: it raises, or prints."""
  segment, end = rows(True, 45, 128)
  agree((*arrays(2, 1, 128, batch=1), segment[:1], end[:1]), 1e-5, implementation="races", window=20)
  said = capfd.readouterr()
  assert "RACE" not in said.out + said.err


def pairs_of_queries(start, end, window, tiles):
  """Pairs (row, query tile, key tile) that the forward walks, in order."""
  walk = plan.query_plan(start, end, window, tiles)
  flat = [x.reshape(-1) for x in walk]
  for b in range(start.shape[0]):
    for i in range(tiles.row_tiles):
      n = b * tiles.row_tiles + i
      yield from ((b, i, int(tpu.walk_tile(flat, n, j))) for j in range(int(flat[3][n])))


def pairs_of_keys(start, end, window, tiles):
  for walk in plan.key_plans(start, end, window, tiles):
    for b in range(start.shape[0] if walk else 0):
      for tile, first, count in zip(*(np.asarray(x[b]) for x in walk)):
        yield from ((b, i, int(tile)) for i in range(first, first + count))


TILES = (8, 8), (8, 16), (16, 8)  # keys, queries


@thinned("packed, prefix, window, sizes", [False, True], [0, 13, 500], [1, 8, 9, 40, None], TILES, every=7)
def test_the_plans_visit_every_pair_that_matters_once(packed, prefix, window, sizes):
  keys, queries = sizes
  segment, end = rows(packed, prefix, 160)
  tiles = plan.Tiles(queries, keys, 160 // queries, 160 // keys)
  seen = np.asarray(mask.dense_mask(segment, end, window))
  seen = seen.reshape(2, tiles.row_tiles, queries, tiles.key_tiles, keys).any((2, 4))
  start = mask.segment_start(segment)
  for pairs in (list(pairs_of_queries(start, end, window, tiles)), list(pairs_of_keys(start, end, window, tiles))):
    assert len(set(pairs)) == len(pairs)
    assert {tuple(map(int, pair)) for pair in np.argwhere(seen)} <= set(pairs)
    assert len(pairs) <= seen.sum() + 4 * (tiles.row_tiles + tiles.key_tiles)  # rounding to contiguous tiles


def test_refuses_where_it_cannot_run():
  q, k, v, _ = arrays(2, 1, 32)
  segment, end = rows(False, 3, 32)
  with pytest.raises(ValueError, match="'tpu' runs on tpu and the backend is cpu; leave it None"):
    prefix_sliding_attention(
      q, k, v, segment=segment, prefix_end=end, window=4, scale=1.0, implementation="tpu"
    )
