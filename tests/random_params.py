"""Parameters that are all at random, norms and biases too, so that none of them can be left out unseen."""

import jax
import jax.numpy as jnp
import numpy as np


def random_params(policy):
  rng = np.random.default_rng(0)

  def draw(path, x):
    if "norm" in jax.tree_util.keystr(path):
      return jnp.asarray(rng.uniform(0.5, 1.5, x.shape), jnp.float32)
    return jnp.asarray(rng.normal(size=x.shape) * x.shape[-2] ** -0.5, jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(policy.init, jax.random.key(0)))
