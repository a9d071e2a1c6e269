"""Experience Funnel, arXiv 2609.08919: edits of a state of text and updates of the policy, in turn.

A round, with policy pi and state S:

1. Rollouts under S on the round's first tasks; who reflects on them proposes S+.
2. S+ is taken iff it does strictly better than S on the validation tasks, under pi.
3. `funnel.round_steps` updates of the policy. Each samples its tasks without a state, under S and under S+, by the
   same keys; where S+ helps, what it gained is distilled into the policy without a state, beside reinforcement of that.
4. The new policy is taken iff without a state it does no worse than pi on the validation tasks; else it is as before
   the round, bit for bit.
5. Items of the state that the new policy does without are dropped: what stays is the residual state.

Reconstruction in part: only notes of the paper were available. Ours are: which rollouts of a helpful task are distilled
(`paired`), the gate's tasks, one round being one edit, and the check of items that are dropped together. The teacher is
the frozen policy itself; the paper's experiments have a larger one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxagent.config import Config
from jaxagent.envs.base import Tasks
from jaxagent.envs.instructions import NONE, Instructed, Instructions, instructed
from jaxagent.judges.episodes import opening
from jaxagent.losses import accept_policy, accept_state, benefit, residual_items, selection_weight
from jaxagent.rollout.collect import collect, run
from jaxagent.rollout.episode import PromptTooLong
from jaxagent.rollout.restate import with_prefix
from jaxagent.sampling.engine import Engine
from jaxagent.training import loop
from jaxagent.training.annotate import Tools
from jaxagent.training.build import Parts, build_engine
from jaxagent.training.interrupt import Interrupt, Interrupted
from jaxagent.training.judging import build_tools
from jaxagent.training.loop import Hooks, RunState, Update
from jaxagent.training.phases import Phases
from jaxagent.training.reflection import Reflect, build_reflect, check_reflect
from jaxagent.training.supervise import Examples
from jaxagent.types import Trajectory

GATE = 5  # stream of the run's key
COLUMNS = {"selection", "logp_privileged"}


@dataclasses.dataclass(frozen=True)
class Observers:
  """What is told beside `Hooks`. `state(step, record)`: the state after a round, with what was proposed and scored;
  `held_out(engine, tasks) -> metrics`: evaluation, here of the policy with its state."""

  state: Callable[[int, dict[str, Any]], Any] = lambda step, record: None
  held_out: Callable[[Engine, Tasks], dict[str, float]] | None = None


NO_HOOKS, NO_OBSERVERS = Hooks(), Observers()


def train(
  config: Config,
  parts: Parts,
  *,
  reflect: Reflect | None = None,
  hooks: Hooks = NO_HOOKS,
  observers: Observers = NO_OBSERVERS,
  resume: bool = False,
  examples: Examples | None = None,
) -> tuple[RunState, Instructions]:
  """`run.steps` updates of the policy in rounds, and returns both states. `reflect` replaces `funnel.reflect`.

  With `resume`, goes on from the checkpointer's newest round. After a signal the last finished round is saved and
  `Interrupted` is raised.
  """
  check_funnel(config, parts)
  if reflect is None:
    check_reflect(config, parts.tasks)
  with Interrupt() as interrupt:
    if resume:
      state, text, start, evaluated = restore(parts, hooks)
    else:
      state, start, evaluated = loop.warm_start(config, parts, hooks, interrupt, examples)
      text = first_state(config, parts)
    engine = build_engine(config, parts, state.train.params, version=start)
    tools = build_tools(config, parts.chat, engine, parts.tasks)
    reflect = reflect or build_reflect(config, parts.tasks, tools)
    funnel = Funnel(config, parts, hooks, interrupt, engine, tools, Update(config, parts), reflect, Gate(config, parts))
    done, kept = start, Kept(state)
    try:
      if loop.evaluation_due(config, start) and not evaluated:
        evaluate(parts, hooks, observers, interrupt, engine, text, start)
        evaluated = True
      if start == 0 and config.sft.steps:
        save(hooks, kept.state(), text, 0, evaluated)
      while done < config.run.steps:
        state, text, record = funnel.round(kept, text, done)
        last, done, evaluated, kept = done, done + config.funnel.round_steps, False, Kept(state)
        observers.state(done, record)
        interrupt.check()
        if any(loop.evaluation_due(config, step) for step in range(last + 1, done + 1)):
          evaluate(parts, hooks, observers, interrupt, engine, text, done)
          evaluated = True
        if done // config.run.checkpoint_every > last // config.run.checkpoint_every or done >= config.run.steps:
          save(hooks, state, text, done, evaluated)
    except Interrupted:
      save(hooks, kept.state(), text, done, evaluated)
      raise
    finally:
      if hooks.checkpointer is not None:
        hooks.checkpointer.wait()
  return kept.state(), text


def check_funnel(config: Config, parts: Parts) -> None:
  """What keeps a funnel from running, before anything runs."""
  loop.check_method(config, parts)
  if lacking := sorted(COLUMNS - set(parts.method.columns)):
    raise ValueError(
      f"method {config.method.name} does not read {', '.join(lacking)}, so it cannot learn from a state; set"
      " method.name to experience_funnel"
    )
  if parts.critic is not None:
    raise ValueError("a funnel has no critic; set critic.init to null")
  if config.scheduling.rounds > 1:
    raise ValueError("a funnel compares all states on the same tasks; set scheduling.rounds to 1")
  if getattr(parts.policy.config, "experts", 0) and config.rollout.replay_routing:
    raise ValueError(
      "what is distilled stands under another prompt than it was sampled under, for which no experts are recorded; set"
      " rollout.replay_routing to false"
    )
  if config.funnel.max_tokens >= config.rollout.max_tokens:
    raise ValueError(
      f"funnel.max_tokens must be less than rollout.max_tokens = {config.rollout.max_tokens}, which holds the state"
      f" too, got {config.funnel.max_tokens}"
    )
  gate_tasks(config, parts)
  first_state(config, parts)


def first_state(config: Config, parts: Parts) -> Instructions:
  """The one of `funnel.prompt`. ValueError: it is longer than `funnel.max_tokens`."""
  text, most = Instructions(prompt=config.funnel.prompt), config.funnel.max_tokens
  if (length := tokens(parts, text)) > most:
    raise ValueError(f"funnel.prompt has {length} tokens, but funnel.max_tokens is {most}; shorten it, or raise that")
  return text


def tokens(parts: Parts, text: Instructions) -> int:
  return len(parts.chat.tokenizer.encode(text.text)) if text.text else 0


def gate_tasks(config: Config, parts: Parts) -> range:
  """The held-out tasks after those of the evaluation."""
  first, size = config.evaluation.tasks, parts.tasks.size("eval")
  indices = range(first, first + config.funnel.gate_tasks)
  if size is not None and indices.stop > size:
    raise ValueError(
      f"the eval split has {size} tasks, but evaluation.tasks is {first} and funnel.gate_tasks {len(indices)}, which"
      " must be others; lower one of them"
    )
  return indices


class Kept:
  """A copy on the host of all that an update changes, to go back to: `RunState`s of it are equal bit for bit."""

  def __init__(self, state: RunState):
    self._rest = dataclasses.replace(state, train=None)
    self._shardings = jax.tree.map(lambda x: x.sharding, state.train)
    self._host = jax.tree.map(lambda x: np.array(jax.device_get(x)), state.train)

  def state(self) -> RunState:
    fresh = jax.tree.map(np.array, self._host)
    return dataclasses.replace(self._rest, train=jax.device_put(fresh, self._shardings))


class Gate:
  """Mean outcome on the validation tasks: the same ones by the same keys each time."""

  def __init__(self, config: Config, parts: Parts):
    self._config, self._parts, self._indices = config, parts, gate_tasks(config, parts)
    self._key = jax.random.fold_in(jax.random.key(config.seed), GATE)

  def __call__(self, engine: Engine, text: Instructions) -> float:
    """ValueError: no episode came to an end."""
    rules = dataclasses.replace(loop.sampling_rules(self._config), temperature=self._config.evaluation.temperature)
    trajectories = collect(
      engine, self._parts.chat, under(self._parts.tasks, text), split="eval", indices=self._indices,
      samples=self._config.funnel.gate_samples, sampling=rules, limits=loop.limits(self._config), key=self._key,
    )  # fmt: skip
    episodes = {t.rollout: t for t in reversed(trajectories)}.values()
    ended = [t.outcome for t in episodes if t.status != "failed"]
    if not ended:
      raise ValueError(f"all {len(episodes)} validation episodes failed, for example: {next(iter(episodes)).cause}")
    return float(np.mean(ended))


def under(tasks: Tasks, text: Instructions) -> Tasks:
  return Instructed(tasks, text) if text.text else tasks


@dataclasses.dataclass
class Funnel:
  """A run's rounds."""

  config: Config
  parts: Parts
  hooks: Hooks
  interrupt: Interrupt
  engine: Engine
  tools: Tools
  update: Update
  reflect: Reflect
  gate: Gate
  scores: dict[str, float] = dataclasses.field(default_factory=dict)  # by text, under the engine's weights

  def round(self, before: Kept, text: Instructions, start: int) -> tuple[RunState, Instructions, dict[str, Any]]:
    """The states after the round that begins at step `start`, and a record of it for people."""
    state, previous, proposed, edit = before.state(), text, text, {}
    with self.interrupt.allowed():
      free = self.score(NONE)
    for step in range(start, start + self.config.funnel.round_steps):
      phases, key = Phases(), jax.random.fold_in(jax.random.key(self.config.seed), step)
      with phases("rollout"), self.interrupt.allowed():
        samples = self.sampled(state, key)
        before_edit = samples.under(previous)
      if step == start:
        with phases("reflect"), self.interrupt.allowed():
          proposed, text, edit = self.edited(text, before_edit)
      with phases("rollout"), self.interrupt.allowed():
        rows, measured = paired(
          samples.under(NONE), before_edit, samples.under(text), text=text, persistent=self.config.funnel.persistent
        )
      state = dataclasses.replace(state, schedule=samples.schedule)
      state, record = self.learned(state, rows, samples, key, step, phases)
      record |= measured | samples.metrics | (edit if step == start else {})
      if step + 1 < start + self.config.funnel.round_steps:
        self.record(step, record, phases)
    with phases("validate"), self.interrupt.allowed():
      state, accepted, after = self.validated(state, before, free)
      text, residual = self.residual(text, start) if accepted else (text, {})
    record |= {
      "funnel/policy_accepted": float(accepted), "funnel/validation_free": free,
      "funnel/validation_free_after": after, **residual, "funnel/version": float(text.version),
      "funnel/items": float(len(text.items)), "funnel/state_tokens": float(tokens(self.parts, text)),
    }  # fmt: skip
    self.record(step, record, phases)
    told = {k: v for k, v in record.items() if k.startswith("funnel/")}
    return state, text, {"state": text.to_json(), "proposed": proposed.to_json(), **told}

  # the state of text

  def edited(
    self, text: Instructions, trajectories: list[Trajectory]
  ) -> tuple[Instructions, Instructions, dict[str, float]]:
    """What was proposed, the state after its gate, and metrics."""
    proposed = run(self.reflect(text, trajectories))
    judged = {} if self.tools.judge is None else self.tools.judge.metrics()
    metrics = {"funnel/proposed": float(proposed.text != text.text), "funnel/validation_state": self.score(text)}
    if proposed.text == text.text:
      return proposed, text, judged | metrics | {"funnel/state_accepted": 0.0, "funnel/too_long": 0.0}
    score = self.score_of_edit(proposed)
    accepted = score is not None and bool(accept_state(score, metrics["funnel/validation_state"]))
    metrics |= {"funnel/state_accepted": float(accepted), "funnel/too_long": float(score is None)}
    if score is not None:
      metrics["funnel/validation_proposed"] = score
    return proposed, proposed if accepted else text.refusing(proposed), judged | metrics

  def score_of_edit(self, proposed: Instructions) -> float | None:
    """None where the text is too long, for `funnel.max_tokens` or for a task's prompt."""
    if tokens(self.parts, proposed) > self.config.funnel.max_tokens:
      return None
    try:
      return self.score(proposed)
    except PromptTooLong:
      return None

  def residual(self, text: Instructions, start: int) -> tuple[Instructions, dict[str, float]]:
    """The state without what the policy does without, if this round looks for it."""
    number, every = start // self.config.funnel.round_steps + 1, self.config.funnel.residual_every
    if not every or number % every or not text.items:
      return text, {}
    tolerance, score = self.config.funnel.tolerance, self.score(text)
    without = np.array([self.score(text.without([item])) for item in text.items])
    idle = ~np.asarray(residual_items(without, score, tolerance=tolerance))
    rest = text.without([item for item, drop in zip(text.items, idle) if drop])
    if idle.sum() > 1 and self.score(rest) < score - tolerance:  # each could do without, but not all together
      rest = text.without([text.items[int(np.argmax(without))]])
    retired = float(len(text.items) - len(rest.items))
    return rest, {"funnel/retired": retired, "funnel/validation_residual": self.score(rest)}

  def score(self, text: Instructions) -> float:
    if text.text not in self.scores:
      self.scores[text.text] = self.gate(self.engine, text)
    return self.scores[text.text]

  # the policy

  def sampled(self, state: RunState, key) -> "Samples":
    """Tasks of a step, and their rollouts without a state."""
    free, schedule, metrics = loop.sampled(self.config, self.parts, self.engine, state.schedule, key=key)
    return Samples(self.config, self.parts, self.engine, jax.random.fold_in(key, loop.ROLLOUT), schedule, metrics, free)

  def learned(
    self, state: RunState, rows: list[Trajectory], samples: "Samples", key, step: int, phases: Phases
  ) -> tuple[RunState, dict[str, Any]]:
    """The state after an update on the rows. The sampler's gap is measured on rollouts without a state: the others
    differ by their prompts."""
    free, judged = samples.under(NONE), {}
    rollouts = loop.as_batch(self.config, self.parts, rows)
    with phases("annotate"), self.interrupt.allowed():
      rescore = partial(self.update.rescore, state.train.params)
      rollouts, judged = loop.annotated(self.parts, rows, self.tools, rollouts, rescore)
    self.hooks.rollouts(step + 1, rollouts, rows)
    with phases("score"):
      alone = loop.as_batch(self.config, self.parts, free)
      scored = dataclasses.replace(alone, logp_old=self.update.score(state.train.params, alone))
      gap = self.update.gap(scored)
    state, record = self.update(state, rollouts, key=key, phases=phases, step=step)
    loop.check_finite(self.hooks, step, record, rollouts, rows)
    with phases("load"):
      self.load(state, step + 1)
    return state, record | gap | loop.rollout_metrics(rollouts, free) | judged

  def load(self, state: RunState, version: int) -> None:
    self.engine.load(state.train.params, version=version)
    self.scores = {}

  def validated(self, state: RunState, before: Kept, score: float) -> tuple[RunState, bool, float]:
    """The new policy, or the old one with the new schedule; whether it is the new one; the new one's score."""
    after = self.score(NONE)
    if bool(accept_policy(after, score)):
      return state, True, after
    old = dataclasses.replace(before.state(), schedule=state.schedule)
    self.load(old, self.engine.version)
    self.scores = {NONE.text: score}
    return old, False, after

  # what is told

  def record(self, step: int, record: dict[str, Any], phases: Phases) -> None:
    times = loop.times(phases, sampled=record["funnel/sampled_tokens"], updated=record["tokens"])
    self.hooks.record({"step": step + 1, "phase": "train", **record, **times})
    loop.warn_of_gap(self.config, self.hooks, step, record)


