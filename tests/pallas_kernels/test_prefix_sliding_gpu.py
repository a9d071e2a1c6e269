"""The Mosaic GPU kernel, compiled for an H100 that is not here: its instructions cannot be interpreted on a CPU."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.plan import topology_devices
from pallas_kernels.prefix_sliding import gpu, prefix_sliding_attention

new_enough = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernel needs JAX 0.12")
plugin = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="no CUDA compiler: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt at the version of jax",
)


@new_enough
@plugin
@pytest.mark.parametrize("width, window, soft_cap", [(64, 512, None), (128, 1024, 30.0), (128, None, None)])
def test_compiled_for_an_h100(width, window, soft_cap):
  mesh = jax.sharding.Mesh(np.array(topology_devices("h100:1")), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
  q, k = (shape((1, h, 2048, width), jnp.bfloat16) for h in (8, 2))
  ids = shape((1, 2048), jnp.int32)

  def attend(q, k, v, segment, prefix_end):
    return prefix_sliding_attention(
      q, k, v, segment=segment, prefix_end=prefix_end, window=window, soft_cap=soft_cap, scale=0.1, implementation="gpu"
    )

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(attend).lower(q, k, k, ids, ids)
  assert lowered.compile().memory_analysis().temp_size_in_bytes < 2**27


def test_refuses_what_the_kernel_does_not_take():
  with pytest.raises(ValueError, match=r"needs JAX 0.12|takes bfloat16 or float16 .* use implementation='xla'"):
    gpu.check_gpu(jnp.zeros((1, 1, 64, 64)))
