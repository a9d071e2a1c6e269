"""Which tasks make the next batch: uniform, weighted, or informative and diverse.

All return task numbers `[B]`, none twice; -1 where no task is left.

Reconstruction: EnvSched's paper was not available. A quota for each environment and a penalty for similar tasks are the
paper's; the greedy rule, the uniform draws and all constants are ours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes, concrete


class Choice(NamedTuple):
  """`gain[b]` is the score of task b less its penalty at the moment it was chosen."""

  task: Int[Array, "B"]
  gain: Float[Array, "B"]


def uniform_batch(key: Array, available: Bool[Array, "M"], *, size: int) -> Int[Array, "B"]:
  """`size` of the available tasks, each subset with the same probability. ValueError if there are fewer."""
  return weighted_batch(key, jnp.asarray(available, jnp.float32), size=size)


def weighted_batch(key: Array, weight: Float[Array, "M"], *, size: int) -> Int[Array, "B"]:
  """`size` tasks drawn one after the other in proportion to `weight`; tasks of weight 0 never.

  ValueError if fewer than `size` have a positive weight.
  """
  check_shapes(weight=(weight, "M"))
  weight = jnp.asarray(weight, jnp.float32)
  _enough(weight > 0, size)
  noise = jax.random.gumbel(key, weight.shape)
  value = jnp.where(weight > 0, jnp.log(jnp.where(weight > 0, weight, 1.0)) + noise, -jnp.inf)
  best, task = jax.lax.top_k(value, size)
  return jnp.where(best > -jnp.inf, task, -1)


def environment_quota(
  env: Int[Array, "M"], available: Bool[Array, "M"], *, envs: int, size: int, ratio: float = 1.5
) -> Int[Array, "E"]:
  """max(1, ceil(ratio size / active)) for the environments with an available task, 0 for others; then `lift_quota`."""
  check_shapes(env=(env, "M"), available=(available, "M"))
  capacity = _capacity(env, available, envs)
  active = jnp.maximum(jnp.sum(capacity > 0), 1)
  quota = jnp.maximum(1, jnp.ceil(ratio * size / active)).astype(int)
  return lift_quota(jnp.where(capacity > 0, quota, 0), env, available, size=size)


def lift_quota(
  quota: Int[Array, "E"], env: Int[Array, "M"], available: Bool[Array, "M"], *, size: int
) -> Int[Array, "E"]:
  """Raises the smallest quotas, where tasks are left, by one at a time until a batch of `size` can be filled.

  ValueError if there are fewer available tasks than `size`.
  """
  check_shapes(quota=(quota, "E"), env=(env, "M"), available=(available, "M"))
  quota = jnp.asarray(quota, jnp.int32)
  check_ids("env", env, quota.shape[0])
  _enough(available, size)
  capacity = _capacity(env, available, quota.shape[0])
  most = jnp.iinfo(jnp.int32).max

  def short(q):
    return (jnp.sum(jnp.minimum(q, capacity)) < size) & jnp.any(q < capacity)

  return jax.lax.while_loop(short, lambda q: q.at[jnp.argmin(jnp.where(q < capacity, q, most))].add(1), quota)


def diverse_batch(
  score: Float[Array, "M"],
  similarity: Float[Array, "M M"],
  env: Int[Array, "M"],
  quota: Int[Array, "E"],
  *,
  size: int,
  available: Bool[Array, "M"] | None = None,
  penalty: float = 0.5,
) -> Choice:
  """Greedy: the task of largest score - penalty max_{chosen j} similarity_ij, of an environment under its quota.

  Ties go to the lower number. `available` False: never.
  """
  available = _available(available, score)
  _check_choice(score, similarity, env, quota, available, size)
  never = jnp.zeros(size, bool)
  return _greedy(score, similarity, env, quota, available, penalty, never, jnp.zeros((size, 1)))


def exploring_batch(
  key: Array,
  score: Float[Array, "M"],
  similarity: Float[Array, "M M"],
  env: Int[Array, "M"],
  quota: Int[Array, "E"],
  *,
  size: int,
  available: Bool[Array, "M"] | None = None,
  penalty: float = 0.5,
  explore: float = 0.05,
  temperature: float = 0.0,
) -> Choice:
  """`diverse_batch`, but each place is a uniform draw under the quotas with probability `explore`, so no task starves.

  `temperature` times Gumbel noise is added to the scores.
  """
  available = _available(available, score)
  _check_choice(score, similarity, env, quota, available, size)
  noise_key, coin_key, draw_key = jax.random.split(key, 3)
  score = jnp.asarray(score, jnp.float32)
  score = score + temperature * jax.random.gumbel(noise_key, score.shape)
  coin = jax.random.bernoulli(coin_key, explore, (size,))
  draw = jax.random.uniform(draw_key, (size, score.shape[0]))
  return _greedy(score, similarity, env, quota, available, penalty, coin, draw)


def _greedy(score, similarity, env, quota, available, penalty, coin, draw):
  score, similarity = jnp.asarray(score, jnp.float32), jnp.asarray(similarity, jnp.float32)
  env, quota = jnp.asarray(env), jnp.asarray(quota)

  def place(state, slot):
    free, left, nearest = state
    coin, draw = slot
    gain = score - penalty * nearest
    candidate = free & (left[env] > 0)
    value = jnp.where(candidate, jnp.where(coin, draw, gain), -jnp.inf)
    i = jnp.argmax(value)
    found = candidate[i]
    free = free.at[i].set(free[i] & ~found)
    left = left.at[env[i]].add(-found.astype(left.dtype))
    nearest = jnp.where(found, jnp.maximum(nearest, similarity[i]), nearest)
    return (free, left, nearest), (jnp.where(found, i, -1), jnp.where(found, gain[i], -jnp.inf))

  start = (available, quota, jnp.zeros_like(score))
  _, (task, gain) = jax.lax.scan(place, start, (coin, draw))
  return Choice(task, gain)


def _available(available, score):
  return jnp.ones(jnp.shape(score), bool) if available is None else jnp.asarray(available)


def _capacity(env, available, envs):
  return jax.ops.segment_sum(jnp.asarray(available).astype(jnp.int32), jnp.asarray(env), envs)


def _check_choice(score, similarity, env, quota, available, size):
  check_shapes(
    score=(score, "M"), similarity=(similarity, "M M"), env=(env, "M"), available=(available, "M"), quota=(quota, "E")
  )
  check_ids("env", env, jnp.shape(quota)[0])
  _enough(available, size)
  if concrete(env, quota, available, size):
    found = np.bincount(np.asarray(env)[np.asarray(available, bool)], minlength=np.shape(quota)[0])
    room = int(np.sum(np.minimum(np.asarray(quota), found)))
    if room < size:
      raise ValueError(f"the quotas allow {room} tasks but the batch has {size}; raise them, or use lift_quota")


def _enough(available, size):
  if concrete(available, size) and (count := int(np.sum(np.asarray(available)))) < size:
    raise ValueError(f"a batch of {size} needs as many available tasks, got {count}")
