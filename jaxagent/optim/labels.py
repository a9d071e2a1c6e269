"""Which optimizer each parameter gets, and how an array is made of matrices."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxagent.optim import names

MUON, ADAM = "muon", "adam"


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
  """How an array is made of matrices: a label that says more than "muon", which is `MatrixSpec()`.

  `rows` (what the product sums over) and `columns` are the axes of a matrix, one or several that count as one; the rest
  are `batch_axes`, each of whose entries is a matrix of its own (None: all the rest). `split` are the widths along the
  columns of matrices that lie side by side, as in a fused QKV. The shape's scale is that of the parts.

      MatrixSpec(split=(512, 128, 128))  # q, k and v in one [D, 768]
      MatrixSpec(batch_axes=(1,), rows=0, columns=2)  # one matrix per head of [D, heads, head_dim]
      MatrixSpec(rows=0, columns=(1, 2))  # all heads of [D, heads, head_dim] as one matrix
  """

  batch_axes: tuple[int, ...] | None = None
  rows: int | tuple[int, ...] = -2
  columns: int | tuple[int, ...] = -1
  split: tuple[int, ...] | None = None


Label = str | MatrixSpec
Labels = Any | Callable[[Any], Any]  # a tree of Label like the parameters, or a function of them that returns it


def hidden_matrices(params: Any, *, specs: Mapping[str, Label] | None = None) -> Any:
  """A tree like `params` of "muon" for hidden matrices and "adam" for the rest, by path and shape.

  Muon: 2-D weights; `[L, m, n]` under a stack of layers; `[E, m, n]` and `[L, E, m, n]` of experts. AdamW: embeddings,
  heads (language model, value), norms, biases, routers, vectors and scalars, stacked or not. Works on trees of dicts,
  Flax NNX state and Flax Linen variables; it goes by the common names in `optim.names`, so look at what it returns for
  a model of your own.

  `specs` says it for what has no one reading, by the end of its path: `{"attention/qkv": MatrixSpec(split=(512, 128,
  128))}`. Errors: ValueError that names the path for a fused or per-head weight, a convolution, or a LoRA factor that
  `specs` does not place; for a key of `specs` that is the end of no path; and for a MatrixSpec that does not fit.
  """
  specs = dict(specs or {})
  leaves, tree = jax.tree_util.tree_flatten_with_path(params)
  used = set()

  def place(path, leaf):
    parts = names.parts(path)
    found = max((key for key in specs if names.ends_with(parts, key)), key=len, default=None)
    if found is None:
      return _by_name(parts, tuple(leaf.shape))
    used.add(found)
    label = specs[found]
    if label not in (MUON, ADAM) and not isinstance(label, MatrixSpec):
      raise ValueError(f'specs[{found!r}] must be "muon", "adam" or a MatrixSpec, got {label!r}')
    return label

  labels = [place(path, leaf) for path, leaf in leaves]
  if leaves and (unused := set(specs) - used):
    raise ValueError(f"specs names {sorted(unused)[0]!r}, which is the end of no parameter's path")
  for (path, leaf), label in zip(leaves, labels):
    if label != ADAM:
      arrangement(label, tuple(leaf.shape), name="/".join(names.parts(path)))
  return jax.tree.unflatten(tree, labels)


def _by_name(parts: tuple[str, ...], shape: tuple[int, ...]) -> str:
  rank = len(shape) - names.stacked(parts)
  if rank <= 1 or names.is_vector(parts) or names.is_embedding(parts) or names.is_head(parts):
    return ADAM
  if names.is_router(parts, rank) or (rank == 2 and min(shape[-2:]) == 1):
    return ADAM
  path = "/".join(parts)
  if names.is_fused(parts):
    raise ValueError(
      f"parameter {path} of shape {shape} holds several matrices side by side; say how it splits:"
      f" specs={{{path!r}: MatrixSpec(split=(...))}}"
    )
  if names.is_lora(parts):
    raise ValueError(f'parameter {path} is a factor of a low-rank matrix; say what it gets: specs={{{path!r}: "adam"}}')
  if rank == 2 or (rank == 3 and names.is_expert(parts)):
    return MUON
  raise ValueError(
    f"parameter {path} of shape {shape} has more axes than a matrix; say which are which, as in"
    f" specs={{{path!r}: MatrixSpec(batch_axes=(), rows=0, columns=(1, 2))}}"
  )


@dataclasses.dataclass(frozen=True)
class Arrangement:
  """A MatrixSpec for one shape: its axes as (batch, rows, columns), and the widths of the matrices along columns."""

  shape: tuple[int, ...]
  parts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
  split: tuple[int, ...]

  @property
  def order(self) -> tuple[int, ...]:
    return sum(self.parts, ())

  @property
  def flat(self) -> tuple[int, int, int]:
    batch, rows, columns = (math.prod(self.shape[axis] for axis in part) for part in self.parts)
    return batch, rows, columns

  def with_first(self, axes: Iterable[int]) -> "Arrangement":
    """The same matrices in another order: those batch axes first."""
    (batch, *rest), leading = self.parts, set(axes)
    return dataclasses.replace(self, parts=(tuple(sorted(batch, key=lambda axis: axis not in leading)), *rest))


def arrangement(label: Label, shape: tuple[int, ...], *, name: str) -> Arrangement:
  """Errors: ValueError that names the parameter where the label does not fit the shape."""
  spec = label if isinstance(label, MatrixSpec) else MatrixSpec()
  if label != MUON and label is not spec:
    raise ValueError(f'parameter {name} has the label {label!r}; labels are "muon", "adam" or a MatrixSpec')
  rank = len(shape)

  def axes(given):
    given = (given,) if isinstance(given, int) else tuple(given)
    if bad := [axis for axis in given if not -rank <= axis < rank]:
      raise ValueError(f"parameter {name} of shape {shape} has no axis {bad[0]} for {spec}")
    return tuple(axis % rank for axis in given)

  rows, columns = axes(spec.rows), axes(spec.columns)
  rest = tuple(axis for axis in range(rank) if axis not in rows + columns)
  batch = rest if spec.batch_axes is None else axes(spec.batch_axes)
  order = batch + rows + columns
  if sorted(order) != list(range(rank)) or not rows or not columns:
    raise ValueError(f"parameter {name} of shape {shape}: every axis must be named once by {spec}")
  if 0 in shape:
    raise ValueError(f'parameter {name} of shape {shape} is empty; label it "adam"')
  width = math.prod(shape[axis] for axis in columns)
  split = spec.split or (width,)
  if sum(split) != width or min(split) < 1:
    raise ValueError(f"parameter {name} has {width} columns, which split={spec.split} does not add up to")
  return Arrangement(shape, (batch, rows, columns), split)


def arrangements(tree: Any, specs: Labels | None) -> list[Arrangement]:
  """One for each leaf of the tree, which may lack leaves that `specs` has: those behind a mask."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  labels = by_path(specs, tree, MUON)
  found = []
  for path, leaf in leaves:
    name, label = "/".join(names.parts(path)), labels(path)
    if label == ADAM or label is None:
      raise ValueError(f"parameter {name} has no place in Muon by its label {label!r}; mask it, or use optim.muon")
    found.append(arrangement(label, tuple(leaf.shape), name=name))
  return found


def by_path(values: Any, tree: Any, default: Any, is_leaf: Callable | None = None) -> Callable[[tuple], Any]:
  """path -> the leaf of `values` (a tree, a function of `tree` that makes it, or None: the default) at that path."""
  if values is None:
    return lambda path: default
  values = values(tree) if callable(values) else values
  table = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(values, is_leaf=is_leaf)}
  return lambda path: table.get(jax.tree_util.keystr(path))
