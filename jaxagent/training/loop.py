"""The loop: sample, score, update, log, checkpoint; exact resume.

It knows no tracker and no evaluation: those are callbacks in `Hooks`. Everything random is folded from the run's seed
by name and index, so the state after step k is a function of the configuration and k.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from jaxagent.config import Config
from jaxagent.methods import Method, credit, plain, weigh
from jaxagent.methods.objective import slot_parameters
from jaxagent.models.policy import Policy
from jaxagent.models.sharding import replicated, shard_params
from jaxagent.models.value import ValueModel
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.rollout.packing import unpack
from jaxagent.rollout.truncation import truncate_backprop
from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.training.annotate import Rescorer, Tools, annotate, lost_rollouts, with_columns
from jaxagent.training.build import Parts, build_engine, updates_per_step
from jaxagent.training.critic import WITHOUT_MEMORY, Fit, begin, check_critic, frozen
from jaxagent.training.interrupt import Interrupt, Interrupted
from jaxagent.training.judging import build_tools, check_judge
from jaxagent.training.loss import sampler_gap
from jaxagent.training.minibatches import packed, subsets
from jaxagent.training.phases import NonFinite, Phases, out_of_memory_named
from jaxagent.training.rescoring import rescored
from jaxagent.training.scheduling import Schedule, mixed
from jaxagent.training.step import TrainState, init_state, make_scorer, make_train_step, state_shardings
from jaxagent.training.supervise import Examples, demonstrations, supervise
from jaxagent.types import Rollouts, Trajectory, pytree

ROLLOUT, MINIBATCH, CHOICE, CRITIC = 1, 2, 3, 4  # streams of the run's key


@pytree
class RunState:
  """All that a checkpoint holds beside the step: `reference` is there iff the method reads logp_ref."""

  train: TrainState
  reference: Any = None
  schedule: Schedule | None = None
  critic: TrainState | None = None


@dataclasses.dataclass(frozen=True)
class Hooks:
  """What the loop tells the outside. `record` gets one metrics record a step; `rollouts` each batch, to look at again;
  `dump` keeps one whose update was not finite, and returns where; `evaluate(engine) -> metrics` runs on held-out tasks;
  `checkpointer` saves and restores; `warn` tells a person."""

  record: Callable[[dict[str, Any]], None] = lambda record: None
  rollouts: Callable[[int, Rollouts, list[Trajectory]], Any] = lambda step, rollouts, trajectories: None
  dump: Callable[[int, Rollouts, list[Trajectory]], Any] = lambda step, rollouts, trajectories: None
  evaluate: Callable[[Engine], dict[str, float]] | None = None
  checkpointer: Any = None
  warn: Callable[[str], None] = warnings.warn
  profile: Callable[[int], Any] | None = None  # step -> context manager around it


def train(
  config: Config, parts: Parts, *, hooks: Hooks = Hooks(), resume: bool = False, examples: Examples | None = None
) -> RunState:
  """Runs `config.run.steps` steps and returns the state. With `resume`, goes on from the checkpointer's newest state.

  `examples`: what a warm start imitates in the place of the environment's demonstrations.
  `Interrupted` (a KeyboardInterrupt) is raised after a SIGINT or SIGTERM, once the last finished step is saved.
  """
  check_method(config, parts)
  with Interrupt() as interrupt:
    if resume:
      state, start, evaluated = restore(parts, hooks)
    else:
      state, start, evaluated = warm_start(config, parts, hooks, interrupt, examples)
    engine = build_engine(config, parts, state.train.params, version=start)
    tools = build_tools(config, parts.chat, engine, parts.tasks)
    update = Update(config, parts)
    done = start
    try:
      if evaluation_due(config, start) and not evaluated:
        _evaluate(hooks, interrupt, engine, start)
        evaluated = True
      if start == 0 and config.sft.steps:
        save(hooks, state, 0, evaluated=evaluated)
      for step in range(start, config.run.steps):
        with _profiled(hooks, step):
          state, record = _step(config, parts, hooks, interrupt, engine, tools, update, state, step)
        done, evaluated = step + 1, False
        hooks.record({"step": done, "phase": "train", **record})
        interrupt.check()
        if evaluation_due(config, done):
          _evaluate(hooks, interrupt, engine, done)
          evaluated = True
        if done % config.run.checkpoint_every == 0 or done == config.run.steps:
          save(hooks, state, done, evaluated=evaluated)
    except Interrupted:
      save(hooks, state, done, evaluated=evaluated)
      raise
    finally:
      if hooks.checkpointer is not None:
        hooks.checkpointer.wait()
  return state


def check_method(config: Config, parts: Parts) -> None:
  """What a method cannot do under this config, before anything runs."""
  check_critic(config, parts.method, parts.critic)
  check_judge(config, parts.tasks)
  provided = {"logp_old", "logp_ref", "entropy", "version", *parts.method.columns}
  if parts.critic is not None:
    provided |= {"value", "bootstrap"}
  if parts.policy.config is not None and getattr(parts.policy.config, "experts", 0):
    provided |= {"routing", "router_probs", "experts"}
  if absent := sorted(parts.method.needs - provided):
    raise ValueError(f"the method reads {', '.join(absent)}, which this loop does not provide; choose another method")
  truncation(config, parts)
  truncating = sampling_rules(config).truncates
  if truncating and any("logp_rollout" in names for names in _weights_read(parts.method)):
    raise ValueError(
      "the method corrects by logp_rollout, but rollout.top_k, top_p or min_p draw from a truncated distribution, where"
      " the correction is biased; sample the whole distribution, or correct by the column logp_sampled"
    )


def truncation(config: Config, parts: Parts) -> Callable[[Rollouts], Rollouts] | None:
  """`truncate_backprop` with the model's window, if `training.backprop_windows` asks for it."""
  multiplier = config.training.backprop_windows
  if multiplier is None:
    return None
  model, o = parts.policy.config, parts.method.objective
  kinds = set(getattr(model, "kinds", ("full",)))
  if kinds != {"prefix_sliding"}:
    raise ValueError(
      "training.backprop_windows cuts rollouts to the prefix and the last windows, but the model has"
      f" {', '.join(sorted(kinds))} attention; set model.shape.attention to prefix_sliding, or leave it null"
    )
  early = {name for slot in (*parts.method.reward, *o.advantage) for name in slot_parameters(slot)}
  if scored := sorted(early & {"logp_old", "logp_ref"}):
    raise ValueError(
      f"the method's advantages read {', '.join(scored)} of whole rollouts, but training.backprop_windows scores only"
      " what is left of them; leave it null, or choose another method"
    )
  return partial(truncate_backprop, window=model.window, multiplier=multiplier, prefix=model.max_prefix)


