"""A run in its folder: its trackers, its evaluation; what the command line and `jaxagent.train` call."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from etils import epath

from jaxagent import config as configuration
from jaxagent.config import Config
from jaxagent.envs import hybrid_reasoning
from jaxagent.envs.base import Tasks
from jaxagent.envs.instructions import Instructions
from jaxagent.envs.registry import resolve
from jaxagent.evaluation.evaluate import evaluate
from jaxagent.evaluation.reference import reference_statistics
from jaxagent.methods import Method
from jaxagent.models.chat import Chat
from jaxagent.models.loading import export as export_model
from jaxagent.models.policy import Policy
from jaxagent.report import display, store
from jaxagent.report.folder import alone, claim, existing, fresh, run_folder, write_whole
from jaxagent.report.trackers import JsonlWriter, TensorboardWriter, WandbWriter, Writer, combine
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.training import funnel as alternating
from jaxagent.training import loop, supervise
from jaxagent.training.build import Parts, build, build_engine, build_model
from jaxagent.training.checkpoint import Checkpointer, CheckpointError
from jaxagent.training.interrupt import Interrupted
from jaxagent.training.phases import NonFinite, OutOfMemory
from jaxagent.training.reflection import Reflect
from jaxagent.training.supervise import Examples
from jaxagent.types import Rollouts

USER_ERRORS = (ValueError, OSError, CheckpointError, OutOfMemory, NonFinite)
EVALUATION, REFERENCE = 3, 4  # streams of the run's key


def train(
  config: Config,
  *,
  method: Method | None = None,
  env: Tasks | None = None,
  tx: optax.GradientTransformation | None = None,
  critic_tx: optax.GradientTransformation | None = None,
  name: str = "run",
  resume: bool = False,
  profile: int | None = None,
) -> loop.RunState:
  """Trains by `config` into its run folder and returns the final state.

  `method`, `env`, `tx` and `critic_tx` (any Optax chain) replace the sections of the config. The folder is
  `config.run.dir`, by default `runs/<name>-<n>`; an explicit one that holds a run is a ValueError unless `resume`, and
  so is one that another process is in. SIGINT and SIGTERM save, then raise KeyboardInterrupt. `profile`: the step to
  trace.
  """
  replaced = {"method": method, "env": env, "tx": tx, "critic_tx": critic_tx}
  return in_folder(config, train_loop, replaced, name=name, resume=resume, profile=profile)


def train_loop(config: Config, parts: Parts, folder: epath.Path, **arguments) -> loop.RunState:
  return loop.train(config, parts, **arguments)


def funnel(
  config: Config,
  *,
  reflect: Reflect | None = None,
  method: Method | None = None,
  env: Tasks | None = None,
  tx: optax.GradientTransformation | None = None,
  name: str = "run",
  resume: bool = False,
) -> tuple[loop.RunState, Instructions]:
  """Alternates edits of a state of text with updates of the policy, and returns both; see `jaxagent.training.funnel`.

  `reflect(state, trajectories) -> state` (a coroutine) replaces `funnel.reflect`; all else is as in `train`. The state
  after every round is in the folder's `states/`.
  """
  drive = functools.partial(funnel_loop, reflect=reflect)
  return in_folder(config, drive, {"method": method, "env": env, "tx": tx}, name=name, resume=resume)


def funnel_loop(config: Config, parts: Parts, folder: epath.Path, *, reflect: Reflect | None, **arguments):
  observers = alternating.Observers(
    state=lambda step, record: keep_state(folder / "states", step, record),
    held_out=lambda engine, tasks: held_out(config, dataclasses.replace(parts, tasks=tasks), engine),
  )
  return alternating.train(config, parts, reflect=reflect, observers=observers, **arguments)


def in_folder(
  config: Config,
  drive: Callable[..., Any],
  replaced: dict[str, Any],
  *,
  name: str,
  resume: bool,
  profile: int | None = None,
) -> Any:
  """What `drive(config, parts, folder, *, hooks, resume, examples)` returns, run in its folder."""
  set_compilation_cache(config)
  folder = existing(config, name) if resume else fresh(config, name)  # before the model is built
  parts = from_run(config, build(config, **replaced))
  folder = folder if resume else claim(config, name)
  with contextlib.ExitStack() as stack:
    stack.enter_context(alone(folder))
    checkpointer = stack.enter_context(
      Checkpointer(folder / "checkpoints", keep=config.run.checkpoint_keep, warn=display.warn)
    )
    start = newest(checkpointer, parts) if resume else None
    if start is not None and start >= config.run.steps:
      display.say(f"the run is finished: it has {start} steps; raise run.steps to go on")
    first = (start or 0) + 1
    if profile is not None and not first <= profile <= config.run.steps:
      raise ValueError(f"there is no step {profile} to profile: those to come are {first}..{config.run.steps}")
    write_whole(folder / "config.yaml", configuration.to_yaml(config))
    writer = stack.enter_context(contextlib.closing(writers(config, folder, after=start)))
    decode, warm_start = parts.chat.tokenizer.decode, config.sft.steps if start is None else None
    screen = stack.enter_context(
      display.Display(folder, steps=config.run.steps, warm_start=warm_start, decode=decode)
    )
    keep = functools.partial(store.write, decode=decode)
    hooks = loop.Hooks(
      record=lambda record: (writer.write(record), screen.write(record)),
      rollouts=lambda step, *batch: keep_rollouts(config, folder / "rollouts", keep, screen, step, *batch),
      dump=lambda step, *batch: keep(folder / "nonfinite", step, *batch),
      evaluate=lambda engine: held_out(config, parts, engine),
      checkpointer=checkpointer,
      warn=screen.warn,
      profile=lambda step: profiling(folder, step) if step == profile else contextlib.nullcontext(),
    )
    examples = stored_examples(config, parts) if config.sft.steps and start is None else None
    config = keeping_replies(config, folder)
    return drive(config, parts, folder, hooks=hooks, resume=start is not None, examples=examples)


# what is in the folder


def newest(checkpointer: Checkpointer, parts: Parts) -> int | None:
  """The step to go on from, its checkpoint being intact and of these `parts`; None if nothing was saved yet."""
  complete = checkpointer.steps()
  step = checkpointer.latest_intact()
  if step is not None:
    checkpointer.check(loop.abstract_state(parts), step)
  elif complete:
    raise CheckpointError(f"no checkpoint to resume from: those of steps {complete} are all corrupt; begin a new run")
  return step


def read_run(path: str, step: int | None = None) -> tuple[Config, Parts, Any, int]:
  """Configuration, parts, parameters on the mesh and step of a run's checkpoint."""
  folder = run_folder(path)
  config = configuration.load(folder / "config.yaml")
  parts = build(config)
  params, step = read_params(folder, loop.abstract_state(parts).train.params, step)
  return config, parts, params, step


