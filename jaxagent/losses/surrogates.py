"""Surrogates: per-token losses whose gradient is the policy gradient. Log-probs in nats; shapes `[B, T]` in and out.

The loss zeroes log-probs and advantages where the mask is False before it calls them. Log ratios are clamped to +-20.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_shapes
from jaxagent.losses.segments import segment_total, turn_ids
from jaxagent.losses.terms import binary_kl

MAX_LOG_RATIO = 20.0


def reinforce(logp: Float[Array, "B T"], advantage: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """-A log pi. For data from the current parameters only: nothing corrects staleness.

  Source: Williams 1992. With advantage 1 it is maximum likelihood.
  """
  check_shapes(logp=(logp, "*B"), advantage=(advantage, "*B"))
  return -advantage * logp


def ppo_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  low: float = 0.2,
  high: float = 0.2,
) -> Float[Array, "B T"]:
  """-min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old of the token.

  `logp_old` must be from the parameters before the first update on the batch; against the current ones it clips
  nothing.
  Source: Schulman et al. 2017, arXiv 1707.06347; high > low is DAPO's clip-higher, arXiv 2503.14476.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  return _clipped(_ratio(logp - logp_old), advantage, low, high)


def gspo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  *,
  low: float = 3e-4,
  high: float = 4e-4,
) -> Float[Array, "B T"]:
  """-min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log ratio over the row's kept tokens).

  The value is the sequence ratio at every token, the gradient of token t flows through log pi_t alone (GSPO-token),
  so under `sequence_mean` and an advantage per sequence it is GSPO. The ratio is per unbroken row (branches have
  their own).
  Source: Zheng et al. 2025, arXiv 2507.18071. Ours differs: nothing.
  """
  logp, logp_old, advantage = _kept(mask, logp, logp_old, advantage, segment=segment)
  mean = _segment_mean(logp - logp_old, mask, segment)
  return _clipped(_ratio(_through(mean, logp)), advantage, low, high)


def dual_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 3.0,
) -> Float[Array, "B T"]:
  """`ppo_clip`, and for A < 0 at most -cap A: a token that became cap times likelier is pushed down no further.

  Source: Ye et al. 2020, arXiv 1912.09729, cap 3; the negative dual clip of SPO++, arXiv 2608.24870, is high 0.28 and
  cap 2 (SPO: 10).
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  loss = _clipped(_ratio(logp - logp_old), advantage, low, high)
  return jnp.where(advantage < 0, jnp.minimum(loss, -cap * advantage), loss)


def two_sided_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 4.0,
) -> Float[Array, "B T"]:
  """-min(min(r, cap) A, clip(r, 1 - low, 1 + high) A). For cap >= 1 + high it is `dual_clip`.

  Source: arXiv 2505.07291 (INTELLECT-2). Ours differs: nothing.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  ratio = _ratio(logp - logp_old)
  return jnp.maximum(-jnp.minimum(ratio, cap) * advantage, -jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def turn_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  turn: Int[Array, "B T"],
  *,
  low: float = 0.5,
  high: float = 1.0,
) -> Float[Array, "B T"]:
  """-min(rho A, clip(rho, 1 - low, 1 + high) A) with rho = exp(sum of log ratios over the turn's kept tokens).

  The value is the complete turn's ratio at every token; the gradient of token t is rho A_t grad log pi_t alone. Without
  that stop, credit within a turn would cancel and the step would grow with the turn's length. The product needs a wide
  clip for long turns. `turn` counts within a row or a rollout, -1 off actions.
  Reconstruction of MPO: the paper's text was not available. Whether it is this or `turn_mean_clip` is unknown, and the
  clip's defaults are ours.
  """
  total = _turn_total(logp, logp_old, advantage, mask, segment, turn)
  logp, _, advantage = _kept(mask, logp, logp_old, advantage)
  return _clipped(_ratio(_through(total, logp)), advantage, low, high)


