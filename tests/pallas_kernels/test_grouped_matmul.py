"""Products and gradients of every implementation that runs here, against a loop over groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_matmul import api, grouped_matmul, tiles, tpu

INTERPRETED = Implementation(partial(tpu.forward, interpret=True), partial(tpu.backward, interpret=True))
GROUPS = {
  "even": [10, 10, 10, 10],
  "uneven": [1, 0, 33, 6],
  "one group": [0, 40, 0, 0],
  "rows left over": [7, 0, 12, 3],
  "nothing": [0, 0, 0, 0],
  "a single row": [0, 0, 0, 1],
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setitem(api.IMPLEMENTATIONS, "interpreted", INTERPRETED)


def arrays(dtype=jnp.float32, rows=40, groups=4, depth=12, width=20, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (rows, depth), (groups, depth, width), (rows, width)
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@partial(jax.jit, static_argnames="implementation")
def value_and_gradients(x, weights, g, sizes, *, implementation):
  y, pullback = jax.vjp(partial(grouped_matmul, group_sizes=sizes, implementation=implementation), x, weights)
  return y, *pullback(g)


def by_group(x, weights, g, sizes):
  """The same in a loop over groups, float64."""
  x, weights, g = (np.asarray(a, np.float64) for a in (x, weights, g))
  y, dx, dw, low = np.zeros(g.shape), np.zeros(x.shape), np.zeros(weights.shape), 0
  for e, size in enumerate(sizes):
    part = slice(low, low := low + size)
    y[part], dx[part], dw[e] = x[part] @ weights[e], g[part] @ weights[e].T, x[part].T @ g[part]
  return y, dx, dw


def relative(got, want):
  return np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1.0)


@pytest.mark.parametrize("implementation", ["tiles", "ragged", "interpreted", "reference"])
@pytest.mark.parametrize("sizes", GROUPS)
def test_products_and_gradients(implementation, sizes):
  arguments = (*arrays(), jnp.array(GROUPS[sizes]))
  got = value_and_gradients(*arguments, implementation=implementation)
  for x, y, name in zip(got, by_group(*arguments), ("y", "dx", "dw")):
    assert relative(x, y) < 1e-5, name


@pytest.mark.parametrize("implementation", ["tiles", "ragged", "interpreted", "reference"])
def test_no_rows_at_all(implementation):
  """y and dx are empty, the matrices have gradient 0."""
  arguments = (*arrays(rows=0), jnp.zeros(4, jnp.int32))
  y, dx, dw = value_and_gradients(*arguments, implementation=implementation)
  assert y.shape == (0, 20) and dx.shape == (0, 12) and dw.shape == (4, 12, 20) and not dw.any()


@pytest.mark.parametrize("implementation", ["tiles", "ragged", "interpreted"])
def test_bfloat16_within_a_hundredth(implementation):
  arguments = (*arrays(jnp.bfloat16), jnp.array(GROUPS["uneven"]))
  for x, y in zip(value_and_gradients(*arguments, implementation=implementation), by_group(*arguments)):
    assert x.dtype == jnp.bfloat16
    assert relative(x, y) < 1e-2


@pytest.mark.parametrize("sizes", [[300, 0, 1, 129, 200], [128, 128, 256, 0, 60]])
def test_interpreted_over_several_tiles(sizes, monkeypatch):
  """Groups that begin and end inside tiles, at their edges, and span some; several tiles of depth and columns."""
  monkeypatch.setattr(tpu, "tile_rows", lambda rows: 128)
  arguments = (*arrays(rows=640, groups=5, depth=256, width=256), jnp.array(sizes))
  for x, y in zip(value_and_gradients.__wrapped__(*arguments, implementation="interpreted"), by_group(*arguments)):
    assert relative(x, y) < 1e-5


def test_rows_left_over_give_nothing_whatever_they_hold():
  x, weights, g = arrays()
  sizes = jnp.array(GROUPS["rows left over"])
  spoiled = x.at[22:].set(jnp.nan), weights, g.at[22:].set(jnp.nan)
  for implementation in ("tiles", "interpreted"):
    got = value_and_gradients(*spoiled, sizes, implementation=implementation)
    want = value_and_gradients(x, weights, g, sizes, implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("tile", [1, 8, 16])
@pytest.mark.parametrize("sizes", GROUPS)
def test_the_layout_gives_every_row_a_place_of_its_own(tile, sizes):
  sizes = np.array(GROUPS[sizes])
  layout = tiles.tile_layout(jnp.asarray(sizes), 40, tile)
  group = np.repeat(np.arange(4), sizes)
  slot = np.arange(sizes.sum()) + np.asarray(layout.shift)[group]
  np.testing.assert_array_equal(layout.source[slot], np.arange(sizes.sum()))
  np.testing.assert_array_equal(layout.group[slot // tile], group)
  assert (np.asarray(layout.source) >= 0).sum() == sizes.sum()


@pytest.mark.parametrize("sizes", GROUPS)
def test_every_pair_of_a_tile_and_its_group_is_visited_once_in_order(sizes):
  sizes = np.array(GROUPS[sizes])
  plan, count = tpu.visits(jnp.asarray(sizes), 40, 8)
  group = np.repeat(np.arange(5), np.append(sizes, 40 - sizes.sum()))
  want = sorted({(g, m // 8) for m, g in enumerate(group)})
  assert [(int(g), int(t)) for g, t in zip(plan.group, plan.tile)][: int(count.sum())] == want


REFUSED = {
  "shape": (dict(weights=jnp.zeros((4, 9, 20))), r"x must be \[M, D\] and weights \[E, D, F\]"),
  "sizes": (dict(group_sizes=jnp.zeros(3, int)), "group_sizes must be 4 integers, one a matrix"),
  "floats": (dict(group_sizes=jnp.zeros(4)), "group_sizes must be 4 integers, one a matrix"),
  "sum": (dict(group_sizes=jnp.array([30, 20, 0, 0])), r"sum to at most M=40, got \[30, 20, 0, 0\]"),
  "negative": (dict(group_sizes=jnp.array([3, -1, 0, 0])), "at least 0"),
  "dtype": (dict(x=arrays(jnp.bfloat16)[0]), "x and weights must have one dtype"),
  "backend": (dict(implementation="tpu"), "'tpu' runs on tpu and the backend is cpu; leave it None"),
  "name": (dict(implementation="cuda"), "implementation must be one of tiles, tpu, ragged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_tracing(case):
  changed, said = REFUSED[case]
  x, weights, _ = arrays()
  with pytest.raises(ValueError, match=said):
    grouped_matmul(**dict(x=x, weights=weights, group_sizes=jnp.array(GROUPS["even"])) | changed)


def test_the_platform_chooses():
  known = api.IMPLEMENTATIONS
  assert api.choose(None, known) is known["tiles"]
  for platform, name in (("tpu", "tpu"), ("cuda", "ragged")):
    device = jax.sharding.AbstractDevice(device_kind="made up", num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
      assert api.choose(None, known) is known[name]
