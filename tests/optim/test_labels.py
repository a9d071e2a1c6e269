from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.optim import MatrixSpec, hidden_matrices
from jaxagent.optim.labels import arrangement

SHAPE = dict(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64, qk_norm=True)
MOE = dict(experts=4, experts_per_token=2, expert_width=32)


def labels(tree, **options):
  shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))
  return hidden_matrices(shapes, **options)


def muons(tree):
  return {
    jax.tree_util.keystr(p, simple=True, separator="/") for p, x in jax.tree.leaves_with_path(tree) if x == "muon"
  }


@pytest.mark.parametrize("extra", [{}, MOE, dict(tied=False, qkv_bias=True)], ids=["dense", "moe", "untied, biases"])
def test_the_built_in_decoder(extra):
  found = hidden_matrices(jax.eval_shape(decoder_policy(DecoderConfig(**SHAPE, **extra)).init, jax.random.key(0)))
  attention, mlp = (f"layers/{part}/" for part in ("attention", "mlp"))
  assert muons(found) == {attention + x for x in "qkvo"} | {mlp + x for x in ("gate", "up", "down")}
  assert set(jax.tree.leaves(found)) == {"muon", "adam"}


class Block(linen.Module):
  @linen.compact
  def __call__(self, x):
    x = x + linen.Dense(16)(linen.LayerNorm()(x))
    return linen.Dense(1, name="value_head")(linen.Embed(8, 16)(jnp.zeros(4, int)) + x)


def test_linen():
  assert muons(hidden_matrices(Block().init(jax.random.key(0), jnp.ones((4, 16))))) == {"params/Dense_0/kernel"}


class Net(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(8, 16, rngs=rngs)
    self.norm = nnx.LayerNorm(16, rngs=rngs)
    self.value = nnx.Linear(16, 16, rngs=rngs)
    self.lm_head = nnx.Linear(16, 8, rngs=rngs)


@pytest.mark.parametrize("pure", [False, True])
def test_nnx(pure):
  state = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
  found = hidden_matrices(nnx.to_pure_dict(state) if pure else state)
  assert [str(path[0].key) for path, x in jax.tree.leaves_with_path(found) if x == "muon"] == ["value"]
  assert jax.tree.structure(found) == jax.tree.structure(nnx.to_pure_dict(state) if pure else state)


ROWS = [  # path, shape, label
  ("w", (8, 4), "muon"),
  ("w", (8,), "adam"),
  ("log_temperature", (), "adam"),
  ("layers/gain", (3, 8), "adam"),  # a vector of each layer
  ("layers/w", (3, 8, 8), "muon"),
  ("layers/3/w", (8, 8), "muon"),
  ("model/layers/3/experts/w1", (4, 8, 16), "muon"),
  ("layers/mlp/experts/w1", (3, 4, 8, 16), "muon"),
  ("layers/post_attention_layernorm/weight", (3, 8), "adam"),
  ("layers/0/multi_head_attention/q_proj/kernel", (8, 8), "muon"),
  ("layers/attention/k_bias", (3, 2, 8), "adam"),
  ("layers/block_sparse_moe/gate/weight", (3, 8, 4), "adam"),
  ("layers/block_sparse_moe/experts/gate", (3, 4, 8, 4), "muon"),
  ("layers/mlp/router", (3, 8, 4), "adam"),
  ("wte/embedding", (64, 8), "adam"),
  ("lm_head/kernel", (8, 64), "adam"),
  ("critic/out/kernel", (8, 1), "adam"),  # a vector in effect
  ("critic/hidden/kernel", (8, 8), "muon"),
]


def nested(path, leaf):
  for part in reversed(path.split("/")):
    leaf = {part: leaf}
  return leaf


@pytest.mark.parametrize("path, shape, label", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_by_path_and_shape(path, shape, label):
  assert jax.tree.leaves(labels(nested(path, shape))) == [label]


@pytest.mark.parametrize(
  "path, shape, said",
  [
    ("layers/attention/qkv", (3, 8, 24), "layers/attention/qkv of shape .* several matrices side by side"),
    ("layers/0/attn/c_attn/kernel", (8, 24), "several matrices side by side"),
    ("layers/0/attention/query/kernel", (8, 2, 4), "layers/0/attention/query/kernel .* more axes than a matrix"),
    ("layers/attention/query/kernel", (3, 8, 2, 4), "more axes than a matrix"),
    ("conv/kernel", (3, 3, 8, 8), "conv/kernel .* more axes than a matrix"),
    ("layers/0/q_proj/lora_a", (8, 2), "lora_a is a factor of a low-rank matrix"),
  ],
)
def test_what_has_no_one_reading_is_an_error_that_names_the_path(path, shape, said):
  with pytest.raises(ValueError, match=said):
    labels(nested(path, shape))


def test_specs_place_it():
  spec = MatrixSpec(split=(8, 8, 8))
  tree = nested("layers/attention/qkv", (3, 8, 24)) | {"extra": (8, 8)}
  found = labels(tree, specs={"attention/qkv": spec, "extra": "adam"})
  assert found == {"layers": {"attention": {"qkv": spec}}, "extra": "adam"}


@pytest.mark.parametrize(
  "specs, said",
  [
    ({"nothing": "adam"}, "'nothing', which is the end of no parameter's path"),
    ({"w": "sgd"}, 'must be "muon", "adam" or a MatrixSpec'),
    ({"w": MatrixSpec(split=(8, 8))}, "parameter w has 24 columns, which split=.8, 8. does not add up to"),
    ({"w": MatrixSpec(rows=2)}, "parameter w .* has no axis 2"),
    ({"w": MatrixSpec(rows=1, columns=1)}, "parameter w .* every axis must be named once"),
    ({"w": MatrixSpec(batch_axes=(0,))}, "every axis must be named once"),
  ],
)
def test_specs_that_do_not_fit(specs, said):
  with pytest.raises(ValueError, match=said):
    labels({"w": (8, 24)}, specs=specs)


@pytest.mark.parametrize(
  "spec, flat",
  [
    (MatrixSpec(), (12, 8, 24)),
    (MatrixSpec(batch_axes=(1,), rows=0, columns=(2, 3)), (4, 3, 192)),
    (MatrixSpec(batch_axes=(0, 1), rows=3, columns=2), (12, 24, 8)),
  ],
)
def test_arrangements(spec, flat):
  assert arrangement(spec, (3, 4, 8, 24), name="w").flat == flat


def test_specs_may_be_bound_for_a_labels_argument():
  label = partial(hidden_matrices, specs={"w": "adam"})
  assert label({"w": jnp.ones((2, 2))}) == {"w": "adam"}
