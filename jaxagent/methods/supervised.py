"""Supervised fine-tuning as a Method: demonstrations are rollouts whose every action has advantage 1."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxagent.losses import reinforce, token_mean
from jaxagent.methods.objective import Method, Objective


def one(reward: Float[Array, "N"]) -> Float[Array, "N"]:
  return jnp.ones_like(reward)


sft = Method(Objective(advantage=(one,), surrogate=reinforce, aggregate=token_mean))
"""The mean cross-entropy (nats per token) of the tokens in the mask."""