def turn_mean_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  turn: Int[Array, "B T"],
  *,
  low: float = 3e-4,
  high: float = 4e-4,
) -> Float[Array, "B T"]:
  """`turn_clip` with rho = exp(mean log ratio of the turn): GSPO at the scale of turns.

  Reconstruction of MPO, see `turn_clip`; the clip's defaults are GSPO's.
  """
  total = _turn_total(logp, logp_old, advantage, mask, segment, turn)
  count = segment_total(jnp.ones_like(total), mask, turn_ids(turn, segment))
  logp, _, advantage = _kept(mask, logp, logp_old, advantage)
  return _clipped(_ratio(_through(total / jnp.maximum(count, 1), logp)), advantage, low, high)


def cispo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  low: float = 0.2,
  high: float = 0.28,
) -> Float[Array, "B T"]:
  """-sg[clip(r, 1 - low, 1 + high)] A log pi: REINFORCE with a clipped weight; every token keeps a gradient.

  `high` is relative to 1, as in verl; `cispo_capped` takes the cap itself, as TRL does. The same number means different
  things to the two.
  Source: arXiv 2506.13585 (MiniMax-M1), which does not clip below.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  weight = jnp.clip(_ratio(logp - logp_old), 1 - low, 1 + high)
  return -jax.lax.stop_gradient(weight) * advantage * logp


def cispo_capped(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], advantage: Float[Array, "B T"], *, cap: float = 5.0
) -> Float[Array, "B T"]:
  """-sg[min(r, cap)] A log pi: `cispo` with an absolute cap and no lower bound.

  Source: Khatri et al. 2025, arXiv 2510.13786 (ScaleRL, cap 5). Ours differs: nothing.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  return -jax.lax.stop_gradient(jnp.minimum(_ratio(logp - logp_old), cap)) * advantage * logp


