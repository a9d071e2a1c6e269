"""From a configuration to what a run is made of: policy, chat, tasks, method, optimizer, mesh, engine."""

import dataclasses
import typing
from typing import Any

import jax
import optax

from jaxagent.config import Config, fits
from jaxagent.envs.base import Tasks
from jaxagent.envs.importing import attribute
from jaxagent.envs.registry import resolve
from jaxagent.methods import PRESETS, Method
from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.loading import load
from jaxagent.models.policy import Policy
from jaxagent.models.sharding import param_shardings
from jaxagent.models.tokenizer import byte_tokenizer, load_tokenizer
from jaxagent.models.value import value_model
from jaxagent.sampling.engine import Engine
from jaxagent.training.critic import Critic, frozen, passes
from jaxagent.training.judging import with_judge
from jaxagent.training.optimizer import make_optimizer
from jaxagent.training.scheduling import Scheduler, build_scheduler
from jaxagent.training.sharding import check_rows, make_mesh

ATTENTION = ("attention", "window", "max_prefix")  # of model.shape: what weights do not depend on


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run is made of. `params` are the first ones, on the host or uncommitted."""

  policy: Policy
  params: Any
  chat: Chat
  tasks: Tasks
  method: Method
  tx: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  scheduler: Scheduler
  critic: Critic | None = None


def build(
  config: Config,
  *,
  method: Method | None = None,
  env: Tasks | None = None,
  tx: optax.GradientTransformation | None = None,
  critic_tx: optax.GradientTransformation | None = None,
) -> Parts:
  """Everything the config names; an argument replaces its section. ValueErrors say which key to change."""
  mesh = make_mesh(config.mesh)
  check_rows(config.training.microbatch_rows, mesh)
  policy, params, chat = build_model(config)
  tasks = env if env is not None else resolve(config.env)
  own = env is None and ":" not in config.env.name
  return Parts(
    policy=policy,
    params=params,
    chat=chat,
    tasks=tasks,
    method=with_judge(config, method if method is not None else build_method(config), tasks, own_tasks=own),
    tx=tx if tx is not None else build_optimizer(config, policy, params, mesh),
    mesh=mesh,
    scheduler=build_scheduler(config, tasks),
    critic=build_critic(config, policy, mesh, critic_tx),
  )


def abstract_parts(config: Config, mesh: jax.sharding.Mesh) -> Parts:
  """The same on any mesh, with shapes for parameters: for programs that are compiled and not run. It has no judge.

  A model that has a path is read, for its shape.
  """
  check_rows(config.training.microbatch_rows, mesh)
  if config.model.path is None:
    policy, chat = new_model(config)
  else:
    policy, _, chat = build_model(config)
  params, tasks = jax.eval_shape(policy.init, jax.random.key(0)), resolve(config.env)
  return Parts(
    policy=policy,
    params=params,
    chat=chat,
    tasks=tasks,
    method=build_method(config),
    tx=build_optimizer(config, policy, params, mesh),
    mesh=mesh,
    scheduler=build_scheduler(config, tasks),
    critic=build_critic(config, policy, mesh),
  )


def build_model(config: Config) -> tuple[Policy, Any, Chat]:
  """Policy, parameters and chat: loaded from `model.path`, or initialised from `model.shape` and the run's seed."""
  model = config.model
  if model.path is not None:
    if own := sorted(set(model.shape) - set(ATTENTION)):
      raise ValueError(
        f"model.shape.{own[0]} is for a new model, but model.path {model.path!r} brings its own shape; beside a path"
        f" model.shape takes {', '.join(ATTENTION)}"
      )
    loaded = load(model.path, dtype=model.dtype, remat=model.remat, tokenizer=model.tokenizer, **model.shape)
    chat = Chat(loaded.tokenizer, loaded.chat_template, model.tool_format)
    return decoder_policy(loaded.config), loaded.params, chat
  policy, chat = new_model(config)
  return policy, jax.jit(policy.init)(jax.random.fold_in(jax.random.key(config.seed), 0)), chat


