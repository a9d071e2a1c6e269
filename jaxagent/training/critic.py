"""The critic: values of rollouts, and the updates that fit them to a method's returns.

Its trunk is the policy's architecture with parameters of its own. Experts are never replayed in it. Its values are
scored before any update on a batch; advantages, returns and the clip of its loss all stand on them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxagent import config as configuration
from jaxagent.config import Config
from jaxagent.losses import explained_variance, token_mean, value_clip, value_squared
from jaxagent.methods import Method, Prepared, plain, sft
from jaxagent.methods.prepare import returns
from jaxagent.models.sharding import RULES, Rules, param_shardings, replicated
from jaxagent.models.value import ValueModel, on_mesh
from jaxagent.rollout.packing import unpack
from jaxagent.training.loss import Tally
from jaxagent.training.minibatches import packed, subsets
from jaxagent.training.sharding import batch_sharding
from jaxagent.training.step import TrainState, init_state, jit_step, microbatch, state_shardings, update
from jaxagent.types import Rollouts, TokenBatch

WITHOUT_MEMORY = sft  # a critic's state is that of a method without trackers
RETURNS = "returns"  # the column of targets, on the way to the loss


@dataclasses.dataclass(frozen=True)
class Critic:
  """What a run's critic is made of. `params` are the first ones; None: as `critic.init` in the config says."""

  model: ValueModel
  tx: optax.GradientTransformation
  params: Any = None


def reads_value(method: Method) -> bool:
  """Whether the policy's half of the method reads values that none of its annotators gives."""
  return "value" in dataclasses.replace(method, returns=None).needs - set(method.columns)


def check_critic(config: Config, method: Method, critic: Critic | None) -> None:
  """ValueError where method, section and critic do not go together."""
  section, reads = config.critic, reads_value(method)
  given = critic is not None or section != configuration.Critic()
  if reads and critic is None:
    raise ValueError(
      "the method reads value, but the run has no critic; set critic.init to policy or fresh, or give the method an"
      " annotator of the column value"
    )
  if given and not reads:
    raise ValueError(
      "the config has a section critic, but the method reads no value from one; remove the section, or choose a method"
      " that does, such as ppo"
    )
  if reads and method.returns is None:
    raise ValueError(
      "the method reads value, but does not say what a critic is to learn; set Method.returns, to"
      " advantages.value_targets for example"
    )
  if section.bootstrap_truncated and "bootstrap" not in method.needs:
    raise ValueError("critic.bootstrap_truncated is true, but the method reads no bootstrap; set it to false")


def begin(config: Config, critic: Critic, policy_params: Any, *, mesh: jax.sharding.Mesh) -> TrainState:
  """The critic's first state: from its own parameters if it has any, else from the policy's trunk or a random one."""
  params = critic.params
  if params is None and config.critic.init == "policy":
    params = critic.model.adopt(policy_params)
  elif params is None:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 0), 1)  # beside the policy's
    params = jax.jit(critic.model.init)(key)
  return init_state(critic.model, WITHOUT_MEMORY, critic.tx, params, mesh=mesh)


def frozen(config: Config, step: int) -> bool:
  """Whether the policy stands still in this step: the critic's warm-up."""
  c = config.critic
  return c.init is not None and c.warmup_freezes_policy and step < c.warmup_steps


def passes(config: Config, step: int) -> int:
  """How often the critic goes over the batch of this step."""
  c = config.critic
  return c.warmup_epochs if step < c.warmup_steps else c.epochs


