"""Terms added to the surrogate per token, to be minimised; `[B, T]` in and out, log-probs in nats.

An estimator of a KL's value and an estimator of its gradient are different things; each docstring says which it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_range, check_shapes, concrete

MAX_LOG_RATIO = 20.0


def kl_k1(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """log pi - log pi_ref: unbiased for KL(pi || ref) in value, may be negative. Not a loss: its gradient has mean 0.

  Source: Schulman 2020, "Approximating KL divergence".
  """
  logp, logp_ref = _agreeing(logp=logp, logp_ref=logp_ref)
  return logp - logp_ref


def kl_k3(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """exp(d) - d - 1 with d = log pi_ref - log pi: unbiased for KL(pi || ref) in value, never negative.

  As a loss (GRPO's) its expected gradient is that of KL(ref || pi), not of KL(pi || ref): use `kl_reverse` for that.
  Source: Schulman 2020; Shao et al. 2024, arXiv 2402.03300.
  """
  logp, logp_ref = _agreeing(logp=logp, logp_ref=logp_ref)
  d = jnp.clip(logp_ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.expm1(d) - d


def kl_reverse(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], logp_ref: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """(pi / pi_old) k3: for tokens drawn from pi_old, unbiased for KL(pi || ref) of each token in value and in gradient.

  The gradient of a token is r (log pi - log pi_ref) grad log pi. It does not see the effect of a token on later states.
  Source: arXiv 2512.02556 (DeepSeek-V3.2). Ours differs: nothing.
  """
  logp, logp_old, logp_ref = _agreeing(logp=logp, logp_old=logp_old, logp_ref=logp_ref)
  return jnp.exp(jnp.clip(logp - logp_old, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * kl_k3(logp, logp_ref)


def entropy_bonus(entropy: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """-H, with the exact gradient of the entropy over the whole vocabulary; a positive coefficient raises the entropy."""
  return -entropy


def kl_k2(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """(log pi - log pi_ref)^2 / 2: as a loss, for tokens of the current policy, its gradient is that of KL(pi || ref).

  Its value is biased: it is a loss, not a measurement. On stale samples use `kl_reverse`.
  Source: Schulman 2020, "Approximating KL divergence".
  """
  logp, logp_ref = _agreeing(logp=logp, logp_ref=logp_ref)
  return 0.5 * jnp.square(jnp.clip(logp - logp_ref, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_k3_straight(logp: Float[Array, "B T"], logp_ref: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """The value of `kl_k3` with the gradient of `kl_k2`: for tokens of the current policy both are KL(pi || ref)'s.

  Source: verl's "k3+". Ours differs: nothing.
  """
  logp, logp_ref = _agreeing(logp=logp, logp_ref=logp_ref)
  k2 = kl_k2(logp, logp_ref)
  return jax.lax.stop_gradient(kl_k3(logp, logp_ref)) + (k2 - jax.lax.stop_gradient(k2))


def kl_k1_weighted(
  logp: Float[Array, "B T"], logp_old: Float[Array, "B T"], logp_ref: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """(pi / pi_old) (log pi - log pi_ref): for tokens drawn from pi_old, unbiased for KL(pi || ref) and its gradient.

  Like `kl_reverse`, of larger variance where pi is near the reference: there it may be negative.
  """
  logp, logp_old, logp_ref = _agreeing(logp=logp, logp_old=logp_old, logp_ref=logp_ref)
  return jnp.exp(jnp.clip(logp - logp_old, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * kl_k1(logp, logp_ref)


def binary_kl(logp: Float[Array, "*B T"], logp_other: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  """p log(p / q) + (1 - p) log((1 - p) / (1 - q)): the divergence of "this token or another", at most the full one.

  Probabilities are clamped to [1e-7, 1 - 1e-7].
  """
  logp, logp_other = _agreeing(logp=logp, logp_other=logp_other)
  p, q = (jnp.clip(jnp.exp(x), 1e-7, 1 - 1e-7) for x in (logp, logp_other))
  return p * jnp.log(p / q) + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q))


def top_entropy(entropy: Float[Array, "N T"], keep: Bool[Array, "N T"], *, share: float = 0.2) -> Bool[Array, "N T"]:
  """The `share` of the kept tokens of the batch with the largest entropy, at least one of them; ties all pass.

  As a `weight` only the surrogate is narrowed and denominators count all tokens, as in the paper; as a `keep` the
  others leave denominators and terms too. `entropy` in nats; a ValueError names a kept token without one.
  Source: Wang et al. 2025, arXiv 2506.01939 (the 80/20 rule). Ours differs: an exact rank, no interpolated quantile.
  """
  check_shapes(entropy=(entropy, "N T"), keep=(keep, "N T"))
  check_range("share", share, 0.0, 1.0)
  if concrete(entropy, keep) and np.isnan(np.asarray(entropy, np.float32))[np.asarray(keep)].any():
    raise ValueError("entropy is NaN at a kept token: the sampler did not record it; ask the engine for entropies")
  keep = jnp.asarray(keep)
  entropy = jnp.where(keep, jnp.asarray(entropy, jnp.float32), -jnp.inf)
  count = jnp.maximum(jnp.ceil(share * jnp.sum(keep) - 1e-4).astype(int), 1)
  threshold = jnp.sort(entropy.reshape(-1), descending=True)[count - 1]
  return keep & (entropy >= threshold)


def positive_token_weight(
  outcome: Float[Array, "N"], keep: Bool[Array, "N T"], aggregate: Float[Array, "N T"], *, threshold: float = 1.0
) -> Float[Array, "N T"]:
  """1 / (kept tokens of correct rollouts) / aggregate, 0 elsewhere: turns `positive_nll` into a mean of its own.

  Correct: `outcome` (before shaping) of at least `threshold`. One of an objective's `columns`: of the whole update, so
  the mean is the same however the update is cut. With no correct rollout it is 0.
  Source: arXiv 2504.05118 (VAPO). Ours differs: tokens whose `aggregate` is 0 are left out.
  """
  check_shapes(outcome=(outcome, "N"), keep=(keep, "N T"), aggregate=(aggregate, "N T"))
  positive = jnp.asarray(keep) & (jnp.asarray(outcome) >= threshold)[:, None] & (jnp.asarray(aggregate) > 0)
  count = jnp.maximum(jnp.sum(positive), 1)
  return jnp.where(positive, 1.0 / (jnp.where(positive, aggregate, 1.0) * count), 0.0)


def positive_nll(logp: Float[Array, "B T"], positive_weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """-positive_weight log pi: imitation of the rollouts that succeeded, beside the policy gradient.

  `positive_weight` is a column: `positive_token_weight` for the mean over correct rollouts alone (the paper's, with
  coefficient 0.1), or 1 on their tokens for a part of the objective's own mean.
  Source: arXiv 2504.05118 (VAPO). Ours differs: nothing.
  """
  logp, weight = _agreeing(logp=logp, positive_weight=positive_weight)
  return -jax.lax.stop_gradient(weight) * logp


def load_balance(
  router_probs: Float[Array, "B T L E"], experts: Int[Array, "B T L K"], segment: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """E sum_e f_e P_e of the sequence that the token stands in, averaged over layers, at each of its tokens.

  f_e is the share of expert e in the sequence's choices, without a gradient, P_e its mean probability, both over all
  tokens of the rollout's row, context included: 1 if experts are used evenly, up to E / K if K serve all. A sequence is
  never split, so the term is the same however an update is cut and packed; a product of two means over a batch, the
  balance of Switch, is not (`batch_load_balance`). Under `sequence_mean` weights it is the mean over sequences.

  As a term it reads what a mixture reports: `router_probs`, the live softmax over all experts, and the `experts` that
  processed each token, replayed ones included.
  Source: DeepSeek-AI 2024, arXiv 2412.19437 (DeepSeek-V3's sequence-wise loss, with coefficient 1e-4). Ours differs:
  softmax probabilities, and the mean over layers where the source adds them.
  """
  sizes = check_shapes(router_probs=(router_probs, "B T L E"), experts=(experts, "B T L K"), segment=(segment, "B T"))
  width, layers, count = (sizes[k] for k in ("T", "L", "E"))
  router_probs, experts = jnp.asarray(router_probs, jnp.float32), jnp.asarray(experts).astype(jnp.int32)

  def of_row(p, chosen, segment):
    place = jnp.where(segment >= 0, segment, width)  # padding: dropped
    tokens = jnp.maximum(jnp.zeros(width).at[place].add(1.0, mode="drop"), 1.0)
    mean = jnp.zeros((width, layers, count)).at[place].add(p, mode="drop") / tokens[:, None, None]
    layer = jnp.arange(layers)[:, None]
    total = jnp.zeros((width, layers, count)).at[place[:, None, None], layer, chosen].add(1.0, mode="drop")
    share = total / (tokens * chosen.shape[-1])[:, None, None]
    balance = count / layers * jnp.einsum("sle,sle->s", share, mean)
    return jnp.where(segment >= 0, balance[segment], 0.0)

  return jax.vmap(of_row)(router_probs, experts, jnp.asarray(segment))


def expert_fractions(
  routing: Int[Array, "N T L K"], mask: Bool[Array, "N T"], *, experts: int
) -> Float[Array, "L E"]:
  """Share of each expert in the choices of the masked tokens, per layer; rows sum to 1, or are 0 without a choice.

  Counted once on all tokens of an update, so that `batch_load_balance` adds up over microbatches. Choices of -1 are
  skipped.
  """
  check_shapes(routing=(routing, "N T L K"), mask=(mask, "N T"))
  routing = jnp.asarray(routing).astype(jnp.int32)
  layers = routing.shape[2]
  chosen = jnp.where(jnp.asarray(mask)[..., None, None] & (routing >= 0), routing, experts)
  place = chosen + jnp.arange(layers)[:, None] * (experts + 1)
  counts = jnp.bincount(place.reshape(-1), length=layers * (experts + 1)).reshape(layers, -1)[:, :experts]
  return counts / jnp.maximum(jnp.sum(counts, 1, keepdims=True), 1).astype(jnp.float32)


def batch_load_balance(
  router_probs: Float[Array, "B T L E"], fractions: Float[Array, "L E"]
) -> Float[Array, "B T"]:
  """E sum_e f_e p_e, averaged over layers: 1 if experts are used evenly, up to E if one serves all.

  For a loop of your own, which counts the choices of a whole update first; `load_balance` is the one that fits a slot.
  `router_probs` are the live softmax over all experts (aux of the model), f `expert_fractions` of the whole update,
  without a gradient. Under `token_mean` weights the sum is the usual loss E sum_e f_e P_e.
  Source: Fedus et al. 2021, arXiv 2101.03961. Ours differs: f is of the update, not of a microbatch.
  """
  check_shapes(router_probs=(router_probs, "B T L E"), fractions=(fractions, "L E"))
  router_probs = jnp.asarray(router_probs, jnp.float32)
  fractions = jax.lax.stop_gradient(jnp.asarray(fractions, jnp.float32))
  layers, experts = fractions.shape
  return experts / layers * jnp.einsum("btle,le->bt", router_probs, fractions)


def _agreeing(**arrays):
  check_shapes(**{name: (x, "*B") for name, x in arrays.items()})
  return tuple(jnp.asarray(x, jnp.float32) for x in arrays.values())