def _weights_read(method: Method) -> list[set[str]]:
  return [set(slot_parameters(slot)) for slot in (*method.objective.weight, *method.objective.keep)]


def sampling_rules(config: Config) -> Sampling:
  r = config.rollout
  return Sampling(
    temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p, max_tokens=r.max_turn_tokens, stop=r.stop
  )


def limits(config: Config) -> Limits:
  return Limits(max_turns=config.rollout.max_turns, max_tokens=config.rollout.max_tokens)


class Update:
  """The compiled passes of a run, and one batch of rollouts through them."""

  def __init__(self, config: Config, parts: Parts):
    self.config, self.parts = config, parts
    chunk = config.training.logprob_chunk
    self.step = make_train_step(parts.policy, parts.method, parts.tx, mesh=parts.mesh, chunk=chunk)
    self.scorer = make_scorer(parts.policy, mesh=parts.mesh, chunk=chunk)
    self.truncate = truncation(config, parts)
    self.fit = None if parts.critic is None else Fit(config, parts.method, parts.critic, parts.mesh)
    self.credit = jax.jit(lambda rollouts: credit(parts.method, rollouts))
    self.weigh = jax.jit(lambda credited, subset: weigh(parts.method, credited, minibatch=subset))
    self.track = jax.jit(self._track, out_shardings=(replicated(parts.mesh), None))

  def _track(self, states: tuple[Any, ...], rollouts: Rollouts) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The trackers' next states, and their columns."""
    after = [tracker.update(s, rollouts) for tracker, s in zip(self.parts.method.trackers, states)]
    return tuple(s for s, _ in after), {k: v for _, columns in after for k, v in columns.items()}

  def credited(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, Any]]:
    credit(self.parts.method, rollouts)  # concrete: values are checked here
    return self.credit(rollouts)

  def __call__(
    self, state: RunState, rollouts: Rollouts, *, key, phases: Phases, step: int = 0
  ) -> tuple[RunState, dict[str, Any]]:
    """All updates on one batch: the policy's, then the critic's. `key` and `step` are those of the step."""
    if self.parts.method.trackers:
      self._track(state.train.trackers, rollouts)  # concrete: values are checked here
      trackers, columns = self.track(state.train.trackers, rollouts)
      state = dataclasses.replace(state, train=dataclasses.replace(state.train, trackers=trackers))
      rollouts = with_columns(rollouts, jax.device_get(columns))
    with phases("score"):
      if self.fit is not None:
        rollouts = self.fit.valued(state.critic, rollouts)
      if self.truncate is None:
        whole, own = self.credited(self.scored(state, rollouts))
        credited = whole
      else:  # advantages and values need whole rollouts, log-probs what is left of them
        whole, own = jax.device_get(self.credited(rollouts))
        credited = self.scored(state, self.truncate(whole))
      weigh(self.parts.method, credited)  # concrete: values are checked here
    with phases("update"):
      if frozen(self.config, step):
        train, record = state.train, self.observed(state, credited)
      else:
        train, record = self.updated(state.train, credited, jax.random.fold_in(key, MINIBATCH))
    state = dataclasses.replace(state, train=train)
    if self.fit is not None and not record["nonfinite"]:
      with phases("critic"):
        critic, measured = self.fit(state.critic, whole, key=jax.random.fold_in(key, CRITIC), step=step)
      state = dataclasses.replace(state, critic=critic)
      record |= measured | {"nonfinite": measured["critic/nonfinite"]}
    return state, {**record, **{f"method/{name}": float(x) for name, x in own.items()}}

  def updated(self, train: TrainState, credited: Rollouts, key) -> tuple[TrainState, dict[str, float]]:
    """The policy's updates; the metrics are means over them, the sampler's gap is that before the first."""
    t, records = self.config.training, []
    for subset in subsets(credited, epochs=t.epochs, count=t.minibatches, key=key):
      batch, plan = packed(self.config, self.weigh(credited, subset))
      train, metrics = self.step(train, batch, plan.microbatches)
      records.append({**jax.device_get(metrics), "packing/efficiency": plan.efficiency})
      if records[-1]["nonfinite"]:
        break
    record = {k: float(np.mean([r[k] for r in records])) for k in records[0]}
    record["tokens"] = float(np.sum([r["tokens"] for r in records]))
    record["nonfinite"] = float(np.max([r["nonfinite"] for r in records]))
    names = ("kl/rollout_train", "logp_gap/mean", "logp_gap/max", "routing/rerouted_tokens")
    first = {k: float(records[0][k]) for k in names if k in record}
    return train, {**record, **first, **({} if credited.logp_old is None else self.gap(credited))}

  def observed(self, state: RunState, credited: Rollouts) -> dict[str, float]:
    """What is measured of a policy that stands still."""
    if credited.logp_old is None:
      credited = dataclasses.replace(credited, logp_old=self.score(state.train.params, credited))
    tokens = float(np.sum(credited.mask & credited.valid[:, None]))
    return {"tokens": tokens, "nonfinite": 0.0, **self.gap(credited)}

  def gap(self, credited: Rollouts) -> dict[str, float]:
    mask = credited.mask & credited.valid[:, None]
    return {k: float(v) for k, v in sampler_gap(credited.logp_old, credited.logp_rollout, mask).items()}

  def scored(self, state: RunState, rollouts: Rollouts) -> Rollouts:
    """With the log-probs that the method's objective reads before the update."""
    given = self.parts.method.columns
    needs = self.parts.method.needs - set(given)
    if "logp_old" not in given and (updates_per_step(self.config) > 1 or "logp_old" in needs):
      rollouts = dataclasses.replace(rollouts, logp_old=self.score(state.train.params, rollouts))
    if "logp_ref" in needs:
      rollouts = dataclasses.replace(rollouts, logp_ref=self.score(state.reference, rollouts, replay=False))
    return rollouts

  def rescore(self, params: Any, asked) -> list[np.ndarray]:
    """Log-probs of trajectories' own tokens under other first prompts."""
    return rescored(self.scorer, params, asked, microbatch_rows=self.config.training.microbatch_rows)

  def score(self, params: Any, rollouts: Rollouts, *, replay: bool = True) -> np.ndarray:
    batch, plan = packed(self.config, plain(rollouts if replay else dataclasses.replace(rollouts, routing=None)))
    return unpack(jax.device_get(self.scorer(params, batch, plan.microbatches).logp), plan)


