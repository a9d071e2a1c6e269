"""The engine's device programs: prefill and decode, over all rows of the cache or a few of them, and moves of rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from jaxagent.models.policy import Policy, on_mesh
from jaxagent.models.sharding import (
  DECODING_RULES,
  RULES,
  param_shardings,
  replicated,
  rules_on,
  where_they_divide,
)
from jaxagent.sampling import rules
from jaxagent.types import pytree

STOP_IDS = 8  # stop ids a request may have


@pytree
class Decoding:
  """R rows to decode. `position` is that of `token`, the last of its stream and not yet processed; -1 is filler."""

  token: Int[Array, "R"]
  position: Int[Array, "R"]
  left: Int[Array, "R"]  # tokens that may still be sampled, at least 1
  prefix_length: Int[Array, "R"]  # tokens of the stream's first prompt
  key: UInt32[Array, "R 2"]
  stop: Int[Array, "R S"]  # -1 is filler
  rules: rules.Rules


@pytree
class Decoded:
  """What K steps sampled: row r holds `count[r]` tokens. `routing[k]` is of the token processed to sample token k."""

  count: Int[Array, "R"]
  drawn: rules.Drawn  # [K, R]
  routing: Int[Array, "K R L E"] | None


@dataclasses.dataclass(frozen=True)
class Programs:
  """Jitted for one policy, mesh and size of the cache; nothing is compiled before it runs, or is lowered."""

  params_sharding: Any
  weights_sharding: Any
  cache_sharding: Any
  prepare: Any  # parameters -> weights
  new_cache: Any
  prefill: Any
  decode: Any
  copy: Any
  read: Any
  write: Any


def programs_for(policy: Policy, params: Any, mesh: Mesh, *, slots: int, capacity: int, steps: int) -> Programs:
  """`params` may be shapes."""
  axes = row_axes(policy, capacity)
  params_sharding, prepared = weight_shardings(policy, params, mesh)
  new_cache = functools.partial(policy.cache, slots, capacity)
  cache, rest = cache_shardings(policy, jax.eval_shape(new_cache), axes, mesh), replicated(mesh)
  jit, meshed = functools.partial(jax.jit, out_shardings=(cache, rest)), on_mesh(policy, mesh)
  return Programs(
    params_sharding=params_sharding,
    weights_sharding=prepared,
    cache_sharding=cache,
    prepare=jax.jit(policy.prepare, out_shardings=prepared),
    new_cache=jax.jit(new_cache, out_shardings=cache),
    prefill=jit(functools.partial(prefill, meshed, axes), donate_argnums=1),
    decode=jit(functools.partial(decode, meshed, axes, steps), donate_argnums=1),
    copy=jax.jit(functools.partial(copy, axes), donate_argnums=0, out_shardings=cache),
    read=jax.jit(functools.partial(read, axes), out_shardings=rest),
    write=jax.jit(functools.partial(write, axes), donate_argnums=0, out_shardings=cache),
  )


def row_axes(policy: Policy, capacity: int) -> Any:
  """For each leaf of the policy's cache, the axis that counts rows."""

  def axis(two, three):
    differing = [i for i, sizes in enumerate(zip(two.shape, three.shape)) if len(set(sizes)) > 1]
    if len(differing) != 1:
      raise ValueError(
        f"every array of a policy's cache must have one axis that counts rows, but for 2 and 3 rows one has the shapes"
        f" {two.shape} and {three.shape}; give each row its own entry"
      )
    return differing[0]

  return jax.tree.map(axis, *(jax.eval_shape(functools.partial(policy.cache, rows, capacity)) for rows in (2, 3)))


def weight_shardings(policy: Policy, params: Any, mesh: Mesh) -> tuple[Any, Any]:
  """Of parameters and of the weights prepared from them, on the mesh. A policy that names no axes is replicated."""
  names = policy.axes or jax.tree.map(lambda leaf: (None,) * leaf.ndim, params)
  placed = param_shardings(names, params, mesh=mesh, rules=rules_on(mesh, RULES))
  if policy.prepared_axes is None:
    return placed, None if policy.axes else replicated(mesh)
  prepared = jax.eval_shape(policy.prepare, params)
  return placed, param_shardings(policy.prepared_axes, prepared, mesh=mesh, rules=rules_on(mesh, DECODING_RULES))


