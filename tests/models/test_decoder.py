import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.cache import grow, reset_rows
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.layers import attention, product, rms_norm, rotate, rotation

SIZES = {"vocab_size": 50, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
DENSE = {**SIZES, "mlp_width": 40}
CONFIGS = {
  "llama": DecoderConfig(**DENSE),
  "qwen2": DecoderConfig(**DENSE, tied=False, qkv_bias=True),
  "qwen3": DecoderConfig(**DENSE, qk_norm=True, rope_theta=1e6),
  "qwen3_moe": DecoderConfig(**SIZES, qk_norm=True, tied=False, experts=5, experts_per_token=2, expert_width=16),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def built(name):
  """Policy, noisy parameters (norms and biases too), and the jitted functions."""
  policy = decoder_policy(CONFIGS[name])
  params = policy.init(jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  params = tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)])
  return policy, params, jax.jit(policy.forward), jax.jit(policy.extend, static_argnames="slots")


def tokens_of(rows, length, seed=2):
  return jax.random.randint(jax.random.key(seed), (rows, length), 0, SIZES["vocab_size"])


def one_segment(tokens):
  position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return position, jnp.zeros_like(tokens)


def full_logits(name, tokens, **kwargs):
  policy, params, forward, _ = built(name)
  hidden = forward(params, tokens, *one_segment(tokens), **kwargs)
  return policy.head(params, hidden.states), hidden


