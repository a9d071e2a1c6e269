"""Muon as Optax transforms: momentum whose matrices are replaced by nearby orthogonal ones."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxagent.optim import names, stacks
from jaxagent.optim.iterations import JORDAN, Quintic, newton_schulz
from jaxagent.optim.labels import ADAM, MUON, Labels, MatrixSpec, arrangements, hidden_matrices
from jaxagent.optim.metrics import MuonState, nothing_measured, spectrum, summary

Iteration = Callable[[Float[Array, "m n"]], Float[Array, "m n"]]
Scale = Callable[[int, int], float]


def width_scale(rows: int, columns: int) -> float:
  """sqrt(max(1, columns / rows)): the update's size as an operator does not depend on the width. Jordan et al. 2024."""
  return math.sqrt(max(1.0, columns / rows))


def rms_scale(rows: int, columns: int, *, rms: float = 0.2) -> float:
  """rms sqrt(max(rows, columns)): entries as large as AdamW's, whose learning rate then carries over.

  Source: Liu et al. 2025, arXiv 2502.16982 (Moonlight).
  """
  return rms * math.sqrt(max(rows, columns))


def scale_by_muon(
  iteration: Iteration | tuple[Quintic, ...] = JORDAN,
  scale: Scale | None = None,
  beta: float = 0.95,
  *,
  nesterov: bool = True,
  specs: Labels | None = None,
  mesh: jax.sharding.Mesh | None = None,
  axes: tuple[str, ...] | None = None,
  layout: Any = None,
  mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
  """scale(rows, columns) O(M): M the momentum, O its matrices made orthogonal by `iteration`.

  M <- beta M + (1 - beta) G, with Nesterov's step and bias correction as in `optax.contrib.muon`. `iteration` is a
  function of one wide matrix, or the quintics of `newton_schulz`; `scale` is `width_scale` by default. Weights are
  `[in, out]` on their last two axes, all others count matrices; `specs` (a tree of `MatrixSpec` or "muon", or a
  function that makes it from the updates) says otherwise. Leaves behind `optax.masked` are left alone.

  Matrices of one shape are one batch. With a `mesh` its leading axis is divided over the devices of `axes` (mesh axes,
  by default all): one exchange in, one out, none in the iteration, and each matrix on one device. `layout`
  (PartitionSpecs or NamedShardings like the parameters, or a function of the updates) says where they lie, which saves
  the compiler an exchange. Without a mesh nothing is moved: right on one device, slow on sharded parameters.

  For `optax.inject_hyperparams` name functions and the mesh among its `static_args`: it takes callables for schedules.
  Errors: ValueError that names the leaf for one that is no matrix, or does not fit its spec.
  """
  iterate = partial(newton_schulz, coefficients=iteration) if isinstance(iteration, tuple) else iteration
  shape_scale = width_scale if scale is None else scale
  spread = stacks.Spread(mesh, axes, layout)

  def init(params):
    arrangements(params, specs)
    mu = optax.tree.zeros_like(params, dtype=mu_dtype)
    return MuonState(jnp.zeros((), jnp.int32), mu, nothing_measured())

  def update(updates, state, params=None):
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    mu = optax.tree.update_moment(updates, state.mu, beta, 1)
    direction = _direction(updates, mu, beta, count, nesterov)
    change, measured = _orthogonalized(direction, iterate, shape_scale, specs, spread)
    updates = jax.tree.map(lambda x, g: x.astype(g.dtype), change, updates)
    return updates, MuonState(count, optax.tree.cast(mu, mu_dtype), measured)

  return optax.GradientTransformation(init, update)


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  adam: optax.GradientTransformation | None = None,
  labels: Labels | None = None,
  iteration: Iteration | tuple[Quintic, ...] = JORDAN,
  scale: Scale | None = None,
  beta: float = 0.95,
  weight_decay: float = 0.0,
  mesh: jax.sharding.Mesh | None = None,
  axes: tuple[str, ...] | None = None,
  layout: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """W <- W - learning_rate (scale(rows, columns) O(M) + weight_decay W) for hidden matrices, and `adam` for the rest.

  `labels`: a tree of "muon", "adam" or `MatrixSpec` like the parameters, or a function of them that returns it
  (default `hidden_matrices`). `adam` is any transform with its own learning rate, by default `optax.adamw` at
  `learning_rate`, which suits `scale=rms_scale`; with `width_scale` Muon's rate is some 50 times that of AdamW.
  The other arguments are those of `scale_by_muon`.
  """
  rest = optax.adamw(learning_rate, weight_decay=weight_decay) if adam is None else adam

  def transform(tree) -> optax.GradientTransformationExtraArgs:
    found = _resolved(hidden_matrices if labels is None else labels, tree)
    matrices = optax.chain(
      scale_by_muon(iteration, scale, beta, specs=found, mesh=mesh, axes=axes, layout=layout),
      optax.add_decayed_weights(weight_decay),
      optax.scale_by_learning_rate(learning_rate),
    )
    groups = jax.tree.map(lambda label: MUON if isinstance(label, MatrixSpec) else label, found)
    return optax.partition({MUON: matrices, ADAM: rest}, groups)

  def init(params):
    return transform(params).init(params)

  def update(updates, state, params=None, **extra):
    return transform(updates).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(init, update)


def _direction(updates, mu, beta, count, nesterov):
  """As in optax.contrib.scale_by_muon."""
  if not nesterov:
    return optax.tree.bias_correction(mu, beta, count)
  ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
  now = optax.tree.bias_correction(updates, beta, count)
  return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)