def sampled(
  config: Config, parts: Parts, engine: Engine, schedule: Schedule, *, key
) -> tuple[list[Trajectory], Schedule, dict[str, float]]:
  """The groups of a step, the schedule after them, and metrics.

  With `scheduling.rounds` above 1, groups of equal outcomes make room for those of further tasks, so often at most.
  """
  prompts, samples = config.rollout.prompts, config.rollout.samples

  def one(schedule, taken, choice, rollout):
    indices, schedule, chosen = parts.scheduler.choose(schedule, choice, taken)
    if not indices:
      return [], [], schedule, chosen
    trajectories = collect(
      engine, parts.chat, parts.tasks, split="train", indices=indices, samples=samples,
      sampling=sampling_rules(config), limits=limits(config), key=rollout,
    )  # fmt: skip
    return indices, trajectories, parts.scheduler.update(schedule, trajectories, engine.version), chosen

  keys = [jax.random.fold_in(key, stream) for stream in (CHOICE, ROLLOUT)]
  indices, trajectories, schedule, metrics = one(schedule, [], *keys)
  if config.scheduling.rounds == 1:
    return trajectories, schedule, metrics
  taken, (differing, equal), rounds = indices, by_outcome(trajectories), 1
  while len(differing) < prompts and rounds < config.scheduling.rounds:
    indices, trajectories, schedule, _ = one(schedule, taken, *(jax.random.fold_in(k, rounds) for k in keys))
    if not indices:
      break
    more = by_outcome(trajectories)
    taken, differing, equal, rounds = taken + indices, differing + more[0], equal + more[1], rounds + 1
  groups = differing + equal
  for i, group in enumerate(groups[:prompts]):
    for t in group:
      t.rollout += (i - t.group) * samples
      t.group = i
  return [t for group in groups[:prompts] for t in group], schedule, metrics | {
    "scheduling/rounds": float(rounds),
    "scheduling/dropped_groups": float(max(len(groups) - prompts, 0)),
    "scheduling/dropped_tokens": float(sum(sum(t.action) for group in groups[prompts:] for t in group)),
  }


