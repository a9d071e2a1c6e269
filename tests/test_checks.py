from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.checks import check_ids, check_options, check_range, check_shapes
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.rewards import contract_progress
from jaxagent.scheduling import diverse_batch


@pytest.mark.parametrize(
  "arguments, said",
  [
    (dict(a=((3, 4), "N T"), b=((3, 5), "N T")), r"b must have shape \[N T\] with N=3, T=4, got \(3, 5\)"),
    (dict(a=((3, 4), "N T"), b=((4,), "N")), r"b must have shape \[N\] with N=3, got \(4,\)"),
    (dict(a=((3,), "N T")), r"a must have shape \[N T\], got \(3,\)"),
    (dict(a=((2, 3, 4), "*B T"), b=((3, 4), "*B T")), r"b must have shape \[\*B T\]"),
    (dict(a=((), "*B T")), r"a must have shape \[\*B T\], got \(\)"),
  ],
)
def test_names_the_argument_that_disagrees(arguments, said):
  with pytest.raises(ValueError, match=said):
    check_shapes(**{k: (np.zeros(shape), axes) for k, (shape, axes) in arguments.items()})


def test_the_first_option_that_is_wrong_is_named():
  check_options("env: ", (True, "a", 0, "at least 1"))
  with pytest.raises(ValueError, match=r"^env: b must be at least 1, got '0'$"):
    check_options("env: ", (True, "a", 1, "1"), (0, "b", "0", "at least 1"), (False, "c", 0, "2"))


def test_accepts_what_agrees_missing_arguments_and_tracers():
  check_shapes(a=(np.zeros((2, 3, 4)), "*B T"), b=(np.zeros((2, 3)), "*B"), c=(None, "N"), d=(1.0, "*X"))
  jax.jit(lambda x: check_shapes(x=(x, "N T"), y=(x[0], "T")))(np.zeros((2, 3)))


def test_values_are_checked_where_they_are_known():
  with pytest.raises(ValueError, match=r"group must hold ids in \[0, 3\), got 3 at index 1"):
    check_ids("group", np.array([0, 3]), 3)
  with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\], got nan at index 1"):
    check_range("rate", np.array([0.0, np.nan]), 0, 1)
  check_range("rate", np.array([0.0, np.nan]), 0, 1, where=np.array([True, False]))
  check_range("rate", np.array([[0.0, 1.0], [7.0, 8.0]]), 0, 1, where=np.array([True, False]))
  check_ids("turn", np.array([-1, 0]), 1, where=np.array([False, True]))
  with pytest.raises(ValueError, match=r"rate must lie in .* got 2.0 at the scalar"):
    check_range("rate", 2.0, 0, 1)
  jax.jit(lambda x: (check_ids("x", x, 1), check_range("x", x, 0, 1)))(np.array([5, 7]))
  check_ids("none", np.zeros(0, int), 0)


def test_arrays_that_a_jitted_function_closes_over_are_checked():
  """They are concrete, but what JAX or NumPy's functions make of them inside is not."""
  half, apart = jnp.array([0.5, 0.5]), np.zeros((2, 2), bool)
  done = jnp.array([1.0, 0.0])
  assert jax.jit(lambda x: contract_progress(x, half, apart))(done) == 0.5
  third = half / 1.5
  with pytest.raises(ValueError, match="weight must sum to 1, got 0"):
    jax.jit(lambda x: contract_progress(x, third, apart))(done)

  env, quota, similar, free = jnp.array([0, 0, 1]), jnp.array([1, 1]), jnp.eye(3), jnp.array([True, True, False])
  for available, said in ((free, "the quotas allow 1 tasks"), (free & False, "as many available tasks, got 0")):
    with pytest.raises(ValueError, match=said):
      jax.jit(lambda x, a=available: diverse_batch(x, similar, env, quota, size=2, available=a).task)(jnp.ones(3))

  config = DecoderConfig(
    vocab_size=8, width=8, layers=1, heads=1, mlp_width=8, attention="prefix_sliding", window=2, max_prefix=2
  )
  policy = decoder_policy(config)
  weights, token = policy.prepare(policy.init(jax.random.key(0))), jnp.zeros((1, 1), int)
  for length in (2, 3):
    prefix = jnp.array([length])
    run = jax.jit(lambda x, p=prefix: policy.extend(weights, policy.cache(1, 4), x, x, prefix_length=p)[0].states)
    with pytest.raises(ValueError, match="3 exceeds the model's max_prefix 2") if length > 2 else nullcontext():
      run(token)