def values(model: ValueModel, params: Any, tokens: TokenBatch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """The value of the state before each token, and of that after it: the first is 0 where a segment begins."""
  hidden = model.forward(
    params, tokens.tokens, tokens.position, tokens.segment, prefix_end=tokens.prefix_end, routing=None
  )
  after = model.head(params, hidden.states)
  continues = (tokens.segment[:, 1:] == tokens.segment[:, :-1]) & (tokens.segment[:, 1:] >= 0)
  return jnp.pad(jnp.where(continues, after[:, :-1], 0.0), ((0, 0), (1, 0))), after


def value_loss(
  model: ValueModel, params: Any, tokens: TokenBatch, *, clip: float | None
) -> tuple[Float[Array, ""], Tally]:
  """sum_t aggregate_t * loss_t over the kept tokens, against the column `returns`, and its tally.

  `value_clip` around `tokens.value`, which are the values before the update; without `clip` `value_squared`.
  """

  def per_token(value):
    if clip is None:
      return value_squared(value, target)
    return value_clip(value, tokens.value, target, clip=clip)

  target = tokens.columns[RETURNS]
  value = jnp.where(tokens.mask, values(model, params, tokens)[0], 0.0)
  total = jnp.sum(jnp.where(tokens.mask, tokens.aggregate * per_token(value), 0.0))
  slope = jax.grad(lambda v: jnp.sum(per_token(v)))(jax.lax.stop_gradient(value))
  clipped = tokens.mask & (slope == 0) & (value != target)
  sums = {"loss": total, "tokens": jnp.sum(tokens.mask), "clip_fraction": jnp.sum(clipped)}
  return total, jax.lax.stop_gradient(Tally({k: x.astype(jnp.float32) for k, x in sums.items()}, {}))


def make_value_scorer(
  model: ValueModel, *, mesh: jax.sharding.Mesh, rules: Rules = RULES
) -> Callable[[Any, TokenBatch, int], tuple[Float[Array, "M B T"], Float[Array, "M B T"]]]:
  """`scorer(params, tokens [M, B, T], n)`: `values` of the first n microbatches (0 in the others), jitted."""
  model = on_mesh(model, mesh)
  layout = param_shardings(model.axes, jax.eval_shape(model.init, jax.random.key(0)), mesh=mesh, rules=rules)

  def scorer(params, tokens: TokenBatch, n: int):
    def body(i, out):
      part = values(model, params, microbatch(tokens, i))
      return jax.tree.map(lambda whole, x: whole.at[i].set(x), out, part)

    empty = jnp.zeros(tokens.tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, n, body, (empty, empty))

  return jax.jit(
    scorer, in_shardings=(layout, batch_sharding(mesh), replicated(mesh)), out_shardings=batch_sharding(mesh)
  )


def make_critic_step(
  model: ValueModel,
  tx: optax.GradientTransformation,
  *,
  mesh: jax.sharding.Mesh,
  rules: Rules = RULES,
  clip: float | None = 0.2,
) -> Callable[[TrainState, TokenBatch, int], tuple[TrainState, dict[str, Array]]]:
  """`step(state, tokens [M, B, T], n) -> (state, metrics)`: one update by `value_loss`, as `make_train_step` does it.

  Metrics: loss, grad_norm (before clipping), clip_fraction (kept tokens without gradient for the clip), tokens,
  nonfinite.
  """
  model = on_mesh(model, mesh)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = state_shardings(model, WITHOUT_MEMORY, tx, shapes, mesh=mesh, rules=rules)

  def step(state: TrainState, tokens: TokenBatch, n: int):
    return update(partial(value_loss, model, clip=clip), tx, state, tokens, n, layout=shardings.params)

  return jit_step(step, shardings, mesh)


def to_fit(credited: Rollouts, target: Float[Array, "N T"], minibatch=None) -> Prepared:
  """The batch of an update of the critic: every action of a valid rollout in the `minibatch`, all tokens alike."""
  rollouts = dataclasses.replace(credited, routing=None, columns={RETURNS: target})
  p = plain(rollouts)
  keep = p.keep if minibatch is None else p.keep & jnp.asarray(minibatch)[p.rollouts.rollout][:, None]
  return dataclasses.replace(p, keep=keep, aggregate=token_mean(keep))


class Fit:
  """The compiled passes of a run's critic, and one batch of rollouts through them."""

  def __init__(self, config: Config, method: Method, critic: Critic, mesh: jax.sharding.Mesh):
    self.config = config
    self.scorer = make_value_scorer(critic.model, mesh=mesh)
    self.step = make_critic_step(critic.model, critic.tx, mesh=mesh, clip=config.critic.value_clip)
    self.returns = jax.jit(lambda credited: returns(method, credited))
    self.explained = jax.jit(explained_variance)

  def valued(self, state: TrainState, rollouts: Rollouts) -> Rollouts:
    """With `value`, and `bootstrap` of those that were cut off if the config wants it."""
    batch, plan = packed(self.config, plain(dataclasses.replace(rollouts, routing=None)))
    before, after = (unpack(x, plan) for x in jax.device_get(self.scorer(state.params, batch, plan.microbatches)))
    rollouts = dataclasses.replace(rollouts, value=before)
    if not self.config.critic.bootstrap_truncated:
      return rollouts
    last = np.maximum(np.asarray(rollouts.length) - 1, 0)
    end = np.take_along_axis(after, last[:, None], axis=1)[:, 0]
    return dataclasses.replace(rollouts, bootstrap=np.where(rollouts.truncated, end, 0).astype(np.float32))

  def __call__(self, state: TrainState, credited: Rollouts, *, key, step: int) -> tuple[TrainState, dict[str, float]]:
    """All updates on one batch, whose values and rewards are those the advantages were made of."""
    target = jax.device_get(self.returns(credited))
    mask = credited.mask & credited.valid[:, None]
    records = []
    count = self.config.critic.minibatches
    for subset in subsets(credited, epochs=passes(self.config, step), count=count, key=key):
      batch, plan = packed(self.config, to_fit(credited, target, subset))
      state, metrics = self.step(state, batch, plan.microbatches)
      records.append(jax.device_get(metrics))
      if records[-1]["nonfinite"]:
        break
    record = {k: float(np.mean([r[k] for r in records])) for k in records[0] if k != "tokens"}
    record["nonfinite"] = float(records[-1]["nonfinite"])
    record["explained_variance"] = float(self.explained(credited.value, target, mask))
    return state, {f"critic/{name}": x for name, x in record.items()}