def read_params(
  folder: epath.Path, target: Any, step: int | None = None, *, prefix: str = "train/params"
) -> tuple[Any, int]:
  with Checkpointer(folder / "checkpoints", warn=display.warn) as checkpointer:
    restored = checkpointer.restore(target, step=step, prefix=prefix)
  return restored.state, restored.step


def from_run(config: Config, parts: Parts) -> Parts:
  """`parts` with the newest parameters of `run.init_from`, and of `critic.init_from`, where they are set."""
  if config.run.init_from is not None:
    params, _ = read_params(run_folder(config.run.init_from), loop.abstract_state(parts).train.params)
    parts = dataclasses.replace(parts, params=params)
  if parts.critic is not None and config.critic.init_from is not None:
    target = loop.abstract_state(parts).critic.params
    params, _ = read_params(run_folder(config.critic.init_from), target, prefix="critic/params")
    parts = dataclasses.replace(parts, critic=dataclasses.replace(parts.critic, params=params))
  return parts


def keeping_replies(config: Config, folder: epath.Path) -> Config:
  """With the folder of the judge's replies in place of "auto"."""
  if config.judge.cache != "auto":
    return config
  return dataclasses.replace(config, judge=dataclasses.replace(config.judge, cache=str(folder / "judge")))


def stored_examples(config: Config, parts: Parts) -> Examples | None:
  """What `sft.filter` keeps of the rollouts of the run `sft.source`; None where that is the demonstrations."""
  if config.sft.source == "demonstrations":
    return None
  folder = run_folder(config.sft.source) / "rollouts"
  stored = store.steps(folder)
  if not stored:
    raise ValueError(f"sft.source: {folder} holds no rollouts; tracking.rollouts_every of that run may have been 0")
  check_words(*store.read(folder, stored[0]), parts, folder)
  rows, count = supervise.chosen((store.read(folder, step)[0] for step in stored), config.sft.filter)
  tasks = len({(row.env, row.task) for row in rows})
  display.say(f"sft.filter {config.sft.filter} keeps {len(rows)} rows, of {tasks} tasks, among {count} rollouts")
  return supervise.in_epochs(config, rows)


