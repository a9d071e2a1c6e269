"""Decoding from a cache of fixed size equals attention to the whole sequence under the mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thinned import thinned

from pallas_kernels.backend import Implementation
from pallas_kernels.prefix_sliding import cache_slot, decode, prefix_sliding_attention, prefix_sliding_decode

WIDTH, ROOM = 16, 20  # slots for the prefix


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  run = Implementation(partial(decode.tpu_decode, interpret=True))
  monkeypatch.setitem(decode.IMPLEMENTATIONS, "interpreted", run)


def arrays(heads, kv_heads, length, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(2, h, length, WIDTH)), dtype) for h in (heads, kv_heads, kv_heads))


def whole(q, k, v, prefix_length, window, **options):
  """Attention of the whole sequences, dense."""
  segment = jnp.zeros((2, q.shape[2]), jnp.int32)
  end = jnp.broadcast_to(prefix_length[:, None], segment.shape)
  return prefix_sliding_attention(
    q, k, v, segment=segment, prefix_end=end, window=window, implementation="reference", **options
  )


def written(cache, k, v, position, prefix_length, ring):
  """The cache after the keys at `position` [B, t] were written."""
  keys, values, held = cache
  slot = cache_slot(position, prefix_length[:, None], slots=keys.shape[2], ring=ring)
  row = jnp.arange(2)[:, None]
  put = lambda to, x: to.at[row, :, slot].set(x[row, :, position])  # noqa: E731
  return put(keys, k), put(values, v), held.at[row, slot].set(position)


def decoded(q, k, v, prefix_length, window, *, new=1, spoiled=0.0, **options):
  """Outputs [B, H, T, D] of decoding token by token, or `new` at a time, from a cache that held something else."""
  ring = window + new - 1
  slots = ROOM + ring
  cache = jnp.full((2, k.shape[1], slots, WIDTH), spoiled, k.dtype)
  cache = cache, cache, jnp.full((2, slots), -1)
  step = jax.jit(partial(prefix_sliding_decode, window=window, **options))
  out = []
  for low in range(0, q.shape[2], new):
    position = jnp.broadcast_to(jnp.arange(low, low + new), (2, new))
    cache = written(cache, k, v, position, prefix_length, ring)
    out.append(step(q[:, :, low : low + new], *cache, position, prefix_length))
  return jnp.concatenate(out, axis=2)


@thinned("window, prefix, implementation", [1, 8], [(0, 0), (3, 20), (11, 7)], ["xla", "interpreted"], every=5)
def test_eviction_equals_the_mask(implementation, prefix, window):
  """Past prefix + 3 windows, so that every slot of the ring was used again."""
  prefix = jnp.array(prefix)
  length = int(prefix.max()) + 3 * window + 2
  arguments = (*arrays(4, 2, length), prefix, window)
  got = decoded(*arguments, scale=0.3, implementation=implementation)
  np.testing.assert_allclose(got, whole(*arguments, scale=0.3), atol=1e-5)


@pytest.mark.parametrize("length", [7, 8, 9, 24], ids=["W-1", "W", "W+1", "3W"])
def test_at_the_edges_of_the_window(length):
  arguments = (*arrays(2, 1, length), jnp.array([0, 5]), 8)
  np.testing.assert_allclose(decoded(*arguments, scale=0.3), whole(*arguments, scale=0.3), atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_several_new_tokens_and_a_soft_cap(implementation):
  arguments = (*arrays(4, 2, 36), jnp.array([5, 13]), 8)
  got = decoded(*arguments, new=3, scale=0.3, soft_cap=1.5, implementation=implementation)
  np.testing.assert_allclose(got, whole(*arguments, scale=0.3, soft_cap=1.5), atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_bfloat16_within_a_hundredth(implementation):
  arguments = (*arrays(4, 2, 36, jnp.bfloat16), jnp.array([5, 13]), 8)
  got, want = decoded(*arguments, scale=0.3, implementation=implementation), whole(*arguments, scale=0.3)
  assert got.dtype == jnp.bfloat16
  assert np.abs((got - want).astype(jnp.float32)).max() < 1e-2 * np.abs(want.astype(jnp.float32)).max()


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_what_empty_slots_hold_does_not_matter(implementation):
  arguments = (*arrays(2, 1, 12), jnp.array([0, 5]), 8)
  run = partial(decoded, *arguments, scale=0.3, implementation=implementation)
  np.testing.assert_array_equal(run(), run(spoiled=1e4))


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_order_in_the_ring_does_not_matter_and_nothing_gives_zeros(implementation):
  q, k, v = arrays(4, 2, 28)
  held = jnp.stack([jnp.arange(28), jnp.arange(28)])
  order = np.random.default_rng(0).permutation(28)
  run = partial(
    prefix_sliding_decode, prefix_length=jnp.array([3, 9]), window=8, scale=0.3, implementation=implementation
  )
  new, position = q[:, :, :2], jnp.array([[27, 20], [26, -1]])
  a = run(new, k, v, held, position)
  b = run(new, k[:, :, order], v[:, :, order], held[:, order], position)
  np.testing.assert_allclose(a, b, atol=1e-6)
  assert (np.asarray(a[1, :, 1]) == 0).all()
  assert (np.asarray(run(new, k, v, held * 0 - 1, position)) == 0).all()


def test_a_cache_of_several_tiles():
  """More slots than a tile of the kernel, not a multiple of it, most of them out of the window."""
  q, k, v = arrays(4, 2, 1300)
  held = jnp.broadcast_to(jnp.arange(1300), (2, 1300))
  arguments = q[:, :, -1:], k, v, held, jnp.array([[1299], [700]]), jnp.array([3, 600])
  run = partial(prefix_sliding_decode, *arguments, window=40, scale=0.3)
  np.testing.assert_allclose(run(implementation="interpreted"), run(implementation="xla"), atol=1e-5)


def test_slots_by_hand():
  """A prefix of 2 in a room of 3, a ring of 4."""
  got = cache_slot(jnp.arange(9), jnp.array(2), slots=7, ring=4)
  np.testing.assert_array_equal(got, [0, 1, 3, 4, 5, 6, 3, 4, 5])
  with pytest.raises(ValueError, match=r"ring must lie in \[1, slots=7\], got 8"):
    cache_slot(jnp.arange(9), jnp.array(2), slots=7, ring=8)


REFUSED = {
  "window": (dict(window=0), "window must be an int of at least 1"),
  "heads": (dict(q=jnp.zeros((2, 3, 1, WIDTH))), "key heads must divide query heads, got 3 query and 2 key heads"),
  "prefix": (
    dict(prefix_length=jnp.array([3, 21])),
    "a prefix of 21 does not fit in a cache of 28 slots beside a window of 8; .* at most 20",
  ),
  "negative": (dict(prefix_length=jnp.array([3, -1])), "prefix_length must not be negative, got -1"),
  "slots": (dict(slot_position=jnp.zeros((2, 27), int)), r"slot_position must be integers of shape \[2, 28\]"),
  "positions": (dict(position=jnp.zeros((2, 2), int)), r"position must be integers of shape \[2, 1\]"),
  "backend": (dict(implementation="tpu"), "'tpu' runs on tpu and the backend is cpu; leave it None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_tracing(case):
  changed, said = REFUSED[case]
  q, k, v = arrays(4, 2, 28)
  arguments = dict(
    q=q[:, :, :1], k_cache=k, v_cache=v, slot_position=jnp.zeros((2, 28), int), position=jnp.zeros((2, 1), int),
    prefix_length=jnp.array([3, 20]), window=8, scale=1.0,
  )  # fmt: skip
  with pytest.raises(ValueError, match=said):
    prefix_sliding_decode(**arguments | changed)