def reference_logits(config, params, ids):
  """One row, one token at a time, one head at a time, in float64 NumPy."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w
  softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
  silu = lambda x: x / (1 + np.exp(-x))
  half, d = config.head_dim // 2, config.head_dim

  def turn(x, t):
    angle = t * config.rope_theta ** (-np.arange(half) * 2 / d)
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

  def heads(x, layer, which, t):
    y = x @ layer["attention"][which] + layer["attention"].get(f"{which}_bias", 0)
    y = y.reshape(-1, d)
    if config.qk_norm and which != "v":
      y = norm(y, layer["attention"][f"{which}_norm"])
    return y if which == "v" else np.stack([turn(head, t) for head in y])

  def mlp(x, m):
    if not config.experts:
      return (silu(x @ m["gate"]) * (x @ m["up"])) @ m["down"]
    probability = softmax(x @ m["router"])
    chosen = np.argsort(-probability)[: config.experts_per_token]
    g = probability[chosen] / (probability[chosen].sum() if config.norm_topk_prob else 1)
    return sum(w * ((silu(x @ m["gate"][e]) * (x @ m["up"][e])) @ m["down"][e]) for w, e in zip(g, chosen))

  rows = [p["embed"][i] for i in ids]
  for index in range(config.layers):
    layer = jax.tree.map(lambda x, i=index: x[i], p["layers"])
    normed = [norm(x, layer["attention_norm"]) for x in rows]
    q, k, v = ([heads(x, layer, which, t) for t, x in enumerate(normed)] for which in "qkv")
    for t in range(len(rows)):
      read = []
      for h in range(config.heads):
        shared = h // (config.heads // config.kv_heads)
        seen = softmax(np.array([q[t][h] @ k[s][shared] for s in range(t + 1)]) / np.sqrt(d))
        read.append(sum(w * v[s][shared] for s, w in enumerate(seen)))
      rows[t] = rows[t] + np.concatenate(read) @ layer["attention"]["o"]
      rows[t] = rows[t] + mlp(norm(rows[t], layer["mlp_norm"]), layer["mlp"])
  out = np.stack([norm(x, p["final_norm"]) for x in rows])
  return out @ (p["embed"].T if config.tied else p["head"])


@EVERY
def test_forward_equals_a_loop_over_tokens_and_heads(name):
  ids = tokens_of(1, 7)
  logits, _ = full_logits(name, ids)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits[0], reference_logits(CONFIGS[name], built(name)[1], np.asarray(ids[0])), atol=2e-5)


@EVERY
def test_parameters_have_the_documented_paths_and_axes(name):
  c, (policy, params, *_) = CONFIGS[name], built(name)
  q, kv, layers = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.layers
  attention_shapes = {"q": (c.width, q), "k": (c.width, kv), "v": (c.width, kv), "o": (q, c.width)}
  attention_shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)} if c.qkv_bias else {}
  attention_shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)} if c.qk_norm else {}
  wide = (c.experts, c.width, c.expert_width) if c.experts else (c.width, c.mlp_width)
  mlp = {"gate": wide, "up": wide, "down": (*wide[:-2], wide[-1], wide[-2])}
  mlp |= {"router": (c.width, c.experts)} if c.experts else {}
  norms = {"attention_norm": (c.width,), "mlp_norm": (c.width,)}
  stacked = jax.tree.map(lambda s: (layers, *s), {**norms, "attention": attention_shapes, "mlp": mlp}, is_leaf=_is_tuple)
  want = {"embed": (c.vocab_size, c.width), "final_norm": (c.width,), "layers": stacked}
  want |= {} if c.tied else {"head": (c.width, c.vocab_size)}
  assert jax.tree.map(jnp.shape, params) == want
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  ranks = jax.tree.map(len, policy.axes, is_leaf=_is_tuple)
  assert ranks == jax.tree.map(jnp.ndim, params)
  assert policy.axes["layers"]["attention"]["q"] == ("layers", "embed", "heads")


def _is_tuple(x):
  return isinstance(x, tuple)


def test_no_initial_weight_is_zero_except_biases():
  for config in CONFIGS.values():
    flat, _ = jax.tree_util.tree_flatten_with_path(decoder_policy(config).init(jax.random.key(3)))
    zero = [jax.tree_util.keystr(path) for path, x in flat if not np.asarray(x).all()]
    assert all("bias" in path for path in zero)


def decode(name, tokens, cache, position=None, prefill=4):
  """Extends by `prefill` tokens at once, then by one at a time. Returns logits, routing and the cache."""
  policy, params, _, extend = built(name)
  weights = policy.prepare(params)
  position = one_segment(tokens)[0] if position is None else position
  steps = [slice(0, prefill), *(slice(i, i + 1) for i in range(prefill, tokens.shape[1]))]
  parts = []
  for step in steps:
    hidden, cache = extend(weights, cache, tokens[:, step], position[:, step])
    parts.append(hidden)
  states = jnp.concatenate([h.states for h in parts], 1)
  routing = jnp.concatenate([h.aux["routing"] for h in parts], 1) if "routing" in parts[0].aux else None
  return policy.head(weights, states), routing, cache


@EVERY
def test_decoding_equals_the_full_forward(name):
  tokens = tokens_of(3, 9)
  logits, routing, _ = decode(name, tokens, built(name)[0].cache(3, 9))  # the last token fills the last slot
  full, _ = full_logits(name, tokens, routing=routing)
  np.testing.assert_allclose(logits, full, atol=1e-5)


@EVERY
def test_a_reused_slot_and_a_rewound_row_forget(name):
  policy, params, _, extend = built(name)
  _, _, cache = decode(name, tokens_of(2, 9, seed=5), policy.cache(2, 10))
  tokens = tokens_of(2, 6)
  cache = reset_rows(cache, jnp.array([True, False]))  # row 0 is emptied, row 1 rewound to position 0
  np.testing.assert_array_equal(cache.position[0], -1)
  assert (np.asarray(cache.position[1]) >= 0).sum() == 9
  logits, routing, _ = decode(name, tokens, cache, prefill=3)
  np.testing.assert_allclose(logits, full_logits(name, tokens, routing=routing)[0], atol=1e-5)


@EVERY
def test_padding_left_right_or_none_is_the_same(name):
  policy, params, _, extend = built(name)
  weights, tokens = policy.prepare(params), tokens_of(1, 5)
  want = full_logits(name, tokens)[0][0]
  garbage = jnp.full((1, 3), 7)
  absent = jnp.full((1, 3), -1)
  for order in ((tokens,), (garbage, tokens), (tokens, garbage)):
    part = [one_segment(tokens)[0] if x is tokens else absent for x in order]
    row, position = jnp.concatenate(order, 1), jnp.concatenate(part, 1)
    hidden, cache = extend(weights, policy.cache(1, 8), row, position)
    np.testing.assert_allclose(policy.head(weights, hidden.states)[0][position[0] >= 0], want, atol=1e-5)
    np.testing.assert_array_equal(cache.position[0], [0, 1, 2, 3, 4, -1, -1, -1])
    assert np.isfinite(hidden.states).all()
    packed = policy.forward(params, row, position, jnp.where(position >= 0, 0, -1))
    np.testing.assert_allclose(policy.head(params, packed.states)[0][position[0] >= 0], want, atol=1e-5)
    assert np.isfinite(packed.states).all()


@EVERY
def test_packed_rows_equal_separate_rows(name):
  policy, params, forward, _ = built(name)
  parts = [tokens_of(1, n, seed=n)[0] for n in (4, 6, 3)]
  row = jnp.concatenate([*parts, jnp.full(2, 11)])[None]
  segment = jnp.concatenate([jnp.full(len(p), i) for i, p in enumerate(parts)] + [jnp.full(2, -1)])[None]
  position = jnp.concatenate([jnp.arange(len(p)) for p in parts] + [jnp.arange(2)])[None]
  packed = policy.head(params, forward(params, row, position, segment).states)[0]
  separate = jnp.concatenate([full_logits(name, p[None])[0][0] for p in parts])
  np.testing.assert_allclose(packed[: len(separate)], separate, atol=1e-5)


def test_position_is_not_the_index():
  policy, params, forward, _ = built("llama")
  tokens = tokens_of(1, 6)
  position, segment = one_segment(tokens)
  logits = lambda p: policy.head(params, forward(params, tokens, p, segment).states)
  np.testing.assert_allclose(logits(position + 100), logits(position), atol=2e-5)  # rotary positions are relative
  assert float(jnp.abs(logits(position * 3) - logits(position)).max()) > 1e-2


@EVERY
def test_scan_equals_unrolled_and_remat_changes_nothing(name):
  policy, params, forward, _ = built(name)
  tokens = tokens_of(2, 6)
  rows = (tokens, *one_segment(tokens))
  whole = forward(params, *rows)

  def one_layer(i):
    config = dataclasses.replace(CONFIGS[name], layers=1)
    return config, jax.tree.map(lambda x: x[i : i + 1], params["layers"])

  table = {"embed": params["embed"], "final_norm": jnp.ones_like(params["final_norm"])}
  x = params["embed"][tokens]
  for i in range(CONFIGS[name].layers):  # feed each layer's output as the embedding table of the next
    config, layer = one_layer(i)
    x = _residual_out(config, {**table, "layers": layer}, x, rows)
  states = rms_norm(x, params["final_norm"], CONFIGS[name].norm_eps)
  np.testing.assert_allclose(states, whole.states, atol=1e-5)

  def loss(config, params):
    return jnp.sum(jnp.square(decoder_policy(config).forward(params, *rows).states))

  plain = jax.jit(jax.grad(functools.partial(loss, CONFIGS[name])))(params)
  remat = jax.jit(jax.grad(functools.partial(loss, dataclasses.replace(CONFIGS[name], remat=True))))(params)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), plain, remat)


def _residual_out(config, params, x, rows):
  from jaxagent.models.decoder import Layer, _arrays, _graph, packed_mask  # noqa: F401
  from flax import nnx

  layer = nnx.merge(_graph(lambda: Layer(config, nnx.Rngs(0))), jax.tree.map(lambda p: p[0], params["layers"]))
  _, position, segment = rows
  mask = packed_mask(segment)
  attend = lambda q, k, v: (attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask), None)
  return layer(x, rotation(position, config.head_dim, config.rope_theta), attend)[0]


def count(jaxpr, primitive):
  """Equations of that primitive, in the nested programs too."""
  total = 0
  for eqn in jaxpr.eqns:
    total += eqn.primitive.name == primitive
    for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      inner = getattr(sub, "jaxpr", sub)
      total += count(inner, primitive) if hasattr(inner, "eqns") else 0
  return total


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_program_does_not_grow_with_depth(name):
  tokens = tokens_of(2, 6)

  def program(layers):
    policy = decoder_policy(dataclasses.replace(CONFIGS[name], layers=layers))
    params = jax.eval_shape(policy.init, jax.random.key(0))
    return jax.make_jaxpr(policy.forward)(params, tokens, *one_segment(tokens)).jaxpr

  two, nine = program(2), program(9)
  assert count(two, "scan") == count(nine, "scan") == 1 + count_inner_scans(two)
  assert count(two, "dot_general") == count(nine, "dot_general") > 0


def count_inner_scans(jaxpr):
  outer = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
  assert len(outer) == 1
  return count(outer[0].params["jaxpr"].jaxpr, "scan")


@EVERY
def test_gradients_reach_every_parameter_and_ignore_padding(name):
  policy, params, *_ = built(name)
  tokens = tokens_of(2, 6)
  position, _ = one_segment(tokens)
  segment = jnp.where(position < 4, 0, -1)

  def loss(params, tokens):
    logits = policy.head(params, policy.forward(params, tokens, position, segment).states)
    return jnp.sum(jnp.where(segment >= 0, jax.nn.log_softmax(logits)[..., 3], 0))

  grad = jax.jit(jax.grad(loss))
  a, b = grad(params, tokens), grad(params, jnp.where(segment >= 0, tokens, 13))
  flat, _ = jax.tree_util.tree_flatten_with_path(a)
  for path, x in flat:
    assert np.isfinite(x).all()
    keys_shift_nothing = "k_bias" in jax.tree_util.keystr(path) and x.shape[0] == 0
    assert keys_shift_nothing or float(jnp.abs(x).max()) > 1e-7, path
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_runs_and_stays_close(name):
  config = dataclasses.replace(CONFIGS[name], dtype="bfloat16", remat=True)
  policy, (_, params, _, _) = decoder_policy(config), built(name)
  tokens = tokens_of(2, 6)
  rows = (tokens, *one_segment(tokens))
  full, exact = jax.jit(policy.forward)(params, *rows), full_logits(name, tokens)[1]
  weights = jax.jit(policy.prepare)(params)
  hidden, cache = jax.jit(policy.extend)(weights, policy.cache(2, 8), tokens[:, :5], rows[1][:, :5])
  last, cache = jax.jit(policy.extend)(weights, cache, tokens[:, 5:], rows[1][:, 5:])
  assert cache.keys[0].dtype == jnp.bfloat16
  if config.experts:
    assert full.aux["router_probs"].dtype == jnp.float32
    assert (np.asarray(full.aux["routing"]) == np.asarray(exact.aux["routing"])).mean() > 0.8
    return
  states = jnp.concatenate([hidden.states, last.states], 1)
  assert full.states.dtype == jnp.float32
  for got, want, tolerance in ((states, full.states, 0.03), (full.states, exact.states, 0.1)):
    assert float(jnp.abs(got - want).max() / jnp.abs(want).max()) < tolerance
  logits = policy.head(params, full.states)
  np.testing.assert_allclose(policy.head(weights, full.states), logits, rtol=1e-6, atol=1e-6)
  grad = lambda p: jax.jit(jax.grad(lambda q: jnp.sum(p.head(q, p.forward(q, *rows).states)[..., 3])))(params)
  for got, want in zip(jax.tree.leaves(grad(policy)), jax.tree.leaves(grad(built(name)[0]))):
    assert got.dtype == jnp.float32
    assert float(jnp.linalg.norm(got - want)) < 0.05 * float(jnp.linalg.norm(want)) + 0.05


@pytest.mark.parametrize(
  "spec, left, right",
  [
    ("btd,de->bte", (2, 1, 8), (8, 6)),
    ("nd,vd->nv", (3, 8), (5, 8)),
    ("bkqd,bkds->bkqs", (2, 2, 3, 4), (2, 2, 4, 5)),
    ("bkqs,bksd->bkqd", (2, 2, 1, 5), (2, 2, 5, 4)),
    ("tmd,tdf->tmf", (3, 8, 4), (3, 4, 6)),
  ],
)
def test_bfloat16_products_round_operands_only(spec, left, right):
  a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((left, right)))
  rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
  g = jax.random.normal(jax.random.key(9), jnp.einsum(spec, a, b).shape)
  for wrap in (jax.jit, lambda f: f):
    y, pull = jax.vjp(wrap(lambda a, b: product(spec, a, b, "bfloat16")), a, b)
    np.testing.assert_allclose(y, jnp.einsum(spec, rounded(a), rounded(b)), rtol=1e-5, atol=1e-5)
    _, exact = jax.vjp(lambda a, b: jnp.einsum(spec, a, b), rounded(a), rounded(b))
    for got, want in zip(pull(rounded(g)), exact(rounded(g))):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_rotation_by_hand():
  # head_dim 2 has one frequency, 1: position t turns (a, b) by t radians
  x = jnp.array([[[[1.0, 0.0]], [[1.0, 0.0]]]])
  got = rotate(x, rotation(jnp.array([[0, 2]]), 2, 10000.0))
  np.testing.assert_allclose(got[0, :, 0], [[1, 0], [np.cos(2), np.sin(2)]], atol=1e-6)


def test_rms_norm_by_hand():
  np.testing.assert_allclose(rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]), 0.5), [3 / 13**0.5, 8 / 13**0.5], rtol=1e-6)


def test_decoding_inside_a_loop_with_a_donated_cache_compiles_once():
  policy, params, *_ = built("qwen3")
  weights, tokens = policy.prepare(params), tokens_of(2, 8)
  traces = []

  @functools.partial(jax.jit, donate_argnums=1)
  def run(weights, cache, tokens):
    traces.append(1)

    def body(carry):
      t, cache, logits = carry
      column = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1)
      hidden, cache = policy.extend(weights, cache, column, jnp.full_like(column, t))
      return t + 1, cache, logits.at[:, t].set(policy.head(weights, hidden.states)[:, 0])

    start = (0, cache, jnp.zeros((2, 8, SIZES["vocab_size"])))
    _, cache, logits = jax.lax.while_loop(lambda c: c[0] < 8, body, start)
    return logits, cache

  for _ in range(2):
    cache = policy.cache(2, 8)
    logits, _ = run(weights, cache, tokens)
    assert cache.keys[0].is_deleted()
  np.testing.assert_allclose(logits, full_logits("qwen3", tokens)[0], atol=1e-5)
  assert len(traces) == 1


def test_a_bucket_of_slots_and_a_grown_cache_change_nothing():
  policy, params, _, extend = built("llama")
  weights, tokens = policy.prepare(params), tokens_of(2, 8)
  position = one_segment(tokens)[0]
  want = full_logits("llama", tokens)[0]
  hidden, cache = extend(weights, policy.cache(2, 4), tokens[:, :4], position[:, :4])
  np.testing.assert_allclose(policy.head(weights, hidden.states), want[:, :4], atol=1e-5)
  hidden, cache = extend(weights, grow(cache, 16), tokens[:, 4:], position[:, 4:], slots=8)
  np.testing.assert_allclose(policy.head(weights, hidden.states), want[:, 4:], atol=1e-5)
  assert cache.capacity == 16
  with pytest.raises(ValueError, match="cannot shrink to 8"):
    grow(cache, 8)


def test_a_prefix_end_changes_nothing_under_full_attention():
  policy, params, forward, _ = built("llama")
  tokens = tokens_of(1, 5)
  rows = (tokens, *one_segment(tokens))
  np.testing.assert_array_equal(
    forward(params, *rows).states, forward(params, *rows, prefix_end=jnp.full_like(tokens, 2)).states
  )


@pytest.mark.parametrize(
  "change, message",
  [
    ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"head_dim": 0, "width": 26}, "set head_dim"),
    ({"layers": 0}, "layers must be positive, got 0"),
    ({"mlp_width": 0}, "positive mlp_width"),
    ({"dtype": "float16"}, "float32 or bfloat16, got 'float16'"),
    ({"expert_width": 8}, "set experts > 0"),
    ({"experts": 4, "experts_per_token": 5, "expert_width": 8}, r"in \[1, experts = 4\], got 5"),
    ({"experts": 4, "experts_per_token": 2}, "positive expert_width"),
    ({"rope_theta": 0.0}, "rope_theta must be positive"),
  ],
)
def test_a_config_that_does_not_fit_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    DecoderConfig(**{**DENSE, **change})


@EVERY
def test_architecture_is_named(name):
  config = CONFIGS[name]
  assert config.architecture == name
  assert hash(config) == hash(dataclasses.replace(config))
  with pytest.raises(ValueError, match="no transformers architecture"):
    _ = dataclasses.replace(config, qkv_bias=True, qk_norm=True).architecture


def test_heads_default_from_width():
  config = DecoderConfig(vocab_size=9, width=32, layers=1, heads=4, mlp_width=8)
  assert (config.kv_heads, config.head_dim) == (4, 8)


def test_rows_that_do_not_fit_are_refused():
  policy, params, _, extend = built("llama")
  tokens = tokens_of(2, 4)
  position, segment = one_segment(tokens)
  weights, cache = policy.prepare(params), policy.cache(2, 4)
  cases = [
    (lambda: policy.forward(params, tokens[0], position[0], segment[0]), "tokens must be"),
    (lambda: policy.forward(params, tokens, position[:, :3], segment), "position must have the shape of tokens"),
    (lambda: policy.forward(params, tokens, position, segment, routing=jnp.zeros((2, 4, 2, 2), int)), "model is dense"),
    (lambda: policy.extend(weights, cache, tokens[:1], position[:1]), "do not fit a cache of 2 rows"),
    (lambda: policy.extend(weights, cache, tokens, position, slots=5), "slots=5"),
    (lambda: policy.cache(0, 4), "at least one row"),
  ]
  moe, moe_params, *_ = built("qwen3_moe")
  wrong = jnp.zeros((2, 4, 2, 3), int)
  cases.append((lambda: moe.forward(moe_params, tokens, position, segment, routing=wrong), r"\(2, 4, 2, 2\), got"))
  for call, message in cases:
    with pytest.raises(ValueError, match=message):
      call()
