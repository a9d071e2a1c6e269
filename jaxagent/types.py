"""The pytrees that cross module borders, and the host record they are made from.

Conventions, used everywhere:

- `logp[:, t]` is the log-probability (nats) of `tokens[:, t]` given everything before it in its stream.
- `mask` is True exactly where the policy sampled the token. It comes from the sampler's record, never from
  token values.
- `position` is the position at which a token was generated; packing and truncation keep it.
- A row is one unbroken token stream. `rollout[n]` names the logical rollout of row n: branches of one trial and
  the agents of one team share it. Group statistics and sequence means count each logical rollout once.
- `turn` counts the steps of the logical rollout, from 0 and without gaps: agents who act at the same time have turns of
  one number, and an agent who waits has none of it. A turn is a row and a number.
- `valid=False` marks a failure of infrastructure: in no statistic, in no loss, counted in the metrics.
- Axis letters: N rollout rows, B packed rows, T tokens, S turns, L layers, E experts, K chosen experts, V vocabulary.
"""

import dataclasses
import typing
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

T = typing.TypeVar("T")
Status = Literal["running", "done", "truncated", "failed"]


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
  """Frozen dataclass registered with JAX; every field is a leaf or subtree."""
  return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree
class Rollouts:
  """N rows of T tokens: one batch of rollouts, on the device, before packing.

  Per-token columns are `[N, T]`, per-row ones `[N]`. Rows past `length` are filler and may hold anything.
  `columns` is what a method adds, by name, with leading axis N; those with axes `[N, T]` ride with their token.
  """

  tokens: Int[Array, "N T"]
  position: Int[Array, "N T"]
  mask: Bool[Array, "N T"]
  turn: Int[Array, "N T"]  # step of the logical rollout in which the turn was taken, -1 off actions
  length: Int[Array, "N"]  # tokens in the row
  prefix_length: Int[Array, "N"]  # tokens of the first prompt
  rollout: Int[Array, "N"]  # logical rollout, in [0, N)
  agent: Int[Array, "N"]
  group: Int[Array, "N"]  # rollouts of one task, in [0, N)
  env: Int[Array, "N"]
  task: Int[Array, "N"]
  outcome: Float[Array, "N"]  # what the environment said, before any shaping
  reward: Float[Array, "N"]  # what is trained on
  turn_reward: Float[Array, "N S"]
  valid: Bool[Array, "N"]
  truncated: Bool[Array, "N"]
  temperature: Float[Array, "N"]
  logp_rollout: Float[Array, "N T"]  # log softmax(logits / temperature), by the sampler
  version: Int[Array, "N T"] | None = None  # version of the weights that sampled the token
  logp_old: Float[Array, "N T"] | None = None  # the trainer's, at the parameters before the first update
  logp_ref: Float[Array, "N T"] | None = None
  entropy: Float[Array, "N T"] | None = None  # nats, of the distribution the token was drawn from
  value: Float[Array, "N T"] | None = None  # of the state before token t
  bootstrap: Float[Array, "N"] | None = None  # value of the state after the last token; 0 where the episode ended
  routing: Int[Array, "N T L K"] | None = None  # experts used when the model processed token t; -1: not recorded
  columns: dict[str, Array] = dataclasses.field(default_factory=dict)


@pytree
class TokenBatch:
  """Rows of T tokens as the loss sees them; several rollouts may share a row. All columns are per token.

  `segment` numbers the rollouts inside a row from 0, -1 is padding. `mask` is narrowed by the objective's keeps.
  `logp_old=None` stands for "the parameters being differentiated": the first update on a batch needs no old pass.
  """

  tokens: Int[Array, "*B T"]
  position: Int[Array, "*B T"]
  segment: Int[Array, "*B T"]
  turn: Int[Array, "*B T"]  # renumbered densely within the row, -1 off actions
  prefix_end: Int[Array, "*B T"]  # index in the row at which the token's prefix ends
  mask: Bool[Array, "*B T"]
  advantage: Float[Array, "*B T"]
  weight: Float[Array, "*B T"]
  aggregate: Float[Array, "*B T"]
  temperature: Float[Array, "*B T"]
  logp_rollout: Float[Array, "*B T"]
  logp_old: Float[Array, "*B T"] | None = None
  logp_ref: Float[Array, "*B T"] | None = None
  value: Float[Array, "*B T"] | None = None
  routing: Int[Array, "*B T L K"] | None = None
  columns: dict[str, Array] = dataclasses.field(default_factory=dict)