def _orthogonalized(tree: Any, iterate: Iteration, scale: Scale, specs: Labels | None, spread: stacks.Spread):
  """Every matrix of the tree made orthogonal and scaled, and what was measured of it."""
  leaves, structure = jax.tree.flatten(tree)
  arranged = arrangements(tree, specs)
  layouts, arranged = spread.layouts(tree, arranged)
  flat = [stacks.flatten(x, a) for x, a in zip(leaves, arranged)]
  pieces = [p for i, a in enumerate(arranged) for p in stacks.pieces(i, a, layouts[i])]
  inputs = [stacks.cut(flat[p.leaf], p) for p in pieces]
  outputs, before, after = list(inputs), [], []
  for members in stacks.same_shape(inputs):
    batch, spectra = spread(partial(_one, iterate), [inputs[i] for i in members], [pieces[i].layout for i in members])
    for i, x in zip(members, batch):
      outputs[i] = stacks.turned(x, pieces[i])
    before.append(spectra[0])
    after.append(spectra[1])
  updates, squares = [], []
  for i, a in enumerate(arranged):
    parts = [(scale(*y.shape[1:]), y) for p, y in zip(pieces, outputs) if p.leaf == i]
    squares += [factor**2 * jnp.sum(y * y) for factor, y in parts]  # not of the product, which would be stored for it
    scaled = [factor * y for factor, y in parts]
    updates.append(stacks.unflatten(scaled[0] if len(scaled) == 1 else jnp.concatenate(scaled, -1), a))
  return jax.tree.unflatten(structure, updates), summary(before, after, squares, sum(x.size for x in leaves))


def _one(iterate, x):
  y = iterate(x)
  return y, (spectrum(x), spectrum(y))


def _resolved(labels: Labels, tree: Any) -> Any:
  found = labels(tree) if callable(labels) else labels
  if jax.tree.leaves(tree) and jax.tree.structure(found) != jax.tree.structure(tree):  # Optax asks with an empty one
    raise ValueError(
      f"labels must be a tree like the parameters, {jax.tree.structure(tree)}, got {jax.tree.structure(found)}"
    )
  for path, label in jax.tree_util.tree_leaves_with_path(found):
    if label not in (MUON, ADAM) and not isinstance(label, MatrixSpec):
      name = "/".join(names.parts(path))
      raise ValueError(f'parameter {name} has the label {label!r}; labels are "muon", "adam" or a MatrixSpec')
  return found
