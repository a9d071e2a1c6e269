"""Experience Funnel: which rollouts a state of text helped, which of their tokens, and learning them without the state.

Three rollouts of a task with one policy: without the state, with the previous state, with the updated one. What the
updated state gained is distilled into the policy that acts without it.

Source: arXiv 2609.08919. Reconstruction in part: only notes of the paper were available. The bits, the weights 1,
alpha and 0, the Jensen-Shannon divergence and the strict gate of the state are the paper's; the value of alpha, the
normalisation of the token weights, the denominator, the gate of the policy and the residual rule are ours.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxagent.checks import check_shapes

EQUAL = 1e-6  # relative difference below which two rewards are the same number


def benefit(reward: Float[Array, "N"], reward_free: Float[Array, "N"]) -> Bool[Array, "N"]:
  """reward > reward_free: the state helped. Strict: rewards within 1e-6 max(1, |reward|) are equal.

  With several rollouts of a task pass the means over the same seeds.
  """
  check_shapes(reward=(reward, "*N"), reward_free=(reward_free, "*N"))
  reward, reward_free = jnp.asarray(reward, jnp.float32), jnp.asarray(reward_free, jnp.float32)
  scale = jnp.maximum(1.0, jnp.maximum(jnp.abs(reward), jnp.abs(reward_free)))
  return reward - reward_free > EQUAL * scale


def selection_weight(
  reward_free: Float[Array, "N"],
  reward_previous: Float[Array, "N"],
  reward_updated: Float[Array, "N"],
  *,
  persistent: float = 0.5,
  valid: Bool[Array, "N"] | None = None,
) -> Float[Array, "N"]:
  """1 where only the updated state helps, `persistent` where both states help, 0 elsewhere.

  A task that the policy solves without a state, a regression and no effect all weigh 0. `valid` False (one of the
  three rollouts failed): 0, whatever the rewards.
  Source: arXiv 2609.08919, which does not give alpha: 0.5 is ours.
  """
  check_shapes(
    reward_free=(reward_free, "N"), reward_previous=(reward_previous, "N"), reward_updated=(reward_updated, "N"),
    valid=(valid, "N"),
  )  # fmt: skip
  before, after = benefit(reward_previous, reward_free), benefit(reward_updated, reward_free)
  weight = jnp.where(after, jnp.where(before, persistent, 1.0), 0.0)
  return weight if valid is None else jnp.where(jnp.asarray(valid), weight, 0.0)


def jensen_shannon(logits: Float[Array, "*B V"], other: Float[Array, "*B V"]) -> Float[Array, "*B"]:
  """KL(P || M) / 2 + KL(Q || M) / 2 with M = (P + Q) / 2, in nats, in [0, log 2]; exactly 0 for equal rows.

  Logits or log-probs over the whole vocabulary; -inf is probability 0. Map it over chunks of tokens: it holds several
  arrays of the input's size.
  """
  check_shapes(logits=(logits, "*B V"), other=(other, "*B V"))
  log_p, log_q = _log_softmax(logits), _log_softmax(other)
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  both = jnp.isfinite(log_p) | jnp.isfinite(log_q)
  d = jnp.clip(jnp.where(both, log_q - log_p, 0.0), -80.0, 80.0)
  terms = p * jnp.log1p(jnp.expm1(d) / 2) + q * jnp.log1p(jnp.expm1(-d) / 2)
  return jnp.clip(-0.5 * jnp.sum(terms, -1), 0.0, jnp.log(2.0))


def mean_one_attribution(
  divergence: Float[Array, "N T"], mask: Bool[Array, "N T"], *, eps: float = 1e-8
) -> Float[Array, "N T"]:
  """J_t / (mean J + eps) over the masked tokens of each row: weights of mean 1, 0 off the mask.

  `divergence` is `jensen_shannon` of the frozen policy with and without the state. A row of zeros (the state changed
  nothing) stays 0. No gradient flows.
  Source: arXiv 2609.08919; the mean and `eps` are ours.
  """
  j = _masked_divergence(divergence, mask)
  mean = jnp.sum(j, -1, keepdims=True) / jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  return j / jnp.where(mean > 0, mean + eps, 1.0)


def sum_one_attribution(
  divergence: Float[Array, "N T"], mask: Bool[Array, "N T"], *, eps: float = 1e-8
) -> Float[Array, "N T"]:
  """J_t / (sum J + eps) over the masked tokens of each row; see `mean_one_attribution`."""
  j = _masked_divergence(divergence, mask)
  total = jnp.sum(j, -1, keepdims=True)
  return j / jnp.where(total > 0, total + eps, 1.0)


def distillation_weights(
  selection: Float[Array, "N"], attribution: Float[Array, "N T"], mask: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
  """omega_i w_it / sum_i omega_i (masked tokens of i): token weights of the distillation loss, 0 off the mask.

  The loss is the plain sum of weight times divergence, however the batch is cut. A rollout whose attribution is 0
  everywhere leaves the denominator too; with nothing selected all weights are 0.
  """
  check_shapes(selection=(selection, "N"), attribution=(attribution, "N T"), mask=(mask, "N T"))
  mask = jnp.asarray(mask)
  attribution = jnp.where(mask, jnp.asarray(attribution, jnp.float32), 0.0)
  selection = jnp.where(jnp.any(attribution > 0, -1), jnp.asarray(selection, jnp.float32), 0.0)
  total = jnp.sum(selection * jnp.sum(mask, -1))
  return jax.lax.stop_gradient(selection[:, None] * attribution / jnp.where(total > 0, total, 1.0))


def student_kl(student: Float[Array, "*B V"], teacher: Float[Array, "*B V"]) -> Float[Array, "*B"]:
  """KL(student || teacher) in nats over the whole vocabulary; no gradient to the teacher.

  Logits or log-probs. `student` sees the history without the state, `teacher` (the frozen policy, or a larger model
  with the same vocabulary) sees it with the state. Ratios above e^80 count as e^80.
  """
  check_shapes(student=(student, "*B V"), teacher=(teacher, "*B V"))
  log_p, log_q = _log_softmax(student), jax.lax.stop_gradient(_log_softmax(teacher))
  live = jnp.isfinite(log_p)
  log_p = jnp.where(live, log_p, 0.0)
  gap = jnp.minimum(log_p - log_q, 80.0)
  return jnp.sum(jnp.where(live, jnp.exp(log_p) * gap, 0.0), -1)


def sampled_student_kl(
  logp: Float[Array, "*B"], logp_teacher: Float[Array, "*B"], *, limit: float = 10.0
) -> Float[Array, "*B"]:
  """u log u - u + 1 with u = pi(y) / pi_teacher(y), for tokens y that the teacher sampled: at least 0.

  Its mean is `student_kl`, and the mean of its gradient is that of `student_kl`. log u counts as at most `limit` nats:
  beyond it there is no gradient. No gradient to the teacher.
  Source: an importance-weighted form of the divergence of arXiv 2609.08919, which sums the vocabulary; `limit` is ours.
  """
  check_shapes(logp=(logp, "*B"), logp_teacher=(logp_teacher, "*B"))
  d = jnp.asarray(logp, jnp.float32) - jax.lax.stop_gradient(jnp.asarray(logp_teacher, jnp.float32))
  if not 0 < limit <= 80:
    raise ValueError(f"limit must lie in (0, 80] nats, got {limit}")
  d = jnp.clip(d, -80.0, limit)
  return jnp.exp(d) * d - jnp.expm1(d)


def sampled_jensen_shannon(logp: Float[Array, "*B"], logp_other: Float[Array, "*B"]) -> Float[Array, "*B"]:
  """[u log u - (1 + u) log((1 + u) / 2)] / 2 with u = q(y) / p(y), for tokens y drawn from p: at least 0, 0 for u = 1.

  Its mean is `jensen_shannon`; a single token may exceed log 2. `logp` is log p(y), `logp_other` log q(y), in nats.
  """
  check_shapes(logp=(logp, "*B"), logp_other=(logp_other, "*B"))
  d = jnp.clip(jnp.asarray(logp_other, jnp.float32) - jnp.asarray(logp, jnp.float32), -80.0, 80.0)
  return jnp.maximum(-0.5 * (jnp.log1p(jnp.expm1(d) / 2) + jnp.exp(d) * jnp.log1p(jnp.expm1(-d) / 2)), 0.0)


def distillation_loss(divergence: Float[Array, "N T"], weight: Float[Array, "N T"]) -> Float[Array, ""]:
  """sum_it weight_it divergence_it, with `student_kl` and `distillation_weights`; nothing flows where weight is 0."""
  check_shapes(divergence=(divergence, "*N"), weight=(weight, "*N"))
  weight = jnp.asarray(weight, jnp.float32)
  return jnp.sum(weight * jnp.where(weight != 0, jnp.asarray(divergence, jnp.float32), 0.0))


def accept_state(score: Float[Array, "*B"], score_before: Float[Array, "*B"]) -> Bool[Array, "*B"]:
  """score > score_before: an edited state must do better on the validation tasks, under the current policy."""
  check_shapes(score=(score, "*B"), score_before=(score_before, "*B"))
  return jnp.asarray(score) > jnp.asarray(score_before)


def accept_policy(score: Float[Array, "*B"], score_before: Float[Array, "*B"]) -> Bool[Array, "*B"]:
  """score >= score_before, both without a state: the update may not lose what the policy could do alone.

  Source: arXiv 2609.08919; whether the paper's gate is strict is unknown.
  """
  check_shapes(score=(score, "*B"), score_before=(score_before, "*B"))
  return jnp.asarray(score) >= jnp.asarray(score_before)


def residual_items(
  score_without: Float[Array, "K"], score: Float[Array, ""], *, tolerance: float = 0.0
) -> Bool[Array, "K"]:
  """Items of the state to keep: those without which the new policy scores below score - tolerance.

  `score_without[k]` is the validation score of the new policy with all items but k. A score that is NaN keeps its item.
  """
  return ~(jnp.asarray(score_without) >= jnp.asarray(score) - tolerance)


def _masked_divergence(divergence, mask):
  check_shapes(divergence=(divergence, "N T"), mask=(mask, "N T"))
  return jax.lax.stop_gradient(jnp.where(jnp.asarray(mask), jnp.asarray(divergence, jnp.float32), 0.0))


def _log_softmax(x):
  return jax.nn.log_softmax(jnp.asarray(x, jnp.float32), -1)