@pytree
class Scores:
  """What the model says of a `TokenBatch`: `logp` and `entropy` in nats, at the row's temperature."""

  logp: Float[Array, "*B T"]
  entropy: Float[Array, "*B T"] | None = None
  value: Float[Array, "*B T"] | None = None
  aux: dict[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Completion:
  """One sampled turn. `ids` ends with the stop token if one was sampled.

  `logp_rollout` is log softmax(logits / T), `logp_sampled` is under the distribution that was drawn from (nats).
  `routing` has one row for every token that was *processed* in this call, in stream order, beginning with the first
  token of the stream that was not processed before; the last sampled token is never among them.
  """

  ids: Int[np.ndarray, "n"]
  logp_rollout: Float[np.ndarray, "n"]
  logp_sampled: Float[np.ndarray, "n"]
  version: Int[np.ndarray, "n"]
  finish: Literal["stop", "length", "capacity"]
  entropy: Float[np.ndarray, "n"] | None = None
  routing: Int[np.ndarray, "m L K"] | None = None


class PerTurn(tuple):
  """An entry of a trajectory's column `[N, S]`: a value for each of its turns, in order.

  With one value more it is an entry of a column `[N, S+1]`: of the state at the start and after each turn.
  """


@dataclasses.dataclass
class Trajectory:
  """What happened in one token stream, append-only: ids exactly as sampled, and who wrote them."""

  task: int
  group: int
  rollout: int
  agent: int = 0
  env: int = 0
  temperature: float = 1.0
  prefix_length: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  action: list[bool] = dataclasses.field(default_factory=list)
  turn: list[int] = dataclasses.field(default_factory=list)
  logp_rollout: list[float] = dataclasses.field(default_factory=list)
  logp_sampled: list[float] = dataclasses.field(default_factory=list)
  entropy: list[float] = dataclasses.field(default_factory=list)
  version: list[int] = dataclasses.field(default_factory=list)
  routing: list[np.ndarray] = dataclasses.field(default_factory=list)  # one [L, K] per processed token
  turn_reward: list[float] = dataclasses.field(default_factory=list)
  turn_step: list[int] = dataclasses.field(default_factory=list)  # the environment's, of each turn; empty: not known
  outcome: float = 0.0
  status: Status = "running"
  cause: str = ""
  columns: dict[str, Any] = dataclasses.field(default_factory=dict)  # numbers, arrays, `PerTurn`
  transcript: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # for people

  @property
  def turns(self) -> int:
    return max(self.turn, default=-1) + 1

  def append_context(self, ids: "list[int] | np.ndarray") -> None:
    """Tokens that the policy read but did not write. The first call is the prefix."""
    n = len(ids)
    if not self.tokens:
      self.prefix_length = n
    zeros = np.zeros(n)
    self._extend(ids, action=False, turn=-1, logp=zeros, sampled=zeros, version=[-1] * n, entropy=zeros)

  def append_action(self, completion: Completion, *, step: int | None = None) -> None:
    """Tokens that the policy sampled, as a new turn, taken at that step of the environment."""
    if completion.routing is not None:
      processed = len(self.tokens) + len(completion.ids) - 1
      if len(self.routing) + len(completion.routing) != processed:
        raise ValueError(
          f"routing of rollout {self.rollout}: {len(self.routing)} rows recorded and {len(completion.routing)} new, but"
          f" {processed} tokens were processed; each processed token must have exactly one row"
        )
      self.routing.extend(completion.routing)
    if step is not None:
      self.turn_step.append(step)
    n = len(completion.ids)
    entropy = completion.entropy if completion.entropy is not None else np.full(n, np.nan)
    self._extend(
      completion.ids, action=True, turn=self.turns, logp=completion.logp_rollout, sampled=completion.logp_sampled,
      version=completion.version, entropy=entropy,
    )  # fmt: skip

  def _extend(self, ids, *, action, turn, logp, sampled, version, entropy) -> None:
    n = len(ids)
    self.tokens.extend(int(i) for i in ids)
    self.action.extend([action] * n)
    self.turn.extend([turn] * n)
    self.logp_rollout.extend(float(x) for x in logp)
    self.logp_sampled.extend(float(x) for x in sampled)
    self.entropy.extend(float(x) for x in entropy)
    self.version.extend(int(x) for x in version)


def check(rollouts: Rollouts) -> Rollouts:
  """Returns `rollouts` if its shapes and kinds agree, and its values where they are concrete.

  A ValueError names the column.
  """
  n, t = np.shape(rollouts.tokens)
  for field in dataclasses.fields(Rollouts):
    value = getattr(rollouts, field.name)
    if field.name == "columns":
      for name, column in value.items():
        if name in _FIELDS:
          raise ValueError(f"columns holds {name!r}, which is a field of Rollouts: put it there, or rename it")
        _require(np.shape(column)[:1] == (n,), f"columns[{name!r}]", f"leading axis {n}", np.shape(column))
    elif value is not None:
      per_token = field.name in PER_TOKEN
      want = (n, t) if per_token else (n,)
      _require(np.shape(value)[: len(want)] == want, field.name, f"leading axes {want}", np.shape(value))
      kinds, words = _KINDS.get(field.name, ("iufb", "numbers"))
      kind = np.dtype(getattr(value, "dtype", None) or np.asarray(value).dtype)
      _require(kind.kind in kinds or kind.kind == "V", field.name, words, kind)
  if not isinstance(rollouts.group, Tracer):
    for name in ("group", "rollout"):
      ids = np.asarray(getattr(rollouts, name))
      _require(((ids >= 0) & (ids < n)).all(), name, f"ids in [0, {n})", f"{ids.min()}..{ids.max()}" if n else "none")
    length = np.asarray(rollouts.length)
    _require(((length >= 0) & (length <= t)).all(), "length", f"values in [0, {t}]", length)
    past = np.arange(t)[None] >= length[:, None]
    _require(not (np.asarray(rollouts.mask) & past).any(), "mask", "False at and past length", "True there")
    if rollouts.routing is not None:
      _check_routing(rollouts)
  return rollouts


_FIELDS = frozenset(f.name for f in dataclasses.fields(Rollouts))
_KINDS = {name: ("b", "dtype bool") for name in ("mask", "valid", "truncated")} | {
  name: ("iu", "integers")
  for name in ("tokens", "position", "turn", "length", "prefix_length", "rollout", "agent", "group", "env", "task")
}
PER_TOKEN = (
  "tokens", "position", "mask", "turn", "logp_rollout", "version", "logp_old", "logp_ref", "entropy", "value",
  "routing",
)  # fmt: skip


def _check_routing(rollouts: Rollouts) -> None:
  missing = np.any(np.asarray(rollouts.routing) < 0, axis=(2, 3))[:, :-1]
  needed = np.asarray(rollouts.mask)[:, 1:] & np.asarray(rollouts.valid)[:, None]
  bad = np.argwhere(missing & needed)
  if len(bad):
    n, t = bad[0]
    raise ValueError(
      f"routing is not recorded (-1) for token {t} of rollout {int(np.asarray(rollouts.rollout)[n])}, whose next token"
      " is an action;"
      " record the experts of every token that an action is predicted from, or set routing=None"
    )


def _require(ok, name: str, want: str, got) -> None:
  if not ok:
    raise ValueError(f"Rollouts.{name} must have {want}, got {got}")