def cache_shardings(policy: Policy, cache: Any, axes: Any, mesh: Mesh) -> Any:
  """Of a cache whose axes of rows are `axes`, on the mesh."""
  names = policy.cache_axes or jax.tree.map(lambda axis: (None,) * axis + ("rows",), axes)
  return where_they_divide(names, cache, mesh=mesh, rules=rules_on(mesh, DECODING_RULES))


def prefill(policy: Policy, axes, weights, cache, row: Int[Array, "R"] | None, tokens, position, prefix_length):
  """Processes `tokens` [R, C] at `position` (-1 is filler) in rows `row` of the cache. Returns it and the routing."""
  part = _take(cache, axes, row)
  hidden, part = policy.extend(weights, part, tokens, position, **_kept(policy, prefix_length))
  return _put(cache, axes, row, part), hidden.aux.get("routing")


def decode(policy: Policy, axes, steps: int, weights, cache, row: Int[Array, "R"] | None, rows: Decoding):
  """Samples up to `steps` tokens in each row, until all have drawn a stop id or used what was left to them."""
  part, kept = _take(cache, axes, row), _kept(policy, rows.prefix_length)

  def one(state):
    step, part, token, position, left, out = state
    active = left > 0
    hidden, part = policy.extend(weights, part, token[:, None], jnp.where(active, position, -1)[:, None], **kept)
    logits: Float[Array, "R V"] = policy.head(weights, hidden.states[:, 0])
    drawn = rules.sample(logits, rules.uniforms(rows.key, position + 1), rows.rules)
    routing = hidden.aux.get("routing")
    new = Decoded(out.count + active, drawn, None if routing is None else routing[:, 0])
    stopped = jnp.any(drawn.id[:, None] == rows.stop, -1)
    out = Decoded(new.count, *(_store(getattr(out, name), getattr(new, name), step) for name in ("drawn", "routing")))
    return step + 1, part, drawn.id, position + 1, jnp.where(active & ~stopped, left - 1, 0), out

  left = jnp.where(rows.position >= 0, rows.left, 0)
  start = (jnp.int32(0), part, rows.token, rows.position, left, _empty(policy, steps, weights, part, rows))
  _, part, _, _, _, out = jax.lax.while_loop(lambda s: (s[0] < steps) & jnp.any(s[4] > 0), one, start)
  return _put(cache, axes, row, part), out


def copy(axes, cache, source: Int[Array, "R"], target: Int[Array, "R"], count: Int[Array, ""]):
  """Copies the first `count` rows of `source` to those of `target`, one after the other."""

  def one(i, cache):
    return _put(cache, axes, target[i][None], _take(cache, axes, source[i][None]))

  return jax.lax.fori_loop(0, count, one, cache)


def read(axes, cache, row: Int[Array, "R"]):
  return _take(cache, axes, row)


def write(axes, cache, row: Int[Array, "R"], part):
  return _put(cache, axes, row, part)


def _empty(policy, steps, weights, cache, rows) -> Decoded:
  size = rows.token.shape[0]
  new, kept = (weights, cache, rows.token[:, None], rows.position[:, None]), _kept(policy, rows.prefix_length)
  hidden, _ = jax.eval_shape(policy.extend, *new, **kept)
  routing = hidden.aux.get("routing")
  floats = jnp.zeros((steps, size), jnp.float32)
  return Decoded(
    jnp.zeros(size, jnp.int32),
    rules.Drawn(jnp.zeros((steps, size), jnp.int32), floats, floats, floats),
    None if routing is None else jnp.zeros((steps, size, *routing.shape[2:]), routing.dtype),
  )


def _kept(policy: Policy, prefix_length) -> dict[str, Array]:
  return {} if policy.max_prefix is None else {"prefix_length": prefix_length}


def _store(buffers, values, step):
  return jax.tree.map(lambda b, v: jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), step, 0), buffers, values)


def _take(cache, axes, row):
  if row is None:
    return cache
  return jax.tree.map(lambda leaf, axis: jnp.take(leaf, row, axis=axis, mode="clip"), cache, axes)


def _put(cache, axes, row, part):
  if row is None:
    return part
  at = lambda axis: (slice(None),) * axis + (row,)  # noqa: E731
  return jax.tree.map(lambda leaf, new, axis: leaf.at[at(axis)].set(new, mode="drop"), cache, part, axes)