def by_outcome(trajectories: list[Trajectory]) -> tuple[list[list[Trajectory]], list[list[Trajectory]]]:
  """Groups whose outcomes differ, and those whose outcomes are equal."""
  split: tuple[list, list] = [], []
  for group, differs in enumerate(mixed(trajectories)):
    split[not differs].append([t for t in trajectories if t.group == group])
  return split


def _step(
  config: Config,
  parts: Parts,
  hooks: Hooks,
  interrupt: Interrupt,
  engine: Engine,
  tools: Tools,
  update: Update,
  state: RunState,
  step: int,
) -> tuple[RunState, dict[str, Any]]:
  phases, key, judged = Phases(), jax.random.fold_in(jax.random.key(config.seed), step), {}
  with phases("rollout"), interrupt.allowed():
    trajectories, schedule, chosen = sampled(config, parts, engine, state.schedule, key=key)
    state = dataclasses.replace(state, schedule=schedule)
    rollouts = as_batch(config, parts, trajectories)
  if parts.method.annotators:
    with phases("annotate"), interrupt.allowed():
      rollouts, judged = annotated(parts, trajectories, tools, rollouts, partial(update.rescore, state.train.params))
  hooks.rollouts(step + 1, rollouts, trajectories)
  state, record = update(state, rollouts, key=key, phases=phases, step=step)
  check_finite(hooks, step, record, rollouts, trajectories)
  with phases("load"):
    engine.load(state.train.params, version=step + 1)
  record |= rollout_metrics(rollouts, trajectories) | chosen | judged
  tokens = record["rollouts/sampled_tokens"] + chosen.get("scheduling/dropped_tokens", 0.0)
  record |= times(phases, sampled=tokens, updated=record["tokens"])
  warn_of_gap(config, hooks, step, record)
  return state, record