class Samples:
  """Rollouts of a step's tasks by one policy under several states, by the same keys; each is sampled once."""

  def __init__(self, config: Config, parts: Parts, engine: Engine, key, schedule, metrics, free: list[Trajectory]):
    self._config, self._parts, self._engine, self._key = config, parts, engine, key
    self.schedule, self._chosen, self._by_text = schedule, metrics, {NONE.text: free}
    self._indices = list(dict.fromkeys(t.task for t in sorted(free, key=lambda t: t.group)))

  def under(self, text: Instructions) -> list[Trajectory]:
    if text.text not in self._by_text:
      self._by_text[text.text] = collect(
        self._engine, self._parts.chat, under(self._parts.tasks, text), split="train", indices=self._indices,
        samples=self._config.rollout.samples, sampling=loop.sampling_rules(self._config),
        limits=loop.limits(self._config), key=self._key,
      )  # fmt: skip
    return self._by_text[text.text]

  @property
  def metrics(self) -> dict[str, float]:
    tokens = sum(sum(t.action) for rows in self._by_text.values() for t in rows)
    return {**self._chosen, "funnel/sampled_tokens": float(tokens)}


def paired(
  free: Sequence[Trajectory],
  previous: Sequence[Trajectory],
  updated: Sequence[Trajectory],
  *,
  text: Instructions,
  persistent: float,
) -> tuple[list[Trajectory], dict[str, float]]:
  """Rows to learn from, and metrics, of rollouts of the same tasks with the same ids under three states.

  First the rows without a state (selection -1). Then those under the updated state that are distilled, each under the
  prompt without it: of a task that the state helped in the mean, the rollouts that did better than the mean without
  it, with the task's `losses.selection_weight`. Means are over the rollouts that failed under none of the states. A row
  whose agent was first asked something else without the state has no prompt to stand under; it is left out and counted.
  """
  outcomes = np.array([_outcomes(rows) for rows in (free, previous, updated)])  # [3, R], NaN: failed
  group = np.array([g for _, g in sorted({t.rollout: t.group for t in free}.items())])
  lasting = ~np.isnan(outcomes).any(0)
  tasks = np.unique(group)
  alive = np.array([bool(lasting[group == g].any()) for g in tasks])
  mean = np.array([[_mean(row, lasting & (group == g)) for g in tasks] for row in outcomes], np.float32)
  weight = np.asarray(selection_weight(*mean, persistent=persistent, valid=alive))
  better = np.asarray(benefit(np.nan_to_num(outcomes[2]).astype(np.float32), mean[0][np.searchsorted(tasks, group)]))
  share = np.where(lasting & better, weight[np.searchsorted(tasks, group)], 0.0)
  number = {rollout: i for i, rollout in enumerate(sorted({t.rollout for t in free}))}
  plain = {(t.rollout, t.agent): t for t in free}
  distilled, lost = [], 0
  for row in updated if text.text else ():
    selection = float(share[number[row.rollout]])
    if selection > 0 and any(row.action):
      other = plain.get((row.rollout, row.agent))
      if other is None or instructed(opening(other), text.text) != opening(row):
        lost += 1
        continue
      distilled.append(_restated(row, other, selection, groups=len(tasks), rollouts=len(number)))
  kinds = _transitions(mean, alive)
  means = {f"funnel/outcome_{name}": _share(m[alive]) for name, m in zip(STATES, mean)}
  counts = {"funnel/distilled_rows": float(len(distilled)), "funnel/not_restated": float(lost)}
  return [*map(_free, free), *distilled], means | kinds | counts


