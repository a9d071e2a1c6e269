"""The built-in decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE shapes, with the arithmetic of `transformers`.

Declared in Flax NNX and split once: parameters are a plain nested dict, `params["layers"]` stacked over layers.
Training scans over the stack, decoding unrolls over what `prepare` unstacked.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxagent.checks import concrete
from jaxagent.models import cache as caches
from jaxagent.models.attention import packed_attention
from jaxagent.models.cache import Cache, View
from jaxagent.models.config import DecoderConfig
from jaxagent.models.layers import attention, product, rms_norm, rotate, rotation
from jaxagent.models.moe import FusedMoe, Moe
from jaxagent.models.policy import Hidden, Params, Policy

REWIND = 32  # tokens by which a row of a sliding policy can be cut back


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, scale: float = 1.0) -> nnx.Param:
  """A product's weight [..., in, out], normal with standard deviation scale / sqrt(in)."""
  return nnx.Param(jax.random.normal(rngs.params(), shape) * (scale * shape[-2] ** -0.5), axes=axes)


class Attention(nnx.Module):
  """Grouped-query attention; what is attended to is the caller's."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = self.config = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    self.q = weight(rngs, (c.width, q), ("embed", "heads"))
    self.k = weight(rngs, (c.width, kv), ("embed", "kv_heads"))
    self.v = weight(rngs, (c.width, kv), ("embed", "kv_heads"))
    self.o = weight(rngs, (q, c.width), ("heads", "embed"), scale=c.residual_scale)
    if c.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros(q), axes=("heads",))
      self.k_bias = nnx.Param(jnp.zeros(kv), axes=("kv_heads",))
      self.v_bias = nnx.Param(jnp.zeros(kv), axes=("kv_heads",))
    if c.qk_norm:
      self.q_norm = nnx.Param(jnp.ones(c.head_dim), axes=("head_dim",))
      self.k_norm = nnx.Param(jnp.ones(c.head_dim), axes=("head_dim",))

  def flat_qkv(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    qkv = tuple(product("btd,de->bte", x, w[...], self.config.dtype) for w in (self.q, self.k, self.v))
    if not self.config.qkv_bias:
      return qkv
    return tuple(x + bias[...] for x, bias in zip(qkv, (self.q_bias, self.k_bias, self.v_bias)))

  def qkv(self, x: Float[Array, "B T D"], turn: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Queries, keys and values [B, T, heads, head_dim], normalised and rotated."""
    q, k, v = (y.reshape(*y.shape[:2], -1, self.config.head_dim) for y in self.flat_qkv(x))
    if self.config.qk_norm:
      q = rms_norm(q, self.q_norm[...], self.config.norm_eps)
      k = rms_norm(k, self.k_norm[...], self.config.norm_eps)
    return rotate(q, turn), rotate(k, turn), v

  def out(self, x: Float[Array, "B T H*d"]) -> Float[Array, "B T D"]:
    return product("bte,ed->btd", x, self.o[...], self.config.dtype)


class FusedAttention(Attention):
  """The same with q, k and v in one product: the layout for decoding."""

  def __init__(self, layer: Attention):
    c = self.config = layer.config
    qkv = self._join(layer.q[...], layer.k[...], layer.v[...])
    self.qkv_weight = nnx.Param(qkv.astype(c.dtype), axes=("embed", "kv_heads"))
    self.o = nnx.Param(layer.o[...].astype(c.dtype), axes=("heads", "embed"))
    if c.qkv_bias:
      bias = self._join(layer.q_bias[...], layer.k_bias[...], layer.v_bias[...])
      self.qkv_bias = nnx.Param(bias, axes=("kv_heads",))
    if c.qk_norm:
      self.q_norm, self.k_norm = layer.q_norm, layer.k_norm

  def _join(self, *parts: Float[Array, "*D heads*d"]) -> Float[Array, "*D heads*d"]:
    """One key head after the other, each with its queries before it, so that devices can split the product by heads."""
    heads = [x.reshape(*x.shape[:-1], self.config.kv_heads, -1) for x in parts]
    return jnp.concatenate(heads, -1).reshape(*parts[0].shape[:-1], -1)

  def flat_qkv(self, x):
    c = self.config
    y = product("btd,de->bte", x, self.qkv_weight[...], c.dtype)
    if c.qkv_bias:
      y = y + self.qkv_bias[...]
    queries = c.heads // c.kv_heads * c.head_dim
    heads = jnp.split(y.reshape(*y.shape[:2], c.kv_heads, -1), (queries, queries + c.head_dim), axis=-1)
    return tuple(part.reshape(*y.shape[:2], -1) for part in heads)


