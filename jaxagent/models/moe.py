"""A mixture of experts: top-k routing that can be replayed, and products over groups of rows without dropped tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxagent.models.config import DecoderConfig
from jaxagent.models.layers import product
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

  slot: Int[Array, "N K"]  # row of each choice
  choice: Int[Array, "R"]  # the flat choice that a row serves, -1 in padding
  tile_expert: Int[Array, "tiles"]


def group(experts: Int[Array, "N K"], count: int, tile: int) -> Groups:
  """Sorts the choices by expert into tiles of `tile` rows that belong to one expert each; nothing is dropped."""
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  layout = tile_layout(jnp.sum(flat[:, None] == jnp.arange(count), axis=0), flat.size, tile)
  slot = layout.shift[flat] + jnp.argsort(order)
  choice = jnp.where(layout.source >= 0, order[jnp.maximum(layout.source, 0)], -1)
  return Groups(slot.reshape(experts.shape), choice, layout.group)


@jax.custom_vjp
def dispatch(x: Float[Array, "N D"], groups: Groups) -> Float[Array, "R D"]:
  """Row r is the token that it serves, 0 in padding. The gradient gathers, where autodiff would scatter."""
  token = groups.choice // groups.slot.shape[1]
  return jnp.where((groups.choice >= 0)[:, None], x[jnp.maximum(token, 0)], 0)


@jax.custom_vjp
def collect(rows: Float[Array, "R D"], groups: Groups) -> Float[Array, "N K D"]:
  """The row of every choice: the other half of `dispatch`."""
  return rows[groups.slot]


def _spread(g, groups):
  flat = g.reshape(-1, g.shape[-1])
  return jnp.where((groups.choice >= 0)[:, None], flat[jnp.maximum(groups.choice, 0)], 0)


dispatch.defvjp(lambda x, groups: (dispatch(x, groups), groups), lambda groups, g: (g[groups.slot].sum(1), None))
collect.defvjp(lambda rows, groups: (collect(rows, groups), groups), lambda groups, g: (_spread(g, groups), None))


def grouped_product(
  rows: Float[Array, "R D"], weights: Float[Array, "E D F"], groups: Groups, dtype: str = "float32"
) -> Float[Array, "R F"]:
  """rows[r] @ weights[expert of r], as a batch of one product per tile."""
  tiles = groups.tile_expert.size
  out = product("tmd,tdf->tmf", rows.reshape(tiles, -1, rows.shape[-1]), weights[groups.tile_expert], dtype)
  return out.reshape(rows.shape[0], -1)


class Moe(nnx.Module):
  """y = sum_k g_k E_k(x), E(x) = (silu(x gate) * (x up)) down, over the chosen experts."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, weight):
    experts, width, hidden = config.experts, config.width, config.expert_width
    self.config = config
    self.router = weight(rngs, (width, experts), ("embed", "experts"))
    self.gate = weight(rngs, (experts, width, hidden), ("experts", "embed", "mlp"))
    self.up = weight(rngs, (experts, width, hidden), ("experts", "embed", "mlp"))
    self.down = weight(rngs, (experts, hidden, width), ("experts", "mlp", "embed"), scale=config.residual_scale)

  def gate_up(self, rows, groups):
    return tuple(grouped_product(rows, w[...], groups, self.config.dtype) for w in (self.gate, self.up))

  def __call__(self, x: Float[Array, "B T D"], routing: Int[Array, "B T K"] | None = None):
    c, flat = self.config, x.reshape(-1, x.shape[-1])
    experts, weights, probabilities = route(
      product("nd,de->ne", flat, self.router[...]),
      experts_per_token=c.experts_per_token,
      norm_topk_prob=c.norm_topk_prob,
      recorded=None if routing is None else routing.reshape(-1, c.experts_per_token),
    )
    groups = group(experts, c.experts, tile_rows(experts.size, c.experts))
    gate, up = self.gate_up(dispatch(flat, groups), groups)
    rows = grouped_product(jax.nn.silu(gate) * up, self.down[...], groups, c.dtype)
    y = jnp.sum(weights[..., None] * collect(rows, groups), axis=1)
    shape = x.shape[:2]
    integer = jnp.int8 if c.experts <= jnp.iinfo(jnp.int8).max + 1 else jnp.int16
    aux = {"routing": experts.astype(integer).reshape(*shape, -1), "router_probs": probabilities.reshape(*shape, -1)}
    return y.reshape(x.shape), aux


class FusedMoe(Moe):
  """The same with gate and up in one product: the layout for decoding."""

  def __init__(self, moe: Moe):
    self.config, self.router = moe.config, moe.router
    self.gate_and_up = nnx.Param(jnp.concatenate([moe.gate[...], moe.up[...]], -1).astype(moe.config.dtype))
    self.down = nnx.Param(moe.down[...].astype(moe.config.dtype))

  def gate_up(self, rows, groups):
    return jnp.split(grouped_product(rows, self.gate_and_up[...], groups, self.config.dtype), 2, axis=-1)
