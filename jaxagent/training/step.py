"""One optimizer update as one jitted function, and the scoring passes around it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxagent.methods.objective import Method
from jaxagent.models.policy import Policy, on_mesh
from jaxagent.models.sharding import RULES, Rules, param_shardings, replicated, shard_params
from jaxagent.models.value import ValueModel
from jaxagent.optim import muon_metrics
from jaxagent.training.loss import Tally, loss
from jaxagent.training.scoring import Column, score
from jaxagent.training.sharding import batch_sharding
from jaxagent.types import Scores, TokenBatch, pytree


@pytree
class TrainState:
  """What an update changes. `updates` counts those applied; `trackers` are the method's memories, in its order."""

  params: Any
  opt_state: Any
  updates: Int[Array, ""]
  trackers: tuple[Any, ...] = ()


def init_state(
  policy: Policy | ValueModel,
  method: Method,
  tx: optax.GradientTransformation,
  params: Any,
  *,
  mesh: jax.sharding.Mesh,
  rules: Rules = RULES,
) -> TrainState:
  """A state on the mesh that begins at `params`, which are copied: the step donates its state."""
  params = shard_params(params, policy.axes, mesh=mesh, rules=rules)
  shardings = state_shardings(policy, method, tx, jax.eval_shape(lambda: params), mesh=mesh, rules=rules)
  rest = jax.jit(
    lambda p: TrainState(None, tx.init(p), jnp.zeros((), jnp.int32), tuple(t.init() for t in method.trackers)),
    out_shardings=dataclasses.replace(shardings, params=None),
  )(params)
  return dataclasses.replace(rest, params=params)


def state_shardings(
  policy: Policy | ValueModel,
  method: Method,
  tx: optax.GradientTransformation,
  shapes: Any,
  *,
  mesh: jax.sharding.Mesh,
  rules: Rules = RULES,
) -> TrainState:
  """Shardings of a TrainState: optimizer statistics shaped like a parameter lie where it lies, all else everywhere."""
  everywhere = replicated(mesh)
  params = param_shardings(policy.axes, shapes, mesh=mesh, rules=rules)

  def masked(statistic):
    return isinstance(statistic, optax.MaskedNode)

  def beside(statistic, parameter, sharding):
    if masked(statistic):
      return statistic
    return sharding if statistic.shape == parameter.shape else everywhere

  opt_state = optax.tree.map_params(
    tx, beside, jax.eval_shape(tx.init, shapes), shapes, params, transform_non_params=lambda _: everywhere,
    is_leaf=masked,
  )  # fmt: skip
  trackers = jax.tree.map(lambda _: everywhere, jax.eval_shape(lambda: tuple(t.init() for t in method.trackers)))
  return TrainState(params, opt_state, everywhere, trackers)


def make_train_step(
  policy: Policy,
  method: Method,
  tx: optax.GradientTransformation,
  *,
  mesh: jax.sharding.Mesh,
  rules: Rules = RULES,
  chunk: int = 1024,
) -> Callable[[TrainState, TokenBatch, int], tuple[TrainState, dict[str, Array]]]:
  """`step(state, tokens [M, B, T], n) -> (state, metrics)`: one update from the first n microbatches, jitted.

  The gradient is the sum over microbatches, so M, B and n do not change it; n is traced. The state is donated. When
  the loss or a gradient is not finite nothing is applied and `nonfinite` is 1. Metrics are means over kept tokens:
  loss, grad_norm (before clipping), entropy (nats), clip_fraction, kl/rollout_train, logp_gap/mean, logp_gap/max, where
  routing is replayed routing/rerouted_tokens (share predicted from states that some router would have sent elsewhere),
  kl/ref (with logp_ref), tokens, nonfinite; with Muon in `tx`, muon/* (`optim.muon_metrics`). The log-probs are those
  before the update.
  """
  policy = on_mesh(policy, mesh)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  shardings = state_shardings(policy, method, tx, shapes, mesh=mesh, rules=rules)

  def step(state: TrainState, tokens: TokenBatch, n: int):
    of_update = partial(loss, policy, method.objective, chunk=chunk, updates=state.updates)
    return update(of_update, tx, state, tokens, n, layout=shardings.params)

  return jit_step(step, shardings, mesh)