class Mlp(nnx.Module):
  """y = (silu(x gate) * (x up)) down."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = self.config = config
    self.gate = weight(rngs, (c.width, c.mlp_width), ("embed", "mlp"))
    self.up = weight(rngs, (c.width, c.mlp_width), ("embed", "mlp"))
    self.down = weight(rngs, (c.mlp_width, c.width), ("mlp", "embed"), scale=c.residual_scale)

  def gate_up(self, x):
    return tuple(product("btd,df->btf", x, w[...], self.config.dtype) for w in (self.gate, self.up))

  def __call__(self, x: Float[Array, "B T D"], routing: None = None):
    gate, up = self.gate_up(x)
    return product("btf,fd->btd", jax.nn.silu(gate) * up, self.down[...], self.config.dtype), {}


class FusedMlp(Mlp):
  """The same with gate and up in one product: the layout for decoding."""

  def __init__(self, mlp: Mlp):
    c = self.config = mlp.config
    both = jnp.stack([mlp.gate[...], mlp.up[...]], axis=1)
    self.gate_and_up = nnx.Param(both.astype(c.dtype), axes=("embed", None, "mlp"))
    self.down = nnx.Param(mlp.down[...].astype(c.dtype), axes=("mlp", "embed"))

  def gate_up(self, x):
    both = product("btd,dgf->btgf", x, self.gate_and_up[...], self.config.dtype)
    return both[..., 0, :], both[..., 1, :]


class Layer(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    self.config = config
    self.attention_norm = nnx.Param(jnp.ones(config.width), axes=("embed",))
    self.attention = Attention(config, rngs)
    self.mlp_norm = nnx.Param(jnp.ones(config.width), axes=("embed",))
    self.mlp = Moe(config, rngs, weight) if config.experts else Mlp(config, rngs)

  def __call__(self, x: Float[Array, "B T D"], turn: tuple[Array, Array], attend: Callable, routing=None):
    """`attend(q, k, v) -> (values read, what to keep)`. Returns x, what to keep, and what the MLP reports."""
    eps = self.config.norm_eps
    read, kept = attend(*self.attention.qkv(rms_norm(x, self.attention_norm[...], eps), turn))
    x = x + self.attention.out(read)
    y, aux = self.mlp(rms_norm(x, self.mlp_norm[...], eps), routing)
    return x + y, kept, aux


class Trunk(nnx.Module):
  """What is not in a layer."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = config
    embed = jax.random.normal(rngs.params(), (c.vocab_size, c.width))
    self.embed = nnx.Param(embed * c.init_scale, axes=("vocab", "embed"))
    self.final_norm = nnx.Param(jnp.ones(c.width), axes=("embed",))
    if not c.tied:
      head = jax.random.normal(rngs.params(), (c.width, c.vocab_size))
      self.head = nnx.Param(head * c.init_scale, axes=("embed", "vocab"))


def fuse(layer: Layer) -> Layer:
  """The layer in the layout for decoding, weights of products in the dtype of the compute."""
  layer.attention = FusedAttention(layer.attention)
  layer.mlp = FusedMoe(layer.mlp) if layer.config.experts else FusedMlp(layer.mlp)
  return layer


def _new_layer(config: DecoderConfig) -> Layer:
  return Layer(config, nnx.Rngs(0))