STATES = ("free", "previous", "updated")
TRANSITIONS = {  # whether the previous state helped, and the updated one
  "new": (False, True), "persistent": (True, True), "regressive": (True, False), "inactive": (False, False)
}  # fmt: skip


def _transitions(mean: np.ndarray, alive: np.ndarray) -> dict[str, float]:
  """Shares of the tasks, by whether the previous and the updated state helped."""
  before, after = (np.asarray(benefit(m, mean[0])) for m in mean[1:])
  return {
    f"funnel/{name}": _share(((before == b) & (after == a))[alive]) for name, (b, a) in TRANSITIONS.items()
  }


def _outcomes(rows: Sequence[Trajectory]) -> list[float]:
  """Of each rollout, in the order of their ids; NaN if it failed."""
  by: dict[int, list[Trajectory]] = {}
  for row in rows:
    by.setdefault(row.rollout, []).append(row)
  return [by[r][0].outcome if all(t.status != "failed" for t in by[r]) else float("nan") for r in sorted(by)]


def _share(values: np.ndarray) -> float:
  return float(np.mean(values)) if len(values) else float("nan")


def _mean(values: np.ndarray, where: np.ndarray) -> float:
  return float(values[where].mean()) if where.any() else 0.0


def _free(row: Trajectory) -> Trajectory:
  columns = {"selection": -1.0, "logp_privileged": np.zeros(len(row.tokens), np.float32)}
  return dataclasses.replace(row, columns={**row.columns, **columns})