def check_words(rollouts: Rollouts, records: list[dict[str, Any]], parts: Parts, folder: epath.Path) -> None:
  """ValueError unless the ids of stored rollouts mean the same words to this model."""
  for record in records:
    if "spans" in record and record["valid"]:
      row = supervise.example(rollouts, record["row"])
      if store.spans(row, parts.chat.tokenizer.decode) != record["spans"]:
        raise ValueError(f"sft.source: the rollouts in {folder} were written with another tokenizer than this model's")


# what the loop tells the outside


def writers(config: Config, folder: epath.Path, *, after: int | None) -> Writer:
  """Metrics to metrics.jsonl, TensorBoard and W&B, as the config says; what was written of later steps is dropped."""
  made: list[Writer] = [JsonlWriter(folder / "metrics.jsonl", after=after)]
  if config.tracking.tensorboard:
    made.append(TensorboardWriter(folder / "tensorboard"))
  if config.tracking.wandb is not None:
    made.append(WandbWriter(config.tracking.wandb, folder, config=dataclasses.asdict(config)))
  return combine(*made)


def held_out(config: Config, parts: Parts, engine: Engine) -> dict[str, float]:
  rules = dataclasses.replace(loop.sampling_rules(config), temperature=config.evaluation.temperature)
  return evaluate(
    engine,
    parts.chat,
    parts.tasks,
    count=config.evaluation.tasks,
    samples=config.evaluation.samples,
    sampling=rules,
    limits=loop.limits(config),
    key=jax.random.fold_in(jax.random.key(config.seed), EVALUATION),
  )


def keep_rollouts(config: Config, folder: epath.Path, keep, screen, step: int, rollouts, trajectories) -> None:
  tracking = config.tracking
  if tracking.rollouts_every and step % tracking.rollouts_every == 0:
    keep(folder, step, rollouts, trajectories)
  if tracking.show:
    screen.show(step, trajectories[: tracking.show])


def keep_state(folder: epath.Path, step: int, record: dict[str, Any]) -> None:
  """`states/00000012.json`: the state after step 12, what was proposed in its round, and the scores."""
  folder.mkdir(parents=True, exist_ok=True)
  write_whole(folder / f"{step:08d}.json", json.dumps(record, indent=1, ensure_ascii=False))


@contextlib.contextmanager
def profiling(folder: epath.Path, step: int):
  target = str(folder / "profile")
  with jax.profiler.trace(target):
    yield
  display.say(f"profile of step {step} is in {target}")


def set_compilation_cache(config: Config) -> None:
  """JAX's persistent cache of compiled programs, for the whole process; `run.compilation_cache` says where."""
  chosen = config.run.compilation_cache
  if chosen == "auto":
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(home) / "jaxagent" / "compiled")
  if chosen is not None:
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# the commands


def train_command(args: argparse.Namespace, rest: list[str]) -> int:
  return resumable(args, rest, functools.partial(train, profile=args.profile))


def funnel_command(args: argparse.Namespace, rest: list[str]) -> int:
  return resumable(args, rest, funnel)


def resumable(args: argparse.Namespace, rest: list[str], command: Callable[..., Any]) -> int:
  """`command(config, name=, resume=)`, by a configuration or as the continuation of a run."""
  name = Path(args.config).stem
  overrides = list(rest)
  if args.resume:
    overrides += ["--run.dir", args.resume]
  config = configuration.load(args.config, overrides)
  if args.resume is not None:
    check_same(config, existing(config, name), rest, args.config)
  try:
    command(config, name=name, resume=args.resume is not None)
  except Interrupted as signal:
    folder = existing(config, name)
    again = f"{args.command} {folder / 'config.yaml'} --resume {folder}"
    print(f"stopped by {signal}; continue with {again}", file=sys.stderr)
    return 128 + (15 if str(signal) == "SIGTERM" else 2)
  return 0