def sapo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  *,
  positive: float = 1.0,
  negative: float = 1.05,
) -> Float[Array, "B T"]:
  """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate instead of a clip; its slope in r is 1 at r = 1 and fades.

  tau is `positive` where A > 0, else `negative`.
  Source: arXiv 2511.20347 (SAPO). Ours differs: nothing.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  tau = jnp.where(advantage > 0, positive, negative)
  return -4.0 / tau * jax.nn.sigmoid(tau * (_ratio(logp - logp_old) - 1.0)) * advantage


def gmpo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  *,
  clip: float = 0.4,
) -> Float[Array, "B T"]:
  """-exp(mean of clipped log ratios over the row's kept tokens) A, each log ratio clipped on the side that A pushes to.

  min(l, clip) for A >= 0, max(l, -clip) for A < 0, before the mean: one outlier cannot move the sequence. The gradient
  of an unclipped token flows through its own log pi alone, as in `gspo`; a clipped one has none. Under `sequence_mean`
  and an advantage per sequence it is the paper's objective.
  Source: arXiv 2507.20673 (GMPO). Ours differs: nothing.
  """
  logp, logp_old, advantage = _kept(mask, logp, logp_old, advantage, segment=segment)
  l = logp - logp_old
  l = jnp.where(advantage >= 0, jnp.minimum(l, clip), jnp.maximum(l, -clip))
  return -_ratio(_through(_segment_mean(jnp.where(mask, l, 0.0), mask, segment), l)) * advantage


def vespo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segment: Int[Array, "B T"],
  *,
  positive: tuple[float, float] = (2.0, 3.0),
  negative: tuple[float, float] = (3.0, 2.0),
) -> Float[Array, "B T"]:
  """-sg[phi(W)] A log pi, phi(w) = e^lambda w^k e^(-lambda w), W = product of the row's kept ratios.

  (k, lambda) is `positive` where A >= 0, else `negative`. phi(1) = 1, and both tails fade.
  Source: arXiv 2602.10693 (VESPO). Ours differs: an importance weight of the sampler stays outside W, in `weight`.
  """
  logp, logp_old, advantage = _kept(mask, logp, logp_old, advantage, segment=segment)
  total = segment_total(logp - logp_old, mask, jnp.maximum(segment, 0))
  log_w = jnp.clip(total, jnp.log(1e-8), MAX_LOG_RATIO)
  up = advantage >= 0
  k, rate = jnp.where(up, positive[0], negative[0]), jnp.where(up, positive[1], negative[1])
  phi = jnp.exp(rate + k * log_w - rate * jnp.exp(log_w))
  return -jax.lax.stop_gradient(phi) * advantage * logp


def divergence_clip_tv(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], advantage: Float[Array, "B T"], *, threshold: float = 0.15
) -> Float[Array, "B T"]:
  """-r A, without gradient and value where |pi - pi_old| > threshold and the step would go further from pi_old.

  Further: A > 0 and r > 1, or A < 0 and r < 1. So rare tokens may move by large ratios, and likely tokens may not move
  by small ones. The paper measures against the sampler's policy: give `logp_rollout` as `logp_old` for that.
  Source: Qi et al. 2026, arXiv 2602.04879 (DPPO with the binary total variation). Ours differs: the threshold is ours,
  and r has no cap (verl's form has 20).
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  return _trusted(logp - logp_old, advantage, jnp.abs(jnp.exp(logp) - jnp.exp(logp_old)) > threshold)


def divergence_clip_kl(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], advantage: Float[Array, "B T"], *, threshold: float = 0.05
) -> Float[Array, "B T"]:
  """`divergence_clip_tv` with the Bernoulli KL(pi_old || pi) of the token in place of the total variation.

  Source: Qi et al. 2026, arXiv 2602.04879 (DPPO with the binary KL). The threshold is ours.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage)
  return _trusted(logp - logp_old, advantage, binary_kl(logp_old, logp) > threshold)


def mode_token_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, "B T"],
  forced: Bool[Array, "B T"],
  *,
  probability: float = 0.5,
  low: float = 0.2,
  high: float = 0.2,
) -> Float[Array, "B T"]:
  """`ppo_clip` with r = pi / probability at `forced` tokens: those drawn from a fixed coin instead of the policy.

  For the first token of an answer, THINK or NOTHINK with equal probability, so that both modes stay explored.
  Reconstruction of When2Think (arXiv 2609.19671), whose text was not available; the coin is AdaptThink's, arXiv
  2505.13417.
  """
  logp, logp_old, advantage = _agreeing(logp, logp_old, advantage, forced=forced)
  logp_drawn = jnp.where(jnp.asarray(forced), jnp.log(jnp.float32(probability)), logp_old)
  return _clipped(_ratio(logp - logp_drawn), advantage, low, high)


def _ratio(log_ratio):
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(ratio, advantage, low, high):
  return jnp.maximum(-ratio * advantage, -jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def _segment_mean(x, mask, segment):
  """Mean of x over the masked tokens of each segment, at every token of it."""
  width = x.shape[-1]

  def row(x, mask, ids):
    total = jax.ops.segment_sum(x, ids, width)
    count = jax.ops.segment_sum(mask.astype(x.dtype), ids, width)
    return (total / jnp.maximum(count, 1))[ids]

  return jax.vmap(row)(x, mask, jnp.maximum(segment, 0))


def _through(value, logp):
  """`value`, with the gradient of `logp`."""
  return jax.lax.stop_gradient(value) + (logp - jax.lax.stop_gradient(logp))


def _trusted(log_ratio, advantage, far):
  outward = jnp.where(advantage > 0, log_ratio > 0, log_ratio < 0)
  return jnp.where(jax.lax.stop_gradient(far & outward), 0.0, -_ratio(log_ratio) * advantage)


def _agreeing(logp, logp_old, advantage, **others):
  shapes = {k: (x, "*B") for k, x in dict(logp=logp, logp_old=logp_old, advantage=advantage, **others).items()}
  check_shapes(**shapes)
  return tuple(jnp.asarray(x, jnp.float32) for x in (logp, logp_old, advantage))


def _kept(mask, logp, logp_old, advantage, **ids):
  """The three float columns in float32, 0 off the mask."""
  shapes = dict(logp=logp, logp_old=logp_old, advantage=advantage, mask=mask, **ids)
  check_shapes(**{k: (x, "B T") for k, x in shapes.items()})
  return tuple(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) for x in (logp, logp_old, advantage))


def _turn_total(logp, logp_old, advantage, mask, segment, turn):
  logp, logp_old, _ = _kept(mask, logp, logp_old, advantage, segment=segment, turn=turn)
  return segment_total(logp - logp_old, mask, turn_ids(turn, segment))

