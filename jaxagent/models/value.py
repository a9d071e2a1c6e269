"""A critic's model: the trunk of a policy and a scalar head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxagent.models import policy as policies
from jaxagent.models.config import DecoderConfig
from jaxagent.models.policy import Hidden, Params, Policy


@dataclasses.dataclass(frozen=True)
class ValueModel:
  """`init(key) -> params`: a random trunk, and a head of zeros, so that every value begins at 0.

  `forward`: as a policy's. `head(params, states [..., D]) -> values [...]` in float32, in units of reward.
  `adopt(policy_params) -> params`: the policy's own trunk under a head of zeros. `axes`: as a policy's. `policy`: that
  whose trunk it has.
  """

  init: Callable[[Array], Params]
  forward: Callable[..., Hidden]
  head: Callable[[Params, Array], Float[Array, "..."]]
  adopt: Callable[[Params], Params]
  axes: Any
  policy: Policy


def on_mesh(model: ValueModel, mesh: jax.sharding.Mesh) -> ValueModel:
  """See `models.policy.on_mesh`."""
  return value_model(policies.on_mesh(model.policy, mesh))


def value_model(policy: Policy) -> ValueModel:
  """The model whose parameters are `{"trunk": those of the policy, "value_head": [D, 1]}`.

  The built-in decoder's trunk goes without its language head; that of any other policy keeps all that it has.
  """
  without = {"head"} if isinstance(policy.config, DecoderConfig) else set()

  def trunk(tree):
    return {name: x for name, x in tree.items() if name not in without} if without else tree

  def adopt(params):
    return {"trunk": trunk(params), "value_head": jnp.zeros((_width(policy, params), 1), jnp.float32)}

  def forward(params, *columns, **options):
    return policy.forward(params["trunk"], *columns, **options)

  def head(params, states):
    return (states.astype(jnp.float32) @ params["value_head"])[..., 0]

  return ValueModel(
    init=lambda key: adopt(policy.init(key)),
    forward=forward,
    head=head,
    adopt=adopt,
    axes={"trunk": trunk(policy.axes), "value_head": ("embed", None)},
    policy=policy,
  )


def _width(policy: Policy, params: Params) -> int:
  one = jnp.zeros((1, 1), jnp.int32)
  return jax.eval_shape(lambda p: policy.forward(p, one, one, one, prefix_end=one).states, params).shape[-1]