def _graph(build: Callable[[], nnx.Module]) -> nnx.GraphDef:
  return nnx.graphdef(nnx.eval_shape(build))


def _arrays(module: nnx.Module) -> Params:
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def init(config: DecoderConfig, key: Array) -> Params:
  """Random parameters, float32."""
  trunk, layers = jax.random.split(key)
  stacked = jax.vmap(lambda k: _arrays(Layer(config, nnx.Rngs(k))))(jax.random.split(layers, config.layers))
  return {**_arrays(Trunk(config, nnx.Rngs(trunk))), "layers": stacked}


def axes(config: DecoderConfig) -> Params:
  """A tree like the parameters, of tuples of logical axis names."""
  trunk = _axis_names(lambda: Trunk(config, nnx.Rngs(0)))
  return {**trunk, "layers": _axis_names(lambda: _new_layer(config), "layers")}


def prepared_axes(config: DecoderConfig) -> Params:
  """A tree like `prepare(params)`, of tuples of logical axis names."""
  params, layer = axes(config), _axis_names(lambda: fuse(_new_layer(config)))
  names = {name: params[name] for name in ("embed", "final_norm")}
  if _separate_head(config):
    names["head"] = ("embed", "vocab")
  return {**names, "layers": (layer,) * config.layers}


def _axis_names(build: Callable[[], nnx.Module], *leading: str) -> Params:
  state = nnx.state(nnx.eval_shape(build), nnx.Param)
  leaves = jax.tree.map(lambda p: (*leading, *p.axes), state, is_leaf=lambda x: isinstance(x, nnx.Variable))
  return nnx.to_pure_dict(leaves)


def _separate_head(config: DecoderConfig) -> bool:
  return not config.tied or config.dtype != "float32"  # rounded once, not at every step


def forward(
  config: DecoderConfig,
  params: Params,
  tokens: Int[Array, "B T"],
  position: Int[Array, "B T"],
  segment: Int[Array, "B T"],
  *,
  prefix_end: Int[Array, "B T"] | None = None,
  routing: Int[Array, "B T L K"] | None = None,
) -> Hidden:
  """Last hidden states of packed rows, one scan over the stacked layers, or over the pattern in which kinds repeat.

  `prefix_end`, an index in the row, is where the part ends that prefix_sliding layers keep; others do without.
  Padding (`segment == -1`) reads zeros in every attention, so that its states are finite and nobody's business.
  """
  _check_rows(config, tokens, routing, position=position, segment=segment)
  _check_prefix(config, "prefix_end", prefix_end, tokens.shape, "TokenBatch.prefix_end, an index in the row")
  graph = _graph(lambda: _new_layer(config))
  turn = rotation(position, config.head_dim, config.rope_theta)

  def of_kind(kind):
    read = packed_attention(config, kind, segment, prefix_end)

    def run(x, layer):
      weights, experts = layer
      x, _, aux = nnx.merge(graph, weights)(x, turn, lambda *qkv: (read(*qkv), None), experts)
      return x, aux

    return jax.checkpoint(run, prevent_cse=False) if config.remat else run

  run = {kind: of_kind(kind) for kind in set(config.kinds)}
  layers = (params["layers"], None if routing is None else jnp.moveaxis(routing, 2, 0))
  x, reports = params["embed"][tokens], []
  for start, end, unit in pattern(config.kinds):
    part = layers if (start, end) == (0, config.layers) else jax.tree.map(lambda y, a=start, b=end: y[a:b], layers)
    x, aux = _scan([run[kind] for kind in unit], x, part)
    reports.append(aux)
  aux = reports[0] if len(reports) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports)
  states = rms_norm(x, params["final_norm"], config.norm_eps)
  return Hidden(states, {name: jnp.moveaxis(value, 0, 2) for name, value in aux.items()})