def check_finite(
  hooks: Hooks, step: int, record: dict[str, Any], rollouts: Rollouts, trajectories: list[Trajectory]
) -> None:
  """NonFinite where an update was not applied; the batch is kept, to look at."""
  if record["nonfinite"]:
    kept, whose = hooks.dump(step + 1, rollouts, trajectories), "the critic's " if "critic/nonfinite" in record else ""
    raise NonFinite(
      f"step {step + 1}: {whose}loss or gradient is not finite, the update was not applied; the batch is kept in {kept}"
    )


def times(phases: Phases, *, sampled: float, updated: float) -> dict[str, float]:
  """Seconds of a step by phase, and tokens a second."""
  seconds = phases.seconds
  return {
    "tokens_per_second/rollout": sampled / seconds["rollout"],
    "tokens_per_second/update": updated / (seconds["update"] + seconds["score"]),
    **phases.metrics(),
    "time/step": sum(seconds.values()),
  }


def warn_of_gap(config: Config, hooks: Hooks, step: int, record: dict[str, Any]) -> None:
  if record["logp_gap/max"] > config.tracking.gap_warning:
    hooks.warn(
      f"step {step + 1}: sampler and trainer differ by {record['logp_gap/max']:.3g} nats on a token"
      f" (tracking.gap_warning is {config.tracking.gap_warning})"
    )


def annotated(
  parts: Parts, trajectories: list[Trajectory], tools: Tools, rollouts: Rollouts, rescore: Rescorer
) -> tuple[Rollouts, dict[str, float]]:
  """With the annotators' columns; and the judge's counts, `judge/invalid` the rollouts that its failures took out."""
  columns = annotate(parts.method.annotators, trajectories, tools, rollouts, rescore)
  after = with_columns(rollouts, columns)
  if tools.judge is None:
    return after, {}
  return after, tools.judge.metrics() | {"judge/invalid": float(lost_rollouts(rollouts, after))}


def as_batch(config: Config, parts: Parts, trajectories: list[Trajectory]) -> Rollouts:
  return to_rollouts(
    trajectories,
    tokens=config.rollout.max_tokens,
    turns=config.rollout.max_turns * (1 + max(t.agent for t in trajectories)),  # agents may take turns
    routing=bool(getattr(parts.policy.config, "experts", 0)) and config.rollout.replay_routing,
    multiple=config.rollout.prompts * config.rollout.samples,
  )


def rollout_metrics(rollouts: Rollouts, trajectories: list[Trajectory]) -> dict[str, float]:
  """Of the logical rollouts, each counted once. `groups/equal_reward_share`: groups whose rewards do not differ."""
  logical = {t.rollout: t for t in reversed(trajectories)}.values()
  valid = [t for t in logical if t.status != "failed"]
  outcome = np.array([t.outcome for t in valid])
  n = max(len(valid), 1)
  groups: dict[int, list[float]] = {}
  reward = np.asarray(rollouts.reward)
  row = {t.rollout: i for i, t in reversed(list(enumerate(trajectories)))}
  for t in valid:
    groups.setdefault(t.group, []).append(float(reward[row[t.rollout]]))
  equal = [max(g) - min(g) <= 1e-6 * max(1.0, *map(abs, g)) for g in groups.values()]
  sampled = float(sum(sum(t.action) for t in trajectories))
  return {
    "reward/mean": float(np.mean([reward[row[t.rollout]] for t in valid])) if valid else float("nan"),
    "success/mean": float((outcome >= 1 - 1e-6).mean()) if valid else float("nan"),
    "groups/equal_reward_share": float(np.mean(equal)) if equal else float("nan"),
    "rollouts/valid": float(len(valid)),
    "rollouts/failed": float(len(logical) - len(valid)),
    "rollouts/truncated": sum(t.status == "truncated" for t in valid) / n,
    "rollouts/without_action": float(sum(not any(t.action) for t in valid)),
    "rollouts/turns": sum(t.turns for t in valid) / n,
    "rollouts/tokens": sum(len(t.tokens) for t in valid) / n,
    "rollouts/sampled_tokens": sampled,
  }