def sft_command(args: argparse.Namespace, rest: list[str]) -> int:
  config = configuration.load(args.config, rest)
  if not config.sft.steps:
    raise ValueError("sft.steps is 0, so there is nothing to do; set it")
  config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=0))
  try:
    train(config, name=f"{Path(args.config).stem}-sft")
  except Interrupted as signal:
    print(f"stopped by {signal}; supervised fine-tuning begins anew when it is run again", file=sys.stderr)
    return 128 + (15 if str(signal) == "SIGTERM" else 2)
  return 0


def check_same(config: Config, folder: epath.Path, rest: list[str], path: str) -> None:
  """ValueError where a run to be resumed had another setting, but for what the command line says, and what is not of
  the training itself."""
  own = configuration.flat(configuration.load(folder / "config.yaml"))
  said = tuple(configuration.parse_overrides(rest))
  for key, value in configuration.flat(config).items():
    free = key.startswith(("run.", "evaluation.", "tracking.", "judge.retries", "judge.timeout", "judge.concurrency"))
    chosen = any(name == key or name.startswith(f"{key}.") for name in said)
    if value != own[key] and not free and not chosen:
      raise ValueError(
        f"{folder} was run with {key} {own[key]!r}, but {path} says {value!r}; resume with {folder / 'config.yaml'} in"
        f" its place, or choose by --{key}"
      )