def pattern(kinds: tuple[str, ...]) -> list[tuple[int, int, tuple[str, ...]]]:
  """(first layer, one past the last, kinds that repeat in between) of the scans over layers.

  The smallest unit that repeats and then what is left of it, by runs of one kind; all by runs where nothing repeats.
  """
  n = len(kinds)
  unit = next(size for size in range(1, n + 1) if (kinds[:size] * n)[:n] == kinds)
  whole = n - n % unit if n >= 2 * unit else 0
  parts = [(0, whole, kinds[:unit])] if whole else []
  for kind, run in itertools.groupby(range(whole, n), lambda i: kinds[i]):
    start, *rest = run
    parts.append((start, start + 1 + len(rest), (kind,)))
  return parts


def _scan(unit: list[Callable], x: Float[Array, "B T D"], layers) -> tuple[Array, dict[str, Array]]:
  """One layer after the other, `unit` again and again; what they report gets the axis of layers in front."""

  def step(x, layers):
    reports = []
    for i, run in enumerate(unit):
      x, aux = run(x, jax.tree.map(lambda y, i=i: y[i], layers))
      reports.append(aux)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *reports)

  folded = jax.tree.map(lambda y: y.reshape(-1, len(unit), *y.shape[1:]), layers)
  x, aux = jax.lax.scan(step, x, folded)
  return x, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), aux)


def head(config: DecoderConfig, params: Params, states: Float[Array, "... D"]) -> Float[Array, "... V"]:
  """Logits in float32, from parameters or from prepared weights."""
  flat = states.reshape(-1, states.shape[-1])
  if "head" in params:
    logits = product("nd,dv->nv", flat, params["head"], config.dtype)
  else:
    logits = product("nd,vd->nv", flat, params["embed"], config.dtype)
  return logits.reshape(*states.shape[:-1], -1)


def prepare(config: DecoderConfig, params: Params) -> Params:
  """Weights for `extend` and `head`: a tuple of layers, products fused and in the dtype of the compute."""
  graph = _graph(lambda: _new_layer(config))
  layers = [nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], params["layers"])) for i in range(config.layers)]
  weights = {"embed": params["embed"], "final_norm": params["final_norm"]}
  if _separate_head(config):
    weights["head"] = (params["embed"].T if config.tied else params["head"]).astype(config.dtype)
  return {**weights, "layers": tuple(_arrays(fuse(layer)) for layer in layers)}


def extend(
  config: DecoderConfig,
  weights: Params,
  cache: Cache,
  tokens: Int[Array, "B t"],
  position: Int[Array, "B t"],
  *,
  prefix_length: Int[Array, "B"] | None = None,
  slots: int | None = None,
) -> tuple[Hidden, Cache]:
  """Appends t tokens to each row of the cache and attends to the row, as `forward` with the same prefix does.

  A position of -1 is padding. A position at or past the capacity, if there is one, cannot be written: the caller ends
  such rows first. `prefix_length`, of a row's first prompt, is for prefix_sliding layers.
  `slots` (static) is a promise that no position in the rows reaches it: full attention reads only that many slots.
  """
  _check_rows(config, tokens, None, position=position)
  _check_prefix(config, "prefix_length", prefix_length, tokens.shape[:1], "the length of each row's first prompt")
  most = cache.capacity
  if cache.rows != tokens.shape[0] or (slots is not None and not 0 < slots <= (most or slots)):
    raise ValueError(
      f"extend: {tokens.shape[0]} rows and slots={slots} do not fit a cache of {cache.rows} rows and"
      f" {most} slots; pass one row of tokens per row of the cache and slots in [1, capacity]"
    )
  graph = _graph(lambda: fuse(_new_layer(config)))
  turn = rotation(position, config.head_dim, config.rope_theta)
  views = {k: caches.view(config, k, held, position, prefix_length, slots) for k, held in cache.position.items()}
  x, kept, reports = weights["embed"][tokens], [], []
  for layer, kind, keys, values in zip(weights["layers"], config.kinds, cache.keys, cache.values, strict=True):
    attend = functools.partial(_attend_to_cache, config, views[kind], keys, values)
    x, pair, aux = nnx.merge(graph, layer)(x, turn, attend)
    kept.append(pair)
    reports.append(aux)
  keys, values = zip(*kept)
  aux = {name: jnp.stack([report[name] for report in reports], axis=2) for name in reports[0]}
  cache = Cache(keys, values, {kind: seen.stored for kind, seen in views.items()}, cache.kinds)
  return Hidden(rms_norm(x, weights["final_norm"], config.norm_eps), aux), cache


