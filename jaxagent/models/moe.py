"""A mixture of experts: top-k routing that can be replayed, and products over groups of rows without dropped tokens.

On a mesh (`policy.on_mesh`) each device computes, for its rows, the choices that fall on its experts, and the parts are
summed: tokens travel, experts do not.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxagent.models.config import DecoderConfig
from jaxagent.models.layers import product
from jaxagent.models.sharding import BATCH_AXES, dividing, free_axes, mesh_in_use
from jaxagent.types import pytree
from pallas_kernels.grouped_matmul.tiles import tile_layout, tile_rows


def route(
  logits: Float[Array, "N E"],
  *,
  experts_per_token: int,
  norm_topk_prob: bool = True,
  recorded: Int[Array, "N K"] | None = None,
) -> tuple[Int[Array, "N K"], Float[Array, "N K"], Float[Array, "N E"]]:
  """experts, their weights g and the probabilities p of all experts: p = softmax(logits), experts = top-k(p).

  g = p[experts], divided by its sum with `norm_topk_prob`. `recorded` replaces the live choice for every token whose
  record is complete (all >= 0); the weights always come from the live logits. No gradient through the choice.
  Source: Ma et al. 2025 (R3). Ours differs: nothing; models that do not renormalise multiply p by the mask.
  """
  _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits), experts_per_token)
  if recorded is not None:
    experts = jnp.where((recorded >= 0).all(-1, keepdims=True), recorded.astype(experts.dtype), experts)
  probabilities = jax.nn.softmax(logits, axis=-1)
  if norm_topk_prob:  # the renormalised top-k of a softmax is the softmax of the top-k
    weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
  else:
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
  return experts, weights, probabilities


@pytree
class Groups:
  """Where each (token, choice) stands among rows sorted by expert, each expert's rows padded to whole tiles."""

  slot: Int[Array, "N K"]  # row of each choice, R for one of an expert that is not here
  choice: Int[Array, "R"]  # the flat choice that a row serves, -1 in padding
  tile_expert: Int[Array, "tiles"]


def group(experts: Int[Array, "N K"], count: int, tile: int) -> Groups:
  """Sorts the choices by expert into tiles of `tile` rows that belong to one expert each; nothing is dropped.

  Choices outside [0, count) are of experts elsewhere and get no row.
  """
  flat = experts.reshape(-1)
  here = (flat >= 0) & (flat < count)
  flat = jnp.where(here, flat, count)
  order = jnp.argsort(flat, stable=True)
  layout = tile_layout(jnp.sum(flat[:, None] == jnp.arange(count), axis=0), flat.size, tile)
  slot = jnp.where(here, layout.shift[jnp.minimum(flat, count - 1)] + jnp.argsort(order), layout.source.size)
  choice = jnp.where(layout.source >= 0, order[jnp.maximum(layout.source, 0)], -1)
  return Groups(slot.reshape(experts.shape), choice, layout.group)


@jax.custom_vjp
def dispatch(x: Float[Array, "N D"], groups: Groups) -> Float[Array, "R D"]:
  """Row r is the token that it serves, 0 in padding. The gradient gathers, where autodiff would scatter."""
  token = groups.choice // groups.slot.shape[1]
  return jnp.where((groups.choice >= 0)[:, None], x[jnp.maximum(token, 0)], 0)


@jax.custom_vjp
def collect(rows: Float[Array, "R D"], groups: Groups) -> Float[Array, "N K D"]:
  """The row of every choice, 0 for one that has none: the other half of `dispatch`."""
  return _rows_of(rows, groups)


def _rows_of(rows, groups):
  return rows.at[groups.slot].get(mode="fill", fill_value=0)


def _spread(g, groups):
  flat = g.reshape(-1, g.shape[-1])
  return jnp.where((groups.choice >= 0)[:, None], flat[jnp.maximum(groups.choice, 0)], 0)


dispatch.defvjp(lambda x, groups: (dispatch(x, groups), groups), lambda groups, g: (_rows_of(g, groups).sum(1), None))
collect.defvjp(lambda rows, groups: (collect(rows, groups), groups), lambda groups, g: (_spread(g, groups), None))


def grouped_product(
  rows: Float[Array, "R D"], weights: Float[Array, "E D F"], groups: Groups, dtype: str = "float32"
) -> Float[Array, "R F"]:
  """rows[r] @ weights[expert of r], as a batch of one product per tile."""
  tiles = groups.tile_expert.size
  out = product("tmd,tdf->tmf", rows.reshape(tiles, -1, rows.shape[-1]), weights[groups.tile_expert], dtype)
  return out.reshape(rows.shape[0], -1)