def new_model(config: Config) -> tuple[Policy, Chat]:
  """The policy and chat of `model.shape`."""
  model = config.model
  tokenizer = byte_tokenizer() if model.tokenizer in (None, "bytes") else load_tokenizer(model.tokenizer)
  check_shape(model.shape)
  shape = {"vocab_size": tokenizer.vocab_size, **model.shape}
  if shape["vocab_size"] < tokenizer.vocab_size:
    raise ValueError(
      f"model.shape.vocab_size is {shape['vocab_size']}, less than the tokenizer's {tokenizer.vocab_size}; leave it out"
    )
  policy = decoder_policy(DecoderConfig(**shape, dtype=model.dtype, remat=model.remat))
  return policy, Chat(tokenizer, tool_format=model.tool_format)


def check_shape(shape: dict[str, Any]) -> None:
  """ValueError for a key of `model.shape` that is unknown, missing or of another type."""
  fields = {f.name: f for f in dataclasses.fields(DecoderConfig) if f.name not in ("dtype", "remat")}
  if unknown := sorted(set(shape) - set(fields)):
    raise ValueError(f"model.shape has no key {unknown[0]!r}; it takes {', '.join(sorted(fields))}")
  needed = [k for k, f in fields.items() if f.default is dataclasses.MISSING and k != "vocab_size"]
  if lacking := [k for k in needed if k not in shape]:
    raise ValueError(f"model.shape needs {', '.join(lacking)}; or give model.path, a model that has them")
  hints = typing.get_type_hints(DecoderConfig)
  for key, value in shape.items():
    if not fits(hints[key], value):
      kind = str(fields[key].type).removeprefix("<class '").removesuffix("'>")
      raise ValueError(f"model.shape.{key} must be of type {kind}, got {value!r}")


def build_method(config: Config) -> Method:
  """A preset, or a Method (or a function that returns one) by `my_package.module:name`."""
  name, options = config.method.name, config.method.options
  if ":" in name:
    found = attribute(name, what="method.name")
  elif name in PRESETS:
    found = PRESETS[name]
  else:
    known = ", ".join(sorted(PRESETS))
    raise ValueError(f"method.name {name!r} is no preset; presets are {known}, or my_module:my_method")
  if isinstance(found, Method):
    if options:
      raise ValueError(f"method {name} takes no options, got {', '.join(options)}; those that do are functions")
    return found
  try:
    made = found(**options)
  except (TypeError, AttributeError) as error:
    raise ValueError(f"method.options of {name}: {error}") from error
  if not isinstance(made, Method):
    raise ValueError(f"method.name {name} gave a {type(made).__name__}, not a jaxagent.methods.Method")
  return made


def build_optimizer(
  config: Config, policy: Policy, params: Any, mesh: jax.sharding.Mesh
) -> optax.GradientTransformation:
  layout = param_shardings(policy.axes, params, mesh=mesh)
  return make_optimizer(config.optimizer, updates=total_updates(config), mesh=mesh, layout=layout)


def build_critic(
  config: Config, policy: Policy, mesh: jax.sharding.Mesh, tx: optax.GradientTransformation | None = None
) -> Critic | None:
  """The critic that the config names, if it names one; without `tx` its chain is the policy's with its own options."""
  c = config.critic
  if c.init is None:
    if tx is not None:
      raise ValueError("critic_tx is given, but the config has no critic; set critic.init to policy or fresh")
    return None
  model = value_model(policy)
  if tx is None:
    rate = c.learning_rate_multiple * config.optimizer.learning_rate
    section = dataclasses.replace(config.optimizer, **{**c.optimizer, "learning_rate": rate})
    layout = param_shardings(model.axes, jax.eval_shape(model.init, jax.random.key(0)), mesh=mesh)
    tx = make_optimizer(section, updates=critic_updates(config), mesh=mesh, layout=layout)
  return Critic(model, tx)


def build_engine(config: Config, parts: Parts, params: Any, *, version: int = 0) -> Engine:
  return Engine(
    parts.policy,
    params,
    tokenizer=parts.chat.tokenizer,
    mesh=parts.mesh,
    slots=config.rollout.slots,
    capacity=engine_capacity(config),
    seed=config.seed,
    version=version,
  )


def engine_capacity(config: Config) -> int:
  asked = config.judge.context if config.judge.backend == "policy" else 0  # questions to the policy about itself
  return max(config.rollout.max_tokens, asked)


def updates_per_step(config: Config) -> int:
  return config.training.epochs * config.training.minibatches


def total_updates(config: Config) -> int:
  return sum(not frozen(config, step) for step in range(config.run.steps)) * updates_per_step(config)


def critic_updates(config: Config) -> int:
  return sum(passes(config, step) for step in range(config.run.steps)) * config.critic.minibatches


