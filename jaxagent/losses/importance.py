"""Corrections of the gap between the sampler (`logp_rollout`) and the trainer before the update (`logp_old`).

rho = pi_old / pi_rollout, log-probs in nats under the same temperature, over the whole vocabulary. Masked tokens may
hold anything. No gradient flows. They correct the engine gap, not staleness (that is the surrogate's ratio), and not
truncated sampling.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes
from jaxagent.losses.segments import segment_total, turn_ids
from jaxagent.losses.terms import binary_kl

MAX_LOG_RATIO = 20.0


def truncated_importance(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, cap: float = 2.0
) -> Float[Array, "N T"]:
  """w = min(rho, cap): a weight of the surrogate; biased for finite cap.

  Source: Yao et al. 2025 (TIS). Ours differs: nothing.
  """
  return jnp.minimum(_exp(_log_rho(logp_old, logp_rollout)), cap)


def masked_importance(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, low: float = 0.5, high: float = 5.0
) -> Float[Array, "N T"]:
  """w = rho where low <= rho <= high, else 0: a weight; the dropped tokens still count in denominators.

  Source: arXiv 2510.18855 (IcePop), from notes of the paper; that the dropped tokens count is our reading.
  `importance_within` is the other one.
  """
  log_rho = _log_rho(logp_old, logp_rollout)
  return jnp.where(_within(log_rho, low, high), _exp(log_rho), 0.0)


def importance_within(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, low: float | None = None, high: float = 2.0
) -> Bool[Array, "N T"]:
  """keep = low <= rho <= high: a mask; the dropped tokens leave denominators and terms too.

  `low` is 1 / high if None.
  Source: token-level masked importance sampling (MIS), as in verl. Ours differs: nothing.
  """
  return _within(_log_rho(logp_old, logp_rollout), low, high)


def turn_truncated_importance(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  cap: float = 2.0,
) -> Float[Array, "N T"]:
  """w = min(product of rho over the turn's tokens, cap), at each token of the turn; 1 off the mask.

  Turns are those of the row. `truncated_importance` at the scale of turns.
  """
  return jnp.where(mask, jnp.minimum(_exp(_turn_log_ratio(logp_old, logp_rollout, mask, turn)), cap), 1.0)


def turn_importance_within(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  turn: Int[Array, "N T"],
  *,
  low: float | None = None,
  high: float = 2.0,
) -> Bool[Array, "N T"]:
  """keep = low <= product of rho over the turn's tokens <= high: a turn stays or goes whole.

  `low` is 1 / high if None. `importance_within` at the scale of turns.
  """
  return _within(_turn_log_ratio(logp_old, logp_rollout, mask, turn), low, high) & mask


def sequence_truncated_importance(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  cap: float = 2.0,
) -> Float[Array, "N"]:
  """w = min(product of rho over the logical rollout's tokens, cap), one per row: the unbiased ratio of the sequence,
  truncated; of large variance for long rollouts.

  Source: the sequence level of TIS, as in verl (caps of 2 to 10). Ours differs: nothing.
  """
  return jnp.minimum(_exp(_rollout_log_ratio(logp_old, logp_rollout, mask, rollout)[0]), cap)


def sequence_importance_within(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  low: float | None = None,
  high: float = 2.0,
) -> Bool[Array, "N"]:
  """keep = low <= product of rho over the logical rollout's tokens <= high. `low` is 1 / high if None.

  Source: the sequence level of MIS, as in verl (2 to 10). Ours differs: nothing.
  """
  return _within(_rollout_log_ratio(logp_old, logp_rollout, mask, rollout)[0], low, high)


def geometric_truncated_importance(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  cap: float = 2.0,
) -> Float[Array, "N"]:
  """w = min(exp(mean log rho of the logical rollout), cap), one per row.

  Biased even without the cap, and near 1 whatever the gap: the geometric mean is for rejection,
  `geometric_importance_within`.
  """
  total, count = _rollout_log_ratio(logp_old, logp_rollout, mask, rollout)
  return jnp.minimum(_exp(total / jnp.maximum(count, 1)), cap)


def geometric_importance_within(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  low: float | None = None,
  high: float = 1.001,
) -> Bool[Array, "N"]:
  """keep = low <= exp(mean log rho of the logical rollout) <= high. `low` is 1 / high if None.

  Independent of length, unlike the product.
  Source: the geometric level of MIS, as in verl (1.0001 to 1.001). Ours differs: nothing.
  """
  total, count = _rollout_log_ratio(logp_old, logp_rollout, mask, rollout)
  return _within(total / jnp.maximum(count, 1), low, high)


def not_vetoed(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  floor: float = 1e-4,
) -> Bool[Array, "N"]:
  """keep = no token of the logical rollout has rho < floor (not clamped): the trainer could not have written it.

  Source: the veto of verl (1e-6 to 1e-4). Ours differs: nothing.
  """
  d = _masked_log_ratio(logp_old, logp_rollout, mask, rollout)
  n = d.shape[0]
  least = jax.ops.segment_min(jnp.min(d, axis=1, initial=jnp.inf), jnp.asarray(rollout), n)[jnp.asarray(rollout)]
  return least >= jnp.log(jnp.float32(floor))


def binary_kl_within(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], *, threshold: float = 0.1
) -> Bool[Array, "N T"]:
  """keep = D(p || q) <= threshold and D(q || p) <= threshold, D the KL of "this token or another", in nats.

  Rare tokens may differ by large ratios, likely ones only by small ones; compare `importance_within`.
  Source: arXiv 2608.13505 (Intern-S2-Preview; KPop). Reconstruction: the paper's threshold is not known, 0.1 is ours.
  """
  check_shapes(logp_old=(logp_old, "*N"), logp_rollout=(logp_rollout, "*N"))
  return (binary_kl(logp_old, logp_rollout) <= threshold) & (binary_kl(logp_rollout, logp_old) <= threshold)


def off_policy_within(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  advantage: Float[Array, "N"] | Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  threshold: float = 0.5,
) -> Bool[Array, "N"] | Bool[Array, "N T"]:
  """keep = A >= 0 or mean(log pi_rollout - log pi_old) over the logical rollout <= threshold: no punishment for what
  the policy has already left. Of the advantage's shape.

  Source: arXiv 2512.02556 (DeepSeek-V3.2's off-policy sequence mask; 0.5 is TRL's). Ours differs: measured once, at the
  parameters before the first update on the batch, not at each update.
  """
  advantage = jnp.asarray(advantage)
  check_shapes(mask=(mask, "N T"), advantage=(advantage, "N" if advantage.ndim == 1 else "N T"))
  total, count = _rollout_log_ratio(logp_old, logp_rollout, mask, rollout)
  near = -total / jnp.maximum(count, 1) <= threshold
  return (advantage >= 0) | (near if advantage.ndim == 1 else near[:, None])


def mean_one(weight: Float[Array, "N T"], keep: Bool[Array, "N T"]) -> Float[Array, "N T"]:
  """weight / its mean over the kept tokens of the batch: corrects without changing the size of the step.

  Kept weights that are all 0 stay 0.
  """
  check_shapes(weight=(weight, "N T"), keep=(keep, "N T"))
  weight = jnp.where(keep, jnp.asarray(weight, jnp.float32), 0.0)
  mean = jnp.sum(weight) / jnp.maximum(jnp.sum(keep), 1)
  return weight / jnp.where(mean > 0, mean, 1.0)


def sequence_mean_one(
  weight: Float[Array, "N"], keep: Bool[Array, "N T"], rollout: Int[Array, "N"]
) -> Float[Array, "N"]:
  """weight / its mean over the logical rollouts with a kept token; the rows of a rollout have one weight."""
  check_shapes(weight=(weight, "N"), keep=(keep, "N T"), rollout=(rollout, "N"))
  weight, rollout, n = jnp.asarray(weight, jnp.float32), jnp.asarray(rollout), jnp.shape(weight)[0]
  check_ids("rollout", rollout, n)
  row = jnp.where(jnp.any(jnp.asarray(keep), 1), jnp.arange(n), n)
  first = row == jnp.minimum(jax.ops.segment_min(row, rollout, n), n - 1)[rollout]
  mean = jnp.sum(jnp.where(first, weight, 0.0)) / jnp.maximum(jnp.sum(first), 1)
  return weight / jnp.where(mean > 0, mean, 1.0)


def normalised_truncated_importance(
  logp_old: Float[Array, "N T"], logp_rollout: Float[Array, "N T"], keep: Bool[Array, "N T"], *, cap: float = 2.0
) -> Float[Array, "N T"]:
  """`truncated_importance` divided by its mean over the kept tokens of the batch; 0 off `keep`.

  Source: verl's batch normalisation of importance weights. Ours differs: nothing.
  """
  return mean_one(truncated_importance(logp_old, logp_rollout, cap=cap), keep)


def normalised_sequence_importance(
  logp_old: Float[Array, "N T"],
  logp_rollout: Float[Array, "N T"],
  mask: Bool[Array, "N T"],
  keep: Bool[Array, "N T"],
  rollout: Int[Array, "N"],
  *,
  cap: float = 2.0,
) -> Float[Array, "N"]:
  """`sequence_truncated_importance` divided by its mean over the kept logical rollouts of the batch."""
  check_shapes(mask=(mask, "N T"), keep=(keep, "N T"))
  return sequence_mean_one(
    sequence_truncated_importance(logp_old, logp_rollout, mask, rollout, cap=cap), keep, rollout
  )


def _log_rho(logp_old, logp_rollout):
  check_shapes(logp_old=(logp_old, "*N"), logp_rollout=(logp_rollout, "*N"))
  return jax.lax.stop_gradient(jnp.asarray(logp_old, jnp.float32) - jnp.asarray(logp_rollout, jnp.float32))


def _exp(log_ratio):
  return jax.lax.stop_gradient(jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


def _within(log_ratio, low, high):
  """low <= exp(log_ratio) <= high, decided on the logarithm: the ends are inclusive and nothing overflows."""
  log_high = jnp.log(jnp.float32(high))
  log_low = -log_high if low is None else jnp.log(jnp.float32(low))
  return (log_low <= log_ratio) & (log_ratio <= log_high)


def _masked_log_ratio(logp_old, logp_rollout, mask, rollout=None):
  check_shapes(
    logp_old=(logp_old, "N T"), logp_rollout=(logp_rollout, "N T"), mask=(mask, "N T"), rollout=(rollout, "N")
  )
  check_ids("rollout", rollout, len(mask))
  d = jnp.asarray(logp_old, jnp.float32) - jnp.asarray(logp_rollout, jnp.float32)
  return jax.lax.stop_gradient(jnp.where(mask, d, 0.0))


def _turn_log_ratio(logp_old, logp_rollout, mask, turn):
  check_shapes(mask=(mask, "N T"), turn=(turn, "N T"))
  d = _masked_log_ratio(logp_old, logp_rollout, mask)
  return segment_total(d, mask, turn_ids(turn))


def _rollout_log_ratio(logp_old, logp_rollout, mask, rollout):
  """Sum of log rho and number of tokens of each row's logical rollout."""
  d = _masked_log_ratio(logp_old, logp_rollout, mask, rollout)
  rollout, n = jnp.asarray(rollout), d.shape[0]
  total, count = (jax.ops.segment_sum(jnp.sum(x, 1), rollout, n)[rollout] for x in (d, jnp.asarray(mask)))
  return total, count