def mixture(
  config: DecoderConfig,
  first: Int[Array, ""] | int,
  x: Float[Array, "B T D"],
  experts: Int[Array, "B T K"],
  weights: Float[Array, "B T K"],
  into: tuple[Float[Array, "E D n F"], ...],
  down: Float[Array, "E F D"],
) -> Float[Array, "B T D"]:
  """The part of the sum over a token's experts that falls on E of them, from number `first` on."""
  count, k = down.shape[0], experts.shape[-1]
  groups = group(experts.reshape(-1, k) - first, count, tile_rows(experts.size, config.experts))
  rows = dispatch(x.reshape(-1, x.shape[-1]), groups)
  products = [grouped_product(rows, w.reshape(*w.shape[:2], -1), groups, config.dtype) for w in into]
  gate, up = (half for y, w in zip(products, into) for half in jnp.split(y, w.shape[2], axis=-1))
  rows = grouped_product(jax.nn.silu(gate) * up, down, groups, config.dtype)
  return jnp.sum(weights.reshape(-1, k)[..., None] * collect(rows, groups), axis=1).reshape(x.shape)


def _over_mesh(run, x, experts, weights, into, down) -> Float[Array, "B T D"]:
  """`run` on each device for its rows, its experts and its part of their width; what does not divide stays whole.

  The compiler would gather the experts: it cannot know that a token's tile needs one of them.
  """
  mesh = mesh_in_use()
  if mesh is None:
    return run(0, x, experts, weights, into, down)
  rows = dividing(mesh, x.shape[0], BATCH_AXES)
  expert, width = dividing(mesh, down.shape[0], ("expert",)), dividing(mesh, down.shape[1], ("tensor",))

  def local(x, experts, weights, into, down):
    first = jax.lax.axis_index(expert) * down.shape[0] if expert else 0
    return run(first, x, experts, weights, into, down)[None]

  by_row = PartitionSpec(rows)
  split = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(by_row, by_row, by_row, PartitionSpec(expert, None, None, width), PartitionSpec(expert, width)),
    out_specs=PartitionSpec(expert + width, rows),
    axis_names=set(free_axes(mesh)),
    check_vma=False,
  )
  return jnp.sum(split(x, experts, weights, into, down), axis=0)


def routing_dtype(config: DecoderConfig) -> type:
  """The smallest integer type that numbers the experts."""
  return jnp.int8 if config.experts <= jnp.iinfo(jnp.int8).max + 1 else jnp.int16


class Moe(nnx.Module):
  """y = sum_k g_k E_k(x), E(x) = (silu(x gate) * (x up)) down, over the chosen experts."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, weight):
    experts, width, hidden = config.experts, config.width, config.expert_width
    self.config = config
    self.router = weight(rngs, (width, experts), ("embed", "experts"))
    self.gate = weight(rngs, (experts, width, hidden), ("experts", "embed", "mlp"))
    self.up = weight(rngs, (experts, width, hidden), ("experts", "embed", "mlp"))
    self.down = weight(rngs, (experts, hidden, width), ("experts", "mlp", "embed"), scale=config.residual_scale)

  def into(self) -> tuple[Float[Array, "E D n F"], ...]:
    """The matrices of gate and up, n at a time."""
    return self.gate[...][:, :, None], self.up[...][:, :, None]

  def __call__(self, x: Float[Array, "B T D"], routing: Int[Array, "B T K"] | None = None):
    c, flat = self.config, x.reshape(-1, x.shape[-1])
    logits = product("nd,de->ne", flat, self.router[...])
    experts, weights, probabilities = route(
      logits,
      experts_per_token=c.experts_per_token,
      norm_topk_prob=c.norm_topk_prob,
      recorded=None if routing is None else routing.reshape(-1, c.experts_per_token),
    )
    integer = routing_dtype(c)

    def by_token(y):
      return y.reshape(*x.shape[:2], -1)

    y = _over_mesh(
      functools.partial(mixture, c), x, by_token(experts), by_token(weights), self.into(), self.down[...]
    )
    aux = {"routing": by_token(experts.astype(integer)), "router_probs": by_token(probabilities)}
    if routing is not None:
      live, _, _ = route(logits, experts_per_token=c.experts_per_token)
      aux["live_routing"] = by_token(live.astype(integer))
    return y, aux


class FusedMoe(Moe):
  """The same with gate and up in one product: the layout for decoding."""

  def __init__(self, moe: Moe):
    dtype = moe.config.dtype
    self.config = moe.config
    self.router = nnx.Param(moe.router[...], axes=("embed", None))  # small, and each device routes by all of it
    both = jnp.stack([moe.gate[...], moe.up[...]], axis=2)
    self.gate_and_up = nnx.Param(both.astype(dtype), axes=("experts", "embed", None, "mlp"))
    self.down = nnx.Param(moe.down[...].astype(dtype), axes=("experts", "mlp", "embed"))

  def into(self):
    return (self.gate_and_up[...],)