def jit_step(step: Callable, shardings: TrainState, mesh: jax.sharding.Mesh) -> Callable:
  """`step(state, tokens, n) -> (state, metrics)` jitted: the state donated, placed and returned by its shardings."""
  everywhere = replicated(mesh)
  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(shardings, batch_sharding(mesh), everywhere),
    out_shardings=(shardings, everywhere),
  )


def update(
  loss_of: Callable[..., tuple[Array, Tally]],
  tx: optax.GradientTransformation,
  state: TrainState,
  tokens: TokenBatch,
  n: int,
  *,
  layout: Any,
) -> tuple[TrainState, dict[str, Array]]:
  """The state after one step of `tx` on the sum of `loss_of(params, tokens=microbatch)` over n microbatches.

  `layout`: shardings of the gradient. See `make_train_step` for what is not finite.
  """
  gradient, tally = _accumulate(loss_of, state.params, tokens, n, layout=layout)
  norm = optax.tree.norm(gradient)
  finite = jnp.isfinite(tally.sums["loss"]) & jnp.isfinite(norm)
  change, opt_state = tx.update(gradient, state.opt_state, state.params)
  updated = TrainState(optax.apply_updates(state.params, change), opt_state, state.updates + 1, state.trackers)
  state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
  muon = {f"muon/{name}": x for name, x in muon_metrics(state.opt_state).items()}
  return state, {**_metrics(tally), **muon, "grad_norm": norm, "nonfinite": 1 - finite.astype(jnp.int32)}


def make_scorer(
  policy: Policy,
  *,
  mesh: jax.sharding.Mesh,
  rules: Rules = RULES,
  chunk: int = 1024,
  columns: tuple[Column, ...] = ("logp",),
) -> Callable[[Any, TokenBatch, int], Scores]:
  """`scorer(params, tokens [M, B, T], n) -> Scores [M, B, T]` of the first n microbatches (0 in the others), jitted.

  For the passes that give `logp_old` and `logp_ref`; `rollout.packing.unpack` brings them back to `[N, T]`.
  """
  policy = on_mesh(policy, mesh)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))

  def scorer(params, tokens: TokenBatch, n: int):
    def body(i, out):
      scores = score(policy, params, microbatch(tokens, i), chunk=chunk, columns=columns)
      return jax.tree.map(lambda whole, part: whole.at[i].set(part), out, dataclasses.replace(scores, aux={}))

    empty = jnp.zeros(tokens.tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, n, body, Scores(**{"logp": None, **dict.fromkeys(columns, empty)}))

  return jax.jit(
    scorer,
    in_shardings=(param_shardings(policy.axes, shapes, mesh=mesh, rules=rules), batch_sharding(mesh), replicated(mesh)),
    out_shardings=batch_sharding(mesh),
  )


def _accumulate(loss_of, params, tokens, n, *, layout):
  """Sums of gradients and tallies over microbatches 0..n-1."""

  def one(i):
    gradient, tally = jax.grad(lambda p: loss_of(p, tokens=microbatch(tokens, i)), has_aux=True)(params)
    return jax.lax.with_sharding_constraint(gradient, layout), tally

  def body(i, carry):
    gradient, tally = one(i)
    return jax.tree.map(jnp.add, carry[0], gradient), carry[1] + tally

  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0))
  zero = (jax.lax.with_sharding_constraint(zero[0], layout), zero[1])
  return jax.lax.fori_loop(0, n, body, zero)


def microbatch(tokens: TokenBatch, i) -> TokenBatch:
  """The i-th of `[M, B, T]`, i traced."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tokens)


def _metrics(tally: Tally) -> dict[str, Array]:
  tokens = tally.sums["tokens"]
  whole = ("loss", "tokens")
  means = {k: x / jnp.maximum(tokens, 1) for k, x in tally.sums.items() if k not in whole}
  return {**{k: tally.sums[k] for k in whole}, **means, **tally.maxima}
