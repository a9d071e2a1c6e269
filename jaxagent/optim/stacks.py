"""Matrices of one shape as one batch `[B, m, n]`, m <= n, and its way over a mesh, whole matrices to each device."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxagent.optim.labels import Arrangement, by_path

Layout = tuple[tuple[str, ...], ...]  # the mesh axes of each of the axes [b, m, n]
UNKNOWN: Layout = ((), (), ())
CACHED = 2**21  # entries of the matrices that are worked on at once


@dataclasses.dataclass(frozen=True)
class Piece:
  """Matrices of one array: columns start to stop of it, turned where that makes them wide."""

  leaf: int
  start: int
  stop: int
  turn: bool
  layout: Layout


def flatten(x: Array, arranged: Arrangement) -> Float[Array, "b rows columns"]:
  return x.transpose(arranged.order).reshape(arranged.flat)


def unflatten(x: Float[Array, "b rows columns"], arranged: Arrangement) -> Array:
  inverse = sorted(range(len(arranged.order)), key=arranged.order.__getitem__)
  return x.reshape([arranged.shape[axis] for axis in arranged.order]).transpose(inverse)


def pieces(leaf: int, arranged: Arrangement, layout: Layout) -> list[Piece]:
  if len(arranged.split) > 1:
    layout = (*layout[:2], ())  # parts do not begin where shards do
  rows, start, found = arranged.flat[1], 0, []
  for width in arranged.split:
    turn = rows > width or (rows == width and layout[1] > layout[2])  # squares in one layout
    found.append(Piece(leaf, start, start + width, turn, (layout[0], layout[2], layout[1]) if turn else layout))
    start += width
  return found


def cut(x: Float[Array, "b rows columns"], piece: Piece) -> Float[Array, "b m n"]:
  return turned(x[..., piece.start : piece.stop], piece)


def turned(x: Array, piece: Piece) -> Array:
  return x.swapaxes(1, 2) if piece.turn else x


def same_shape(batches: list[Float[Array, "b m n"]]) -> list[list[int]]:
  """Indices of those whose matrices have one shape."""
  groups = collections.defaultdict(list)
  for i, x in enumerate(batches):
    groups[x.shape[1:]].append(i)
  return list(groups.values())


class Spread(NamedTuple):
  """Calls a function on every matrix of some arrays, divided over the mesh axes `axes` (None: all) if there is a mesh.

  `function(x [m, n]) -> (y [m, n], scalars)`. All arrays come in one layout, the commonest of theirs; one exchange
  gives each device whole matrices, as many to each with zeros in place of what is missing, and one brings the results
  back. Devices that hold copies take their part of the batch. The scalars come as `[matrices]`, in no certain order.
  """

  mesh: jax.sharding.Mesh | None
  axes: tuple[str, ...] | None
  layout: Any

  def __call__(self, function: Callable, batches: list[Array], layouts: list[Layout]) -> tuple[list[Array], Any]:
    if not self._over():
      return _each(function, batches)
    entry = self._entry(batches, layouts)
    moves = [(axis, dim) for dim in (1, 2) for axis in reversed(entry[dim])]
    moved = [*entry[0], *(axis for axis, _ in moves)]
    copies = [axis for axis in self._over() if axis not in moved]
    size = self._sizes()
    ways = math.prod(size[axis] for axis in (*copies, *(axis for axis, _ in moves)))

    def local(*arrays):
      x = jnp.concatenate(arrays)
      count = x.shape[0]
      x = jnp.pad(x, ((0, -count % ways), (0, 0), (0, 0)))
      for axis in copies:
        share = x.shape[0] // size[axis]
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * share, share)
      for axis, dim in moves:
        x = _exchange(x, axis, split=0, concat=dim)
      (x,), scalars = _each(function, [x])
      for axis, dim in reversed(moves):
        x = _exchange(x, axis, split=dim, concat=0)
      for axis in reversed(copies):
        x = jax.lax.all_gather(x, axis, tiled=True)
      return _parted(x[:count], arrays), scalars

    spec = PartitionSpec(*(over or None for over in entry))
    inside = jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(spec,) * len(batches),
      out_specs=([spec] * len(batches), PartitionSpec((*moved, *copies))),
      check_vma=False,
    )
    return inside(*batches)

  def layouts(self, tree: Any, arranged: list[Arrangement]) -> tuple[list[Layout], list[Arrangement]]:
    """Where the flattened arrays lie, as far as that is known, and their arrangements with sharded batch axes first."""
    if not self._over() or self.layout is None:
      return [UNKNOWN] * len(arranged), arranged
    spec_of = by_path(self.layout, tree, None, is_leaf=lambda x: isinstance(x, PartitionSpec | NamedSharding))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    placed = [self._place(spec_of(path), a) for path, a in zip(paths, arranged)]
    return [layout for layout, _ in placed], [a for _, a in placed]

  def _place(self, spec, arranged: Arrangement) -> tuple[Layout, Arrangement]:
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    over = [] if spec is None else [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
    over += [()] * (len(arranged.order) - len(over))
    size = self._sizes()
    over = [tuple(axis for axis in x if size[axis] > 1) for x in over]
    arranged = arranged.with_first(axis for axis in range(len(over)) if over[axis])
    first = [part[0] if part else None for part in arranged.parts]
    return tuple(() if axis is None else over[axis] for axis in first), arranged

  def _sizes(self) -> Mapping[str, int]:
    return {} if self.mesh is None else self.mesh.shape

  def _over(self) -> tuple[str, ...]:
    """The mesh axes of more than one device among `axes`."""
    if self.mesh is None:
      return ()
    axes = self.mesh.axis_names if self.axes is None else tuple(self.axes)
    if unknown := [axis for axis in axes if axis not in self.mesh.shape]:
      raise ValueError(f"axes names {unknown[0]!r}; the mesh has {', '.join(self.mesh.axis_names)}")
    return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

  def _entry(self, batches, layouts) -> Layout:
    """The commonest known layout, or columns over everything, as far as the sizes divide."""
    known = collections.Counter([] if self.layout is None else layouts)

    def fits(dim, over):
      over = tuple(axis for axis in over if axis in self._over())
      ways = math.prod(self._sizes()[axis] for axis in over)
      return over if all(x.shape[dim] % ways == 0 for x in batches) else ()

    if known:
      return tuple(fits(dim, over) for dim, over in enumerate(known.most_common(1)[0][0]))
    columns = fits(2, self._over())
    return ((), () if columns else fits(1, self._over()), columns)


def _exchange(x: Array, axis: str, *, split: int, concat: int) -> Array:
  # without the barrier XLA takes the arrays that x was concatenated from for its parts, and fails if one is transposed
  x = jax.lax.optimization_barrier(x)
  return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)


def _each(function: Callable, batches: list[Array]) -> tuple[list[Array], Any]:
  """As many matrices at a time as stay in the cache of a CPU; a batch of large products is no faster on a TPU."""
  x = batches[0] if len(batches) == 1 else jnp.concatenate(batches)
  count, room = x.shape[0], max(1, CACHED // math.prod(x.shape[1:]))
  together = next(k for k in range(min(room, count), 0, -1) if count % k == 0)
  run = jax.vmap(function) if together > 1 else lambda one: jax.tree.map(lambda x: x[None], function(one[0]))
  out = jax.lax.map(run, x.reshape(-1, together, *x.shape[1:]))
  y, scalars = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)
  return _parted(y, batches), scalars


def _parted(x: Array, like) -> list[Array]:
  stops = [sum(y.shape[0] for y in like[: i + 1]) for i in range(len(like) - 1)]
  return jnp.split(x, stops)
