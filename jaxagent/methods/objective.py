"""The records an algorithm is made of: a paper is a `dataclasses.replace` of another one.

    loss(theta) = sum_t aggregate_t [ weight_t * surrogate_t(logp_theta, advantage_t) + sum_k c_k term_{k,t}(scores) ]

A slot takes any function of arrays. Each parameter of it whose name is a column is given that column; the other
parameters are hyper-parameters and have defaults (change them with `functools.partial`). Building a record checks it.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from jaxtyping import Array

from jaxagent.types import Rollouts, TokenBatch, Trajectory

Slot = Callable[..., Array]
Coefficient = float | Callable[[Array], Array]  # a constant, or a schedule of the update count

ROLLOUT_COLUMNS = tuple(f.name for f in dataclasses.fields(Rollouts) if f.name != "columns")
# `advantage`: the result of the slots before, [N, T] for all that come after the last of them; `keep`: the mask,
# narrowed so far, of the rollouts in this update
STAGE_COLUMNS = ("advantage", "keep")
TOKEN_COLUMNS = tuple(f.name for f in dataclasses.fields(TokenBatch) if f.name != "columns")
# of the parameters being differentiated; all but `logp` are computed iff a slot names them, the last two by a mixture:
# router_probs [B, T, L, E], and the experts [B, T, L, K] that processed the token
SCORE_COLUMNS = ("logp", "entropy", "router_probs", "experts")
# names that nobody else may provide
MADE = {*STAGE_COLUMNS, *TOKEN_COLUMNS, *SCORE_COLUMNS, "columns"} - set(ROLLOUT_COLUMNS)
OPTIONAL_PASSES = ("logp_old", "logp_ref", "value", "routing", "bootstrap", "version")


@dataclasses.dataclass(frozen=True)
class Objective:
  """advantage, weight, keep and aggregate see the whole batch `[N, T]` and carry no gradient; surrogate and terms are
  differentiated, one microbatch `[B, T]` at a time. All are losses: to be minimised."""

  advantage: tuple[Slot, ...]  # each returns [N] or [N, T]; later ones may read `advantage`
  surrogate: Slot  # -> [B, T]
  aggregate: Slot  # -> token weights [N, T]; reads `keep`
  weight: tuple[Slot, ...] = ()  # factors of the surrogate, [N, T], multiplied
  keep: tuple[Slot, ...] = ()  # masks [N, T], and-ed; they narrow everything, denominators included
  terms: tuple[tuple[Coefficient, Slot], ...] = ()
  # columns [N] or [N, T] of the whole update for surrogate and terms, from slots that read `aggregate` too: what makes
  # a term with a threshold or a denominator of its own additive over microbatches
  columns: tuple[tuple[str, Slot], ...] = ()

  @property
  def whole(self) -> tuple[Slot, ...]:
    """Slots that see the whole batch, in the order in which they are called."""
    return (*self.advantage, *self.keep, *self.weight, self.aggregate, *(slot for _, slot in self.columns))

  @property
  def differentiated(self) -> tuple[Slot, ...]:
    return (self.surrogate, *(term for _, term in self.terms))


class Annotator(Protocol):
  """Host-side facts from outside the arrays (a judge's verdict, a similarity): stateless, called once per group.

  Returns columns by name, each with one entry per trajectory of the group: a number, an array of one fixed shape, a
  value per token, a `PerTurn`, an `annotators.Rescore`, or None for what could not be had: its rollout is not valid.
  """

  @property
  def columns(self) -> tuple[str, ...]: ...

  async def __call__(self, trajectories: list[Trajectory], tools: Any) -> dict[str, Any]: ...


class Tracker(Protocol):
  """A memory across steps, as a pytree in the checkpoint; `update` is pure and jitted, and provides `columns`."""

  columns: tuple[str, ...]

  def init(self) -> Any: ...

  def update(self, state: Any, rollouts: Rollouts) -> tuple[Any, dict[str, Array]]: ...


@dataclasses.dataclass(frozen=True)
class Method:
  """An objective and what it needs: rewards to shape, facts to fetch, memories to keep."""

  objective: Objective
  reward: tuple[Slot, ...] = ()  # each returns reward [N] or turn_reward [N, S]; later ones see the result so far
  annotators: tuple[Annotator, ...] = ()
  trackers: tuple[Tracker, ...] = ()
  # for the record only: each returns a number, or numbers by name, from the batch and its `advantage`
  metrics: tuple[tuple[str, Slot], ...] = ()
  # what the value of each action token is to become, [N, T]; the loop trains a critic on it where a slot reads `value`
  returns: Slot | None = None

  def __post_init__(self):
    o, extra = self.objective, self.columns
    if taken := sorted(MADE & set(extra)):
      raise ValueError(f"an annotator or tracker provides {taken[0]!r}, which is made from the batch; rename it")
    check_once("the annotators and trackers provide", extra)
    check_once("Objective.columns names", [name for name, _ in o.columns])
    check_once("Method.metrics names", [name for name, _ in self.metrics])
    whole = (*ROLLOUT_COLUMNS, *STAGE_COLUMNS, *extra)
    for slot in (*(slot for _, slot in self.metrics), *self._returns):
      check_slot(slot, (*ROLLOUT_COLUMNS, "advantage", *extra))
    for slot in (*self.reward, *o.advantage, *o.weight, *o.keep, o.aggregate):
      check_slot(slot, whole)
    late = (*TOKEN_COLUMNS, *SCORE_COLUMNS, *extra)
    for name, slot in o.columns:
      check_slot(slot, (*whole, "aggregate"))
      if name in (*whole, *late):
        raise ValueError(f"Objective.columns: {name!r} is a column already; choose another name")
    for slot in o.differentiated:
      check_slot(slot, (*late, *(name for name, _ in o.columns)))

  @property
  def columns(self) -> tuple[str, ...]:
    return tuple(name for part in (*self.annotators, *self.trackers) for name in part.columns)

  @property
  def needs(self) -> frozenset[str]:
    """Optional columns that some slot reads: the loop runs a pass for `logp_old`, `logp_ref`, `value` iff listed.

    A surrogate or a term that reads `logp_old` does not list it: at the first update it is the current log-prob.
    """
    o = self.objective
    early = (*self.reward, *o.whole, *(slot for _, slot in self.metrics), *self._returns)
    names = {name for slot in early for name in slot_parameters(slot)}
    late = {name for slot in o.differentiated for name in slot_parameters(slot)} - {"logp_old"}
    return frozenset((names | late) & {*OPTIONAL_PASSES, *SCORE_COLUMNS[1:]})

  @property
  def _returns(self) -> tuple[Slot, ...]:
    return () if self.returns is None else (self.returns,)


def slot_parameters(slot: Slot) -> dict[str, inspect.Parameter]:
  """Parameters of a slot that are still free: what `functools.partial` has bound by keyword is a hyper-parameter."""
  bound = getattr(slot, "keywords", {})
  return {k: p for k, p in inspect.signature(slot).parameters.items() if k not in bound}


def check_once(where: str, names) -> None:
  twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
  if twice:
    raise ValueError(f"{where} {twice[0]!r} twice; one would hide the other")


def check_slot(slot: Slot, columns: tuple[str, ...]) -> None:
  missing = [k for k, p in slot_parameters(slot).items() if k not in columns and p.default is inspect.Parameter.empty]
  if missing:
    name = getattr(slot, "__name__", None) or getattr(getattr(slot, "func", None), "__name__", repr(slot))
    raise ValueError(
      f"{name} reads {', '.join(missing)}, which no column provides; columns are {', '.join(sorted(columns))}."
      " Add the annotator that provides it, or bind it with functools.partial"
    )
