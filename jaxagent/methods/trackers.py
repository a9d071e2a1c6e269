"""Memories across steps. `update` is pure: the state after this batch, and the columns that its advantages read."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxagent.advantages import (
  EntropyThresholds,
  PromptRates,
  entropy_thresholds,
  group_entropy,
  prompt_rates,
  success_rate,
  update_rates,
  update_thresholds,
)
from jaxagent.types import Rollouts


@dataclass(frozen=True)
class EntropyTracker:
  """GEPO's thresholds of the group entropy: updated with the batch first, then read. See `update_thresholds`."""

  beta_low: float = 0.2
  beta_high: float = 0.3
  gamma: float = 0.01
  columns: ClassVar[tuple[str, ...]] = ("group_entropy", "entropy_low", "entropy_high")

  def init(self) -> EntropyThresholds:
    return entropy_thresholds()

  def update(
    self, state: EntropyThresholds, rollouts: Rollouts
  ) -> tuple[EntropyThresholds, dict[str, Float[Array, "N"]]]:
    r = rollouts
    entropy = group_entropy(r.logp_rollout, r.mask, r.group, valid=r.valid)
    betas = dict(beta_low=self.beta_low, beta_high=self.beta_high, gamma=self.gamma)
    state = update_thresholds(state, entropy, r.group, valid=r.valid, **betas)
    low, high = (jnp.broadcast_to(x, entropy.shape) for x in (state.low, state.high))
    return state, {"group_entropy": entropy, "entropy_low": low, "entropy_high": high}


@dataclass(frozen=True, eq=False)
class RateTracker:
  """SPO++'s success rates of `tasks` prompts: `baseline` is the rate before this batch, then its outcomes are added.

  `initial`: `prompt_rates` of offline rollouts; None: 1/2 everywhere, with the mass of one rollout. The event of a
  rollout is the version of the weights at its first action token. Errors: ValueError where `version` is not recorded.
  """

  tasks: int
  initial: PromptRates | None = None
  rho: float = 0.875
  columns: ClassVar[tuple[str, ...]] = ("baseline",)

  def __post_init__(self):
    if not isinstance(self.tasks, int) or self.tasks < 1:
      raise ValueError(f"tasks must be the number of prompts, at least 1, got {self.tasks!r}")

  def init(self) -> PromptRates:
    zero = jnp.zeros(self.tasks, jnp.float32)
    return prompt_rates(zero, zero) if self.initial is None else self.initial

  def update(self, state: PromptRates, rollouts: Rollouts) -> tuple[PromptRates, dict[str, Float[Array, "N"]]]:
    r = rollouts
    if r.version is None:
      raise ValueError("the rates of prompts decay with the version of the weights: record `version` in the rollouts")
    task = jnp.clip(jnp.where(r.valid, r.task, 0), 0, self.tasks - 1)
    baseline = success_rate(state)[task]
    event = _dispatched(r)
    return update_rates(state, r.task, r.outcome, event, valid=r.valid, rollout=r.rollout, rho=self.rho), {
      "baseline": baseline
    }


def _dispatched(r: Rollouts) -> Int[Array, "N"]:
  """Version of the first action token of each logical rollout, 0 without one."""
  latest = jnp.iinfo(jnp.int32).max
  row = jnp.min(jnp.where(r.mask, jnp.asarray(r.version, jnp.int32), latest), axis=1, initial=latest)
  first = jax.ops.segment_min(row, jnp.asarray(r.rollout), r.rollout.shape[0])[r.rollout]
  return jnp.where(first == latest, 0, first)
