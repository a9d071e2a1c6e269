"""The Optax chain that a config describes; from Python any other chain may be used."""

import optax

from jaxagent import config


def make_optimizer(section: config.Optimizer, *, updates: int) -> optax.GradientTransformation:
  """clip by global norm (if set), then AdamW under the schedule; `updates` is how many there will be in all."""
  adamw = optax.adamw(
    make_schedule(section, updates=updates),
    b1=section.b1, b2=section.b2, eps=section.eps, weight_decay=section.weight_decay,
  )  # fmt: skip
  if section.clip is None:
    return adamw
  if section.clip <= 0:
    raise ValueError(f"optimizer.clip must be above 0, or null for none, got {section.clip}")
  return optax.chain(optax.clip_by_global_norm(section.clip), adamw)


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