def eval_command(args: argparse.Namespace, rest: list[str]) -> int:
  folder = run_folder(args.run)
  config = configuration.load(folder / "config.yaml", rest)
  set_compilation_cache(config)
  parts = build(config)
  params, step = read_params(folder, loop.abstract_state(parts).train.params, args.step)
  measured = held_out(config, parts, build_engine(config, parts, params, version=step))
  display.say(f"checkpoint of step {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in measured.items()))
  return 0


def read_policy(source: str, *, tool_format: str | None = None) -> tuple[Policy, Any, Chat]:
  """Policy, parameters and chat of a run, a Hugging Face folder or name, or a .gguf.

  `tool_format`: by default a run's own, and "hermes" for a model.
  """
  if (epath.Path(source) / "config.yaml").exists():
    config, parts, params, _ = read_run(source)
    policy, chat = parts.policy, parts.chat
    if tool_format not in (None, chat.tool_format):
      raise ValueError(f"{source} is a run with the tool format {chat.tool_format!r}, not {tool_format!r}")
  else:
    config = configuration.load(None, ["--model.path", source, "--model.tool_format", tool_format or "hermes"])
    policy, params, chat = build_model(config)
  set_compilation_cache(config)
  return policy, params, chat


def sample_command(args: argparse.Namespace, rest: list[str]) -> int:
  policy, params, chat = read_policy(args.source)
  messages = [{"role": "user", "content": args.prompt}]
  if args.system is not None:
    messages.insert(0, {"role": "system", "content": args.system})
  if any("\ud800" <= letter <= "\udfff" for letter in args.prompt + (args.system or "")):
    raise ValueError("the prompt is not valid UTF-8")
  prompt = chat.render(messages)
  rules = Sampling(
    temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=args.max_tokens, stop_ids=(chat.eot,)
  )  # fmt: skip
  room = len(prompt) + args.max_tokens
  engine = Engine(policy, params, tokenizer=chat.tokenizer, slots=max(args.n, 1), capacity=room, seed=args.seed)
  for completion in engine.generate([prompt], n=args.n, sampling=rules)[0]:
    ids = completion.ids[:-1] if completion.finish == "stop" else completion.ids
    display.say(chat.tokenizer.decode(ids))
  return 0


def serve_command(args: argparse.Namespace, rest: list[str]) -> int:
  try:
    from jaxagent.serve import server
    from jaxagent.serve.app import Served
  except ModuleNotFoundError as error:
    raise ValueError(f"jaxagent serve needs an extra ({error}): pip install 'jaxagent[serve]'") from None
  given = args.api_key if args.api_key is not None else os.environ.get("JAXAGENT_API_KEY") or None
  key = server.checked_key(args.host, given)
  with server.bind(args.host, args.port) as bound:  # a port that is taken is told before the model is loaded
    policy, params, chat = read_policy(args.source, tool_format=args.tool_format)
    engine = Engine(
      policy,
      params,
      tokenizer=chat.tokenizer,
      slots=args.slots,
      capacity=args.capacity,
      max_pending=max(256, 16 * args.slots),
      seed=secrets.randbits(31),
      lockstep=False,
    )
    name = args.name or server.model_name(args.source)
    bound.listen(server.BACKLOG)
    display.say(f"serving {name} at {server.url(bound)}; Ctrl-C stops")
    server.run(Served(engine, chat, name), bound, api_key=key)
  return 0


def reference_stats_command(args: argparse.Namespace, rest: list[str]) -> int:
  config = configuration.load(args.config, rest)
  options = dict(config.env.options)
  output = args.output or options.pop("reference", None)
  if config.env.name != "hybrid_reasoning":
    raise ValueError(f"reference statistics are of env.name hybrid_reasoning, got {config.env.name!r}")
  if output is None:
    raise ValueError("nothing says where to write; set env.options.reference, or give --output FILE")
  if os.path.exists(output):
    raise ValueError(f"{output} exists; remove it, or give --output FILE")
  tasks = resolve(dataclasses.replace(config.env, options={**options, "reference": None}))
  size = tasks.size("train")
  count = args.tasks if args.tasks is not None else size
  if count is None or not 1 <= count <= (size or count) or args.samples < 1:
    raise ValueError(
      f"--tasks and --samples must be at least 1, and the training tasks are {size or 'endless: say how many'}; got"
      f" --tasks {args.tasks} --samples {args.samples}"
    )
  set_compilation_cache(config)
  parts = from_run(config, build(config, env=tasks))
  rows = reference_statistics(
    build_engine(config, parts, parts.params),
    parts.chat,
    tasks,
    count=count,
    samples=args.samples,
    sampling=loop.sampling_rules(config),
    limits=loop.limits(config),
    key=jax.random.fold_in(jax.random.key(config.seed), REFERENCE),
  )
  model = config.run.init_from or config.model.path or "new"
  hybrid_reasoning.write_statistics(output, tasks, rows, model=model, temperature=config.rollout.temperature)
  accuracy, tokens = (sum(row[name] for row in rows) / count for name in hybrid_reasoning.REFERENCE)
  display.say(f"{count} tasks: accuracy {accuracy:.3g}, {tokens:.4g} tokens with thinking; they are in {output}")
  return 0


def config_command(args: argparse.Namespace, rest: list[str]) -> int:
  print(configuration.describe() if args.keys else configuration.to_yaml(configuration.load(args.config, rest)), end="")
  return 0


def plan_command(args: argparse.Namespace, rest: list[str]) -> int:
  from jaxagent import plan

  config = configuration.load(args.config, rest)
  only = plan.PROGRAMS if args.only is None else args.only
  planned = plan.plan(config, args.topology, only=only, say=lambda line: print(line, file=sys.stderr))
  print(plan.table(planned))
  return 0


def export_command(args: argparse.Namespace, rest: list[str]) -> int:
  _, parts, params, step = read_run(args.run, args.step)
  export_model(args.directory, parts.policy.config, jax.device_get(params), parts.chat.tokenizer, parts.chat.template)
  display.say(f"the checkpoint of step {step} is in {args.directory}")
  return 0


def rollouts_command(args: argparse.Namespace, rest: list[str]) -> int:
  folder = run_folder(args.run) / "rollouts"
  stored = store.steps(folder)
  if not stored:
    raise ValueError(f"{folder} holds no rollouts; tracking.rollouts_every may be 0")
  step = stored[-1] if args.step is None else args.step
  if step not in stored:
    raise ValueError(f"step {step} is not stored in {folder}; stored are {stored[0]}..{stored[-1]}")
  _, records = store.read(folder, step)
  if args.index is None:
    display.list_rollouts(step, records)
  elif 0 <= args.index < len(records):
    display.show_rollout(records[args.index])
  else:
    raise ValueError(f"--index must be in 0..{len(records) - 1}, got {args.index}")
  return 0