def evaluation_due(config: Config, step: int) -> bool:
  """Before the first step, after the last, and every `evaluation.every` between."""
  every = config.evaluation.every
  return bool(config.evaluation.tasks) and (step in (0, config.run.steps) or (every and step % every == 0))


def warm_start(
  config: Config, parts: Parts, hooks: Hooks, interrupt: Interrupt, examples: Examples | None = None
) -> tuple[RunState, int, bool]:
  """The state before step 0, supervised on `examples`, or demonstrations, if `sft.steps`; not evaluated yet."""
  params = parts.params
  if config.sft.steps:
    if examples is None and config.sft.source != "demonstrations":
      raise ValueError(f"sft.source is {config.sft.source!r}, but no examples were read from it; use jaxagent.train")
    params = supervise(config, parts, hooks, interrupt, examples or demonstrations(config, parts))
  train = init_state(parts.policy, parts.method, parts.tx, params, mesh=parts.mesh)
  reference = None
  if "logp_ref" in parts.method.needs:
    reference = shard_params(params, parts.policy.axes, mesh=parts.mesh)
  critic = None if parts.critic is None else begin(config, parts.critic, params, mesh=parts.mesh)
  return RunState(train, reference, parts.scheduler.init(), critic), 0, False


def abstract_state(parts: Parts) -> RunState:
  """Shapes and shardings of the state: the target of a restore."""
  train = abstract_train(parts.policy, parts.method, parts.tx, parts.mesh)
  reference = train.params if "logp_ref" in parts.method.needs else None
  critic = parts.critic and abstract_train(parts.critic.model, WITHOUT_MEMORY, parts.critic.tx, parts.mesh)
  return RunState(train, reference, parts.scheduler.init(), critic)


def abstract_train(policy: Policy | ValueModel, method: Method, tx: optax.GradientTransformation, mesh) -> TrainState:
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  placed = state_shardings(policy, method, tx, shapes, mesh=mesh)
  trackers = tuple(t.init() for t in method.trackers)
  leaves = jax.eval_shape(lambda p: TrainState(p, tx.init(p), np.zeros((), np.int32), trackers), shapes)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), leaves, placed)


def restore(parts: Parts, hooks: Hooks) -> tuple[RunState, int, bool]:
  restored = newest(parts, hooks)
  return restored.state, restored.step, bool(restored.meta["evaluated"])


def newest(parts: Parts, hooks: Hooks) -> Any:
  """The newest checkpoint: its `state`, `step` and `meta`."""
  if hooks.checkpointer is None:
    raise ValueError("resume needs a checkpointer")
  return hooks.checkpointer.restore(abstract_state(parts))


def save(hooks: Hooks, state: RunState, step: int, **meta: Any) -> None:
  if hooks.checkpointer is None:
    return
  with out_of_memory_named("checkpoint"):
    hooks.checkpointer.wait()
    if hooks.checkpointer.latest() != step:
      hooks.checkpointer.save(step, state, meta)


def _evaluate(hooks: Hooks, interrupt: Interrupt, engine: Engine, step: int) -> None:
  if hooks.evaluate is None:
    return
  phases = Phases()
  with phases("eval"), interrupt.allowed():
    measured = hooks.evaluate(engine)
  hooks.record({"step": step, "phase": "eval", **measured, **phases.metrics()})


def _profiled(hooks: Hooks, step: int):
  return hooks.profile(step + 1) if hooks.profile is not None else contextlib.nullcontext()
