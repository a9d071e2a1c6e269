"""Supervised fine-tuning: the warm start of a run, on demonstrations or on rollouts that were stored."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxagent.config import Config, Optimizer
from jaxagent.methods import prepare, sft
from jaxagent.rewards import most_efficient
from jaxagent.rewards.efficiency import is_correct
from jaxagent.rollout.batch import append_turns, demonstrations_batch, to_rollouts
from jaxagent.training.build import Parts, build_engine
from jaxagent.training.interrupt import Interrupt
from jaxagent.training.minibatches import packed
from jaxagent.training.optimizer import make_optimizer
from jaxagent.training.phases import NonFinite, Phases
from jaxagent.training.step import init_state, make_train_step
from jaxagent.types import Rollouts, Trajectory

if TYPE_CHECKING:
  from jaxagent.training.loop import Hooks

Examples = Callable[[int], Rollouts]  # step -> what it imitates


def supervise(config: Config, parts: Parts, hooks: "Hooks", interrupt: Interrupt, examples: Examples) -> Any:
  """Parameters after `sft.steps` steps on `examples`, or earlier at a held-out success of `sft.stop_at`."""
  c = config.sft
  tx = make_optimizer(Optimizer(learning_rate=c.learning_rate, warmup=min(20, c.steps // 10)), updates=c.steps)
  state = init_state(parts.policy, sft, tx, parts.params, mesh=parts.mesh)
  step_fn = make_train_step(parts.policy, sft, tx, mesh=parts.mesh, chunk=config.training.logprob_chunk)
  run = jax.jit(lambda rollouts: prepare(sft, rollouts))
  engine = build_engine(config, parts, state.params) if c.stop_at is not None else None
  for step in range(c.steps):
    phases = Phases()
    with phases("sft"):
      batch, plan = packed(config, run(examples(step)))
      state, metrics = step_fn(state, batch, plan.microbatches)
      metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
    if metrics["nonfinite"]:
      raise NonFinite(f"sft step {step + 1}: loss or gradient is not finite; lower sft.learning_rate")
    done = step + 1
    kept = {k: metrics[k] for k in ("loss", "grad_norm", "tokens")}
    hooks.record({"step": done, "phase": "sft", **kept, **phases.metrics()})
    interrupt.check()
    if engine is not None and hooks.evaluate is not None and (done % c.eval_every == 0) and done < c.steps:
      engine.load(state.params, version=done)
      with interrupt.allowed():
        measured = hooks.evaluate(engine)
      hooks.record({"step": done, "phase": "sft", **measured})
      if measured["eval/success"] >= c.stop_at:
        break
  return state.params


def demonstrations(config: Config, parts: Parts) -> Examples:
  """Those of the environment, in order. ValueError: it has none."""
  if not hasattr(parts.tasks, "demonstration"):
    raise ValueError(
      f"sft.steps is {config.sft.steps}, but env {config.env.name} has no demonstrations; set it to 0, or sft.source to"
      " a run whose rollouts are good"
    )

  def examples(step: int) -> Rollouts:
    indices = range(step * config.sft.batch, (step + 1) * config.sft.batch)
    return demonstrations_batch(parts.tasks, parts.chat, indices, **_sizes(config))

  return examples


def in_epochs(config: Config, rows: Sequence[Trajectory]) -> Examples:
  """All rows again and again, shuffled anew each time."""

  def examples(step: int) -> Rollouts:
    places = range(step * config.sft.batch, (step + 1) * config.sft.batch)
    turns = [divmod(place, len(rows)) for place in places]
    orders = {e: np.random.default_rng([config.seed, e]).permutation(len(rows)) for e in {e for e, _ in turns}}
    taken = [rows[orders[epoch][i]] for epoch, i in turns]
    alone = [dataclasses.replace(row, group=i, rollout=i) for i, row in enumerate(taken)]
    return to_rollouts(alone, **_sizes(config))

  return examples


@dataclasses.dataclass(frozen=True)
class Found:
  """A rollout that can be imitated: the rows of its agents, and what filters read. `cost` is that of its tools."""

  task: tuple[int, int]  # number of the environment and of the task
  correct: bool
  cost: float
  rows: tuple[Trajectory, ...]

  @property
  def generated(self) -> int:
    return sum(sum(row.action) for row in self.rows)


def found(rollouts: Rollouts) -> list[Found]:
  """The valid rollouts of a batch in which the policy wrote anything. Correct: outcome 1, and not truncated.

  Tools cost what the column `tool_cost [N]` says, where there is one; else nothing, and length alone tells rollouts
  apart.
  """
  rows: dict[int, list[int]] = {}
  for row in np.flatnonzero(rollouts.valid & rollouts.mask.any(axis=1)):
    rows.setdefault(int(rollouts.rollout[row]), []).append(int(row))
  cost = np.asarray(rollouts.columns.get("tool_cost", np.zeros(len(rollouts.valid))), np.float32)
  right = np.asarray(is_correct(rollouts.outcome)) & ~rollouts.truncated
  return [
    Found(
      task=(int(rollouts.env[own[0]]), int(rollouts.task[own[0]])),
      correct=bool(right[own].all()),
      cost=float(cost[own[0]]),
      rows=tuple(example(rollouts, row) for row in own),
    )
    for own in rows.values()
  ]


def chosen(batches: Iterable[Rollouts], how: str) -> tuple[list[Trajectory], int]:
  """Rows of the rollouts that a filter keeps, and among how many rollouts it chose.

  "none" keeps all, "correct" those with outcome 1, "pareto" of each task the correct one that `rewards.most_efficient`
  names, over all batches. ValueError: it keeps none.
  """
  count, kept = 0, []
  for rollouts in batches:
    there = found(rollouts)
    count += len(there)
    kept += there if how == "none" else [one for one in there if one.correct]
  if not kept:
    raise ValueError(f"sft.filter {how} keeps none of the {count} rollouts of sft.source; choose another run or filter")
  if how == "pareto":
    kept = pareto(kept)
  return [row for one in kept for row in one.rows], count


def pareto(correct: Sequence[Found]) -> list[Found]:
  """Of each task the one with the largest product of SlimSearcher's gates."""
  number = {task: i for i, task in enumerate(dict.fromkeys(one.task for one in correct))}
  keep = most_efficient(
    np.ones(len(correct), np.float32),
    np.array([one.cost for one in correct], np.float32),
    np.array([one.generated for one in correct], np.float32),
    np.array([number[one.task] for one in correct], np.int32),
  )
  return [one for one, k in zip(correct, np.asarray(keep)) if k]


def example(rollouts: Rollouts, row: int) -> Trajectory:
  """A stored row as a trajectory to imitate: reward 1, temperature 1, logp_rollout 0."""
  length = int(rollouts.length[row])
  made = Trajectory(
    task=int(rollouts.task[row]), group=0, rollout=0, agent=int(rollouts.agent[row]), env=int(rollouts.env[row]),
    outcome=1.0, status="done",
  )  # fmt: skip
  append_turns(made, rollouts.tokens[row, :length], rollouts.turn[row, :length])
  made.prefix_length = int(rollouts.prefix_length[row])
  return made


def _sizes(config: Config) -> dict[str, int]:
  return {"tokens": config.rollout.max_tokens, "turns": config.rollout.max_turns}
