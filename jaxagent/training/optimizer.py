"""The Optax chain that a config describes; from Python any other chain may be used."""

from typing import Any

import jax
import optax

from jaxagent import config, optim


def make_optimizer(
  section: config.Optimizer, *, updates: int, mesh: jax.sharding.Mesh | None = None, layout: Any = None
) -> optax.GradientTransformation:
  """clip by global norm (if set), then AdamW or Muon under the schedule; `updates` is how many there will be in all.

  Muon's matrices have updates of AdamW's size (`optim.rms_scale`), so that one learning rate and weight decay serves
  both; `mesh` and `layout` (the parameters' shardings) are `optim.muon`'s.
  """
  schedule = make_schedule(section, updates=updates)
  tx = optax.adamw(schedule, b1=section.b1, b2=section.b2, eps=section.eps, weight_decay=section.weight_decay)
  if section.name == "muon":
    tx = optim.muon(
      schedule, adam=tx, scale=optim.rms_scale, beta=section.momentum, weight_decay=section.weight_decay, mesh=mesh,
      layout=layout,
    )  # fmt: skip
  if section.clip is None:
    return tx
  if section.clip <= 0:
    raise ValueError(f"optimizer.clip must be above 0, or null for none, got {section.clip}")
  return optax.chain(optax.clip_by_global_norm(section.clip), tx)


def make_schedule(section: config.Optimizer, *, updates: int) -> optax.Schedule:
  """Learning rate by update count: linear warm-up, then constant, or down to 0 at `updates` by a cosine or a line."""
  if section.warmup < 0 or section.learning_rate < 0:
    raise ValueError(
      f"optimizer.warmup and optimizer.learning_rate must be at least 0, got {section.warmup} and"
      f" {section.learning_rate}"
    )
  rest = max(updates - section.warmup, 1)
  body = {
    "constant": lambda: optax.constant_schedule(section.learning_rate),
    "cosine": lambda: optax.cosine_decay_schedule(section.learning_rate, rest),
    "linear": lambda: optax.linear_schedule(section.learning_rate, 0.0, rest),
  }[section.schedule]()
  warmup = optax.linear_schedule(section.learning_rate / (section.warmup + 1), section.learning_rate, section.warmup)
  return optax.join_schedules([warmup, body], [section.warmup]) if section.warmup else body