def _attend_to_cache(config: DecoderConfig, view: View, keys, values, q, k, v):
  """Values read, and the keys and values with the new ones written."""
  row = jnp.arange(q.shape[0])[:, None]
  k, v = k.astype(keys.dtype), v.astype(values.dtype)
  written = (
    keys.at[row, :, :, view.slot].set(k, mode="drop"),
    values.at[row, :, view.slot].set(v, mode="drop"),
  )
  if view.beside:
    seen = jnp.concatenate([keys, k.transpose(0, 2, 3, 1)], -1), jnp.concatenate([values, v.swapaxes(1, 2)], 2)
  else:
    seen = written[0][..., : view.slots], written[1][:, :, : view.slots]
  return attention(q, *seen, view.mask, config.dtype), written


def _check_prefix(config: DecoderConfig, name: str, given, shape, what: str) -> None:
  if "prefix_sliding" not in config.kinds:
    return
  if given is None:
    raise ValueError(f"a model with prefix_sliding layers needs {name} of shape {shape}: {what}; 0 keeps nothing")
  if given.shape != shape:
    raise ValueError(f"{name} must have shape {shape}, got {given.shape}")
  longest = np.asarray(given).max(initial=0) if name == "prefix_length" and concrete(given) else 0
  if longest > config.max_prefix:
    raise ValueError(
      f"prefix_length {longest} exceeds the model's max_prefix {config.max_prefix}, for which its cache has room;"
      " shorten the prompt or raise max_prefix"
    )


def _check_rows(config: DecoderConfig, tokens, routing, **columns) -> None:
  if tokens.ndim != 2:
    raise ValueError(f"tokens must be [rows, tokens], got shape {tokens.shape}; add an axis for a single row")
  for name, column in columns.items():
    if column.shape != tokens.shape:
      raise ValueError(f"{name} must have the shape of tokens {tokens.shape}, got {column.shape}")
  if routing is None:
    return
  if not config.experts:
    raise ValueError("routing was given, but the model is dense; pass routing=None")
  want = (*tokens.shape, config.layers, config.experts_per_token)
  if routing.shape != want:
    raise ValueError(f"routing must be [B, T, L, K] = {want}, got {routing.shape}; record it with this model's shape")


def decoder_policy(config: DecoderConfig, *, rewind: int = REWIND) -> Policy:
  """The decoder as a `Policy`. Where layers slide, a row can be cut back by `rewind` tokens.

  Parameters (float32): embed [V, D], final_norm [D], head [D, V] unless tied, and in `layers`, each with a leading axis
  L: attention_norm, mlp_norm [D]; attention/{q [D, H d], k, v [D, K d], o [H d, D]}, with `qkv_bias` {q, k, v}_bias,
  with `qk_norm` {q, k}_norm [d]; mlp/{gate, up [D, F], down [F, D]}, for a mixture with a leading axis E and router
  [D, E].
  """

  def bound(f):
    return functools.partial(f, config)

  return Policy(
    init=bound(init),
    forward=bound(forward),
    head=bound(head),
    prepare=bound(prepare),
    cache=functools.partial(caches.empty, config, slack=rewind),
    extend=bound(extend),
    axes=axes(config),
    prepared_axes=prepared_axes(config),
    cache_axes=caches.axes(config),
    vocab_size=config.vocab_size,
    config=config,
    max_prefix=config.max_prefix or None,
    rewind=rewind if config.window else None,
  )
