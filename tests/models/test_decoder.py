import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_params import random_params
from thinned import thinned

from jaxagent.models.cache import grow, reset_rows
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import Layer, decoder_policy
from jaxagent.models.layers import attention, packed_mask, product, rms_norm, rotate, rotation

SIZES = {"vocab_size": 50, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
DENSE = {**SIZES, "mlp_width": 40}
CONFIGS = {
  "llama": DecoderConfig(**DENSE),
  "qwen2": DecoderConfig(**DENSE, tied=False, qkv_bias=True),
  "qwen3": DecoderConfig(**DENSE, qk_norm=True, rope_theta=1e6),
  "qwen3_moe": DecoderConfig(**SIZES, qk_norm=True, tied=False, experts=5, experts_per_token=2, expert_width=16),
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TWO = pytest.mark.parametrize("config", [CONFIGS["qwen2"], CONFIGS["qwen3_moe"]], ids=["dense", "moe"])


ROWS, LENGTH = 2, 8  # nearly every test has this shape: one compilation


@functools.cache
def built(config):
  """Policy, parameters that are all at random (norms and biases too), and the jitted functions."""
  policy = decoder_policy(config)
  params = random_params(policy)
  return policy, params, jax.jit(policy.forward), jax.jit(policy.extend, static_argnames="slots")


@functools.cache
def weights_of(config):
  policy, params, *_ = built(config)
  return jax.jit(policy.prepare)(params)


@functools.cache
def gradient(config):
  """Of the summed log-probability of token 3, padding left out."""
  policy = built(config)[0]

  def loss(params, tokens, position, segment):
    logits = policy.head(params, policy.forward(params, tokens, position, segment).states)
    return jnp.sum(jnp.where(segment >= 0, jax.nn.log_softmax(logits)[..., 3], 0))

  return jax.jit(jax.grad(loss))


def tokens_of(seed=2, length=LENGTH):
  return jax.random.randint(jax.random.key(seed), (ROWS, length), 0, SIZES["vocab_size"])


def one_segment(tokens):
  position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return position, jnp.zeros_like(tokens)


def full_logits(config, tokens, **kwargs):
  policy, params, forward, _ = built(config)
  hidden = forward(params, tokens, *one_segment(tokens), **kwargs)
  return policy.head(params, hidden.states)


def reference_logits(config, params, ids):
  """One row, one token at a time, one head at a time, in float64 NumPy."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  half, d = config.head_dim // 2, config.head_dim

  def norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w

  def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

  def silu(x):
    return x / (1 + np.exp(-x))

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
def test_forward_equals_a_loop_over_tokens_and_heads(config):
  tokens = tokens_of()
  logits = full_logits(config, tokens)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits[0], reference_logits(config, built(config)[1], np.asarray(tokens[0])), atol=2e-5)


@EVERY
def test_parameters_have_the_documented_paths_and_axes(config):
  c, (policy, params, *_) = config, built(config)
  q, kv, layers = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.layers
  attention_shapes = {"q": (c.width, q), "k": (c.width, kv), "v": (c.width, kv), "o": (q, c.width)}
  attention_shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)} if c.qkv_bias else {}
  attention_shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)} if c.qk_norm else {}
  wide = (c.experts, c.width, c.expert_width) if c.experts else (c.width, c.mlp_width)
  mlp = {"gate": wide, "up": wide, "down": (*wide[:-2], wide[-1], wide[-2])}
  mlp |= {"router": (c.width, c.experts)} if c.experts else {}
  norms = {"attention_norm": (c.width,), "mlp_norm": (c.width,)}
  layer = {**norms, "attention": attention_shapes, "mlp": mlp}
  stacked = jax.tree.map(lambda shape: (layers, *shape), layer, is_leaf=_is_tuple)
  want = {"embed": (c.vocab_size, c.width), "final_norm": (c.width,), "layers": stacked}
  want |= {} if c.tied else {"head": (c.width, c.vocab_size)}
  assert jax.tree.map(jnp.shape, params) == want
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  ranks = jax.tree.map(len, policy.axes, is_leaf=_is_tuple)
  assert ranks == jax.tree.map(jnp.ndim, params)
  assert policy.axes["layers"]["attention"]["q"] == ("layers", "embed", "heads")


def _is_tuple(x):
  return isinstance(x, tuple)


def test_initial_weights_are_float32_and_not_zero():
  config = dataclasses.replace(CONFIGS["qwen3_moe"], qkv_bias=True, layers=3)
  params = jax.jit(decoder_policy(config).init)(jax.random.key(3))
  for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    assert x.dtype == jnp.float32
    assert np.asarray(x).all() != ("bias" in jax.tree_util.keystr(path))
  layers = params["layers"]
  assert float(jnp.std(layers["mlp"]["gate"])) == pytest.approx(config.width**-0.5, rel=0.1)  # 1 / sqrt(fan-in)
  assert float(jnp.std(layers["mlp"]["down"])) == pytest.approx((config.expert_width * 6) ** -0.5, rel=0.1)
  assert float(jnp.std(params["embed"])) == pytest.approx(0.02, rel=0.1)
  assert float(jnp.abs(layers["attention"]["q"][0] - layers["attention"]["q"][1]).max()) > 0.01


def decode(config, tokens, cache, position=None):
  """Extends by half of the tokens at once, then by one at a time. Returns logits, routing and the cache."""
  policy, _, _, extend = built(config)
  position = one_segment(tokens)[0] if position is None else position
  half = tokens.shape[1] // 2
  parts = []
  for step in [slice(0, half), *(slice(i, i + 1) for i in range(half, tokens.shape[1]))]:
    hidden, cache = extend(weights_of(config), cache, tokens[:, step], position[:, step])
    parts.append(hidden)
  states = jnp.concatenate([h.states for h in parts], 1)
  routing = jnp.concatenate([h.aux["routing"] for h in parts], 1) if config.experts else None
  return policy.head(weights_of(config), states), routing, cache


@EVERY
def test_decoding_equals_the_full_forward_and_a_reused_slot_forgets(config):
  tokens = tokens_of()
  logits, routing, cache = decode(config, tokens, built(config)[0].cache(ROWS, LENGTH))  # up to the last slot
  np.testing.assert_allclose(logits, full_logits(config, tokens, routing=routing), atol=1e-5)
  cache = reset_rows(cache, jnp.array([True, False]))  # row 0 is emptied, row 1 rewound to position 0
  np.testing.assert_array_equal(cache.position["full"], [[-1] * LENGTH, range(LENGTH)])
  other = tokens_of(seed=5)
  logits, routing, _ = decode(config, other, cache)
  np.testing.assert_allclose(logits, full_logits(config, other, routing=routing), atol=1e-5)


@EVERY
def test_padding_left_right_or_none_is_the_same(config):
  policy, params, forward, extend = built(config)
  tokens = tokens_of()
  want = full_logits(config, tokens)
  position = jnp.array([[-1, -1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, -1, -1]])  # padding before, and after
  row = jnp.where(position >= 0, jnp.take_along_axis(tokens, jnp.maximum(position, 0), 1), 7)
  hidden, cache = extend(weights_of(config), policy.cache(ROWS, LENGTH), row, position)
  np.testing.assert_array_equal(cache.position["full"], [[0, 1, 2, 3, 4, -1, -1, -1], [0, 1, 2, 3, 4, 5, -1, -1]])
  packed = forward(params, row, position, jnp.where(position >= 0, 0, -1))
  for states in (hidden.states, packed.states):
    logits = policy.head(params, states)
    assert np.isfinite(states).all()
    np.testing.assert_allclose(logits[0, 3:], want[0, :5], atol=1e-5)
    np.testing.assert_allclose(logits[1, :6], want[1, :6], atol=1e-5)


@EVERY
def test_packed_rows_equal_separate_rows(config):
  policy, params, forward, _ = built(config)
  tokens = tokens_of()
  segment = jnp.array([[0] * 3 + [1] * 4 + [-1], [0] * 1 + [1] * 2 + [2] * 5])
  position = jnp.array([[0, 1, 2, 0, 1, 2, 3, 9], [0, 0, 1, 0, 1, 2, 3, 4]])
  packed = policy.head(params, forward(params, tokens, position, segment).states)
  starts = [(0, 0, 3), (0, 3, 7), (1, 0, 1), (1, 1, 3), (1, 3, 8)]
  for row, start, end in starts:
    alone = jnp.roll(tokens, -start, axis=1)  # causal: what follows the segment cannot matter
    np.testing.assert_allclose(packed[row, start:end], full_logits(config, alone)[row, : end - start], atol=1e-5)


def test_position_is_not_the_index():
  policy, params, forward, _ = built(CONFIGS["llama"])
  tokens = tokens_of()
  position, segment = one_segment(tokens)

  def logits(position):
    return policy.head(params, forward(params, tokens, position, segment).states)

  np.testing.assert_allclose(logits(position + 100), logits(position), atol=5e-5)  # rotary positions are relative
  assert float(jnp.abs(logits(position * 3) - logits(position)).max()) > 1e-2


@TWO
def test_scan_equals_a_loop_over_layers(config):
  _, params, forward, _ = built(config)
  tokens = tokens_of()
  position, segment = one_segment(tokens)
  turn, mask = rotation(position, config.head_dim, config.rope_theta), packed_mask(segment)
  graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))

  def attend(q, k, v):
    return attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask), None

  @jax.jit
  def unrolled(params):
    x = params["embed"][tokens]
    for i in range(config.layers):
      layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
      x, _, _ = nnx.merge(graph, layer)(x, turn, attend)
    return rms_norm(x, params["final_norm"], config.norm_eps)

  np.testing.assert_allclose(unrolled(params), forward(params, tokens, position, segment).states, atol=1e-5)


def count(jaxpr, primitive):
  """Equations of that primitive, in the nested programs too."""
  total = 0
  for eqn in jaxpr.eqns:
    total += eqn.primitive.name == primitive
    for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      inner = getattr(sub, "jaxpr", sub)
      total += count(inner, primitive) if hasattr(inner, "eqns") else 0
  return total


@TWO
def test_the_program_is_one_scan_whatever_the_depth(config):
  tokens = tokens_of()

  def program(layers):
    policy = decoder_policy(dataclasses.replace(config, layers=layers))
    params = jax.eval_shape(policy.init, jax.random.key(0))
    return jax.make_jaxpr(policy.forward)(params, tokens, *one_segment(tokens)).jaxpr

  two, nine = program(2), program(9)
  assert [e.params["length"] for e in nine.eqns if e.primitive.name == "scan"] == [9]
  for primitive in ("scan", "dot_general", "mul"):
    assert count(two, primitive) == count(nine, primitive) > 0


@TWO
def test_gradients_reach_every_parameter_and_ignore_padding(config):
  params, tokens = built(config)[1], tokens_of()
  position, _ = one_segment(tokens)
  segment = jnp.where(position < 5, 0, -1)
  grad = gradient(config)(params, tokens, position, segment)
  other = gradient(config)(params, jnp.where(segment >= 0, tokens, 13), jnp.where(segment >= 0, position, 99), segment)
  for path, x in jax.tree_util.tree_flatten_with_path(grad)[0]:
    assert np.isfinite(x).all() and float(jnp.abs(x).max()) > 1e-6, path
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), grad, other)


@pytest.mark.slow
def test_remat_changes_no_gradient():
  config = CONFIGS["qwen2"]
  tokens = tokens_of()
  rows = (built(config)[1], tokens, *one_segment(tokens))
  remat = gradient(dataclasses.replace(config, remat=True))(*rows)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradient(config)(*rows), remat)


def bfloat16(config):
  return dataclasses.replace(config, dtype="bfloat16", remat=True)


@thinned("config", [CONFIGS["llama"], CONFIGS["qwen3_moe"]], every=2)
def test_bfloat16_runs_and_stays_close(config):
  policy, params, forward, _ = built(bfloat16(config))
  tokens = tokens_of()
  position, segment = one_segment(tokens)
  decoded, routing, cache = decode(bfloat16(config), tokens, policy.cache(ROWS, LENGTH))
  full = forward(params, tokens, position, segment, routing=routing)
  exact = full_logits(config, tokens, routing=routing)
  assert cache.keys[0].dtype == jnp.bfloat16
  assert {full.states.dtype, decoded.dtype} == {jnp.dtype("float32")}
  scale = float(jnp.abs(exact).max())
  assert 1e-5 < float(jnp.abs(policy.head(params, full.states) - exact).max()) < 0.03 * scale
  assert float(jnp.abs(decoded - policy.head(params, full.states)).max()) < 0.01 * scale


@pytest.mark.slow
def test_bfloat16_gradients_are_float32_and_close():
  config, tokens = CONFIGS["qwen2"], tokens_of()
  rows = (built(config)[1], tokens, *one_segment(tokens))
  for got, want in zip(jax.tree.leaves(gradient(bfloat16(config))(*rows)), jax.tree.leaves(gradient(config)(*rows))):
    assert got.dtype == jnp.float32
    assert float(jnp.linalg.norm(got - want)) < 0.05 * float(jnp.linalg.norm(want))


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

  def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)

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
  got = rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]), 0.5)
  np.testing.assert_allclose(got, [3 / 13**0.5, 8 / 13**0.5], rtol=1e-6)


def test_decoding_inside_a_loop_with_a_donated_cache_compiles_once():
  policy = built(CONFIGS["qwen3"])[0]
  weights, tokens = weights_of(CONFIGS["qwen3"]), tokens_of()
  traces = []

  @functools.partial(jax.jit, donate_argnums=1)
  def run(weights, cache, tokens):
    traces.append(1)

    def body(carry):
      t, cache, logits = carry
      column = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1)
      hidden, cache = policy.extend(weights, cache, column, jnp.full_like(column, t))
      return t + 1, cache, logits.at[:, t].set(policy.head(weights, hidden.states)[:, 0])

    start = (0, cache, jnp.zeros((*tokens.shape, SIZES["vocab_size"])))
    _, cache, logits = jax.lax.while_loop(lambda c: c[0] < LENGTH, body, start)
    return logits, cache

  for _ in range(2):
    cache = policy.cache(ROWS, LENGTH)
    logits, _ = run(weights, cache, tokens)
    assert cache.keys[0].is_deleted()
  np.testing.assert_allclose(logits, full_logits(CONFIGS["qwen3"], tokens), atol=1e-5)
  assert len(traces) == 1


def test_a_bucket_of_slots_and_a_grown_cache_change_nothing():
  policy, _, _, extend = built(CONFIGS["llama"])
  weights, tokens = weights_of(CONFIGS["llama"]), tokens_of()
  position = one_segment(tokens)[0]
  want = full_logits(CONFIGS["llama"], tokens)
  hidden, cache = extend(weights, policy.cache(ROWS, 4), tokens[:, :4], position[:, :4])
  np.testing.assert_allclose(policy.head(weights, hidden.states), want[:, :4], atol=1e-5)
  hidden, cache = extend(weights, grow(cache, 16), tokens[:, 4:], position[:, 4:], slots=8)
  np.testing.assert_allclose(policy.head(weights, hidden.states), want[:, 4:], atol=1e-5)
  assert cache.capacity == 16
  with pytest.raises(ValueError, match="cannot shrink to 8"):
    grow(cache, 8)


def test_a_prefix_end_changes_nothing_under_full_attention():
  _, params, forward, _ = built(CONFIGS["llama"])
  rows = (tokens_of(), *one_segment(tokens_of()))
  with_prefix = forward(params, *rows, prefix_end=jnp.full_like(rows[0], 2))
  np.testing.assert_array_equal(forward(params, *rows).states, with_prefix.states)


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


@pytest.mark.parametrize("name, config", CONFIGS.items())
def test_architecture_is_named(name, config):
  assert config.architecture == name
  assert hash(config) == hash(dataclasses.replace(config))
  with pytest.raises(ValueError, match="no transformers architecture"):
    _ = dataclasses.replace(config, qkv_bias=True, qk_norm=True).architecture


def test_heads_default_from_width():
  config = DecoderConfig(vocab_size=9, width=32, layers=1, heads=4, mlp_width=8)
  assert (config.kv_heads, config.head_dim) == (4, 8)


def test_rows_that_do_not_fit_are_refused():
  policy, params, *_ = built(CONFIGS["llama"])
  tokens = tokens_of(length=4)
  position, segment = one_segment(tokens)
  weights, cache = weights_of(CONFIGS["llama"]), policy.cache(2, 4)
  cases = [
    (lambda: policy.forward(params, tokens[0], position[0], segment[0]), "tokens must be"),
    (lambda: policy.forward(params, tokens, position[:, :3], segment), "position must have the shape of tokens"),
    (lambda: policy.forward(params, tokens, position, segment, routing=jnp.zeros((2, 4, 2, 2), int)), "model is dense"),
    (lambda: policy.extend(weights, cache, tokens[:1], position[:1]), "do not fit a cache of 2 rows"),
    (lambda: policy.extend(weights, cache, tokens, position, slots=5), "slots=5"),
    (lambda: policy.cache(0, 4), "at least one row"),
  ]
  moe, moe_params, *_ = built(CONFIGS["qwen3_moe"])
  wrong = jnp.zeros((2, 4, 2, 3), int)
  cases.append((lambda: moe.forward(moe_params, tokens, position, segment, routing=wrong), r"\(2, 4, 2, 2\), got"))
  for call, message in cases:
    with pytest.raises(ValueError, match=message):
      call()