def _restated(row: Trajectory, other: Trajectory, selection: float, *, groups: int, rollouts: int) -> Trajectory:
  """The row under the other's prompt, in a group and a rollout of its own kind."""
  made = with_prefix(row, other.tokens[: other.prefix_length])
  made.columns["selection"] = selection
  return dataclasses.replace(made, group=row.group + groups, rollout=row.rollout + rollouts)


# evaluation and checkpoints


def evaluate(
  parts: Parts, hooks: Hooks, observers: Observers, interrupt: Interrupt, engine: Engine, text: Instructions, step: int
) -> None:
  """Of the policy without a state, and `funnel/eval_success` with it."""
  if hooks.evaluate is None:
    return
  phases = Phases()
  with phases("eval"), interrupt.allowed():
    measured = hooks.evaluate(engine)
    if observers.held_out is not None and text.text:
      measured["funnel/eval_success"] = observers.held_out(engine, under(parts.tasks, text))["eval/success"]
  hooks.record({"step": step, "phase": "eval", **measured, **phases.metrics()})


def save(hooks: Hooks, state: RunState, text: Instructions, step: int, evaluated: bool) -> None:
  loop.save(hooks, state, step, evaluated=evaluated, funnel=text.to_json())


def restore(parts: Parts, hooks: Hooks) -> tuple[RunState, Instructions, int, bool]:
  """ValueError: the run that is there was none of a funnel."""
  restored = loop.newest(parts, hooks)
  if "funnel" not in restored.meta:
    raise ValueError("the run was not made by jaxagent funnel; continue it with train, or begin a new one")
  text = Instructions.from_json(restored.meta["funnel"])
  return restored.state, text, restored.step, bool(restored.meta["evaluated"])
