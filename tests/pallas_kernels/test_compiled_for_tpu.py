"""Compiled by the TPU compiler for chips that are not here: it needs libtpu, and nothing runs.

What is tested is that it accepts the kernels, which also means that their blocks fit in VMEM, and its peak of memory.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import config as run_config
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.policy import on_mesh
from jaxagent.models.sharding import BATCH_AXES, param_shardings
from jaxagent.plan import topology_devices
from jaxagent.training.sharding import make_mesh
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.prefix_sliding import prefix_sliding_attention, prefix_sliding_decode

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler: pip install 'jax[tpu]' brings libtpu"
  ),
]
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ATTENTION = {
  "window": dict(shape=(2, 8, 2, 4096, 128), window=1024),
  "narrow": dict(shape=(1, 2, 1, 2048, 64), window=512, soft_cap=30.0),
  "unaligned": dict(shape=(1, 2, 1, 700, 128), window=100),
  "causal": dict(shape=(1, 4, 4, 4096, 128), window=None),
  "float32": dict(shape=(1, 4, 2, 2048, 128), window=512, dtype=jnp.float32),
}


@functools.cache
def device(chip):
  return topology_devices(CHIPS[chip])[0]


def compiled(chip, function, *arrays):
  """`arrays` are (shape, dtype)."""
  one = device(chip)
  sharding = jax.sharding.SingleDeviceSharding(one)
  arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
  with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([one]), ("x",)).abstract_mesh):
    lowered = jax.jit(function).lower(*arguments)
  return lowered.compile()


def attention(shape, dtype=jnp.bfloat16, **options):
  """The function and its arrays, for (B, H, K, T, D)."""
  batch, heads, kv_heads, length, width = shape
  q, k = ((batch, h, length, width) for h in (heads, kv_heads))
  ids = (batch, length), jnp.int32

  def attend(q, k, v, segment, prefix_end):
    return prefix_sliding_attention(q, k, v, segment=segment, prefix_end=prefix_end, scale=width**-0.5, **options)

  return attend, ((q, dtype), (k, dtype), (k, dtype), ids, ids)


def gradient(function, count):
  def total(*x):
    return jnp.square(function(*x).astype(jnp.float32)).sum()  # needs the forward product too

  return jax.grad(total, argnums=tuple(range(count)))


CASES = [(chip, case) for chip in CHIPS for case in ATTENTION if chip == "v5e" or case in ("window", "causal")]


@pytest.mark.parametrize("chip, case", CASES)
def test_attention_and_its_gradient(chip, case):
  """The program of the gradient has the forward kernel in it."""
  function, arrays = attention(**ATTENTION[case])
  text = compiled(chip, gradient(function, 3), *arrays).as_text()
  assert all(name in text for name in ("prefix_sliding_forward", "prefix_sliding_dq", "prefix_sliding_dkv"))


@pytest.mark.parametrize("new, slots", [(1, 1152), (4, 1000)])
@pytest.mark.parametrize("chip", CHIPS)
def test_decode(chip, new, slots):
  def decode(q, k, v, slot, position, prefix):
    return prefix_sliding_decode(q, k, v, slot, position, prefix, window=512, scale=0.1)

  cache, ids = ((4, 2, slots, 128), jnp.bfloat16), jnp.int32
  q = (4, 8, new, 128), jnp.bfloat16
  text = compiled(chip, decode, q, cache, cache, ((4, slots), ids), ((4, new), ids), ((4,), ids)).as_text()
  assert "prefix_sliding_decode" in text


@pytest.mark.parametrize("rows, depth, width", [(4096, 1024, 768), (1000, 256, 1536)])
@pytest.mark.parametrize("chip", CHIPS)
def test_grouped_matmul_and_its_gradient(chip, rows, depth, width):
  arrays = ((rows, depth), jnp.bfloat16), ((8, depth, width), jnp.bfloat16), ((8,), jnp.int32)
  text = compiled(chip, gradient(grouped_matmul, 2), *arrays).as_text()
  assert text.count("grouped_matmul") > text.count("grouped_matmul_gradient") > 0


def test_a_model_on_a_mesh():
  """Forward and gradient of prefix-sliding layers: rows over "data", heads over "tensor", the kernels on each chip."""
  sizes = dict(vocab_size=512, width=256, layers=2, heads=4, kv_heads=2, head_dim=128, mlp_width=512)
  slides = dict(attention="prefix_sliding", window=256, max_prefix=128)
  policy = decoder_policy(DecoderConfig(**sizes, **slides, dtype="bfloat16"))
  mesh = make_mesh(run_config.Mesh(data=2, tensor=2), devices=topology_devices(CHIPS["v5e"]))
  split = on_mesh(policy, mesh)

  def loss(params, tokens, position, segment, prefix_end):
    states = split.forward(params, tokens, position, segment, prefix_end=prefix_end).states
    logp = jax.nn.log_softmax(split.head(params, states[:, :-1]))
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

  def placed(shapes, shardings):
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)

  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  params = placed(shapes, param_shardings(policy.axes, shapes, mesh=mesh))
  by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(BATCH_AXES))
  rows = [jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=by_row)] * 4
  program = jax.jit(jax.value_and_grad(loss)).lower(params, *rows).compile()
  text = program.as_text()
  assert all(name in text for name in ("prefix_sliding_forward", "prefix_sliding_dq", "prefix_sliding_dkv"))
  assert "bf16[2,2,1024,128]" in text  # of 4 rows and 4 heads each chip has 2 and 2


def test_memory_is_linear_up_to_128k():
  """Temporaries of forward and backward: twice the tokens add twice the bytes."""

  def temporaries(length):
    function, arrays = attention((1, 4, 2, length, 128), window=1024)
    return compiled("v5e", gradient(function, 3), *arrays).memory_analysis().temp_size_in_bytes

  short, middle, long = (temporaries(2**n) for n in (15, 16, 17))
  assert long - middle < 2.2 * (middle - short)
  assert long < 2**17 * 4096  # bytes a token; q, k, v and the output are 3,072
