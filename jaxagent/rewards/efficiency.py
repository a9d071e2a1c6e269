"""Rewards that make length and tool calls cost something.

All but the first are gated on correctness: no cost is subtracted from a failure. Correct means outcome 1. Group
anchors are the minima over the correct rollouts of the group; rows with `valid=False` enter none and get 0. Lengths in
tokens; results `[N]`, float32. What a column says of a rollout (its tool cost, its reference) stands at each of its
rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.advantages.group import first_rows
from jaxagent.advantages.segments import over_rollouts
from jaxagent.checks import check_ids, check_range, check_shapes


def soft_overlong(
  reward: Float[Array, "N"],
  length: Int[Array, "N"],
  *,
  rollout: Int[Array, "N"] | None = None,
  limit: int = 20480,
  margin: int = 4096,
) -> Float[Array, "N"]:
  """reward + clip((limit - margin - length) / margin, -1, 0).

  Free up to limit - margin, then linear down to -1 at limit and beyond.
  `length` in tokens. The rows of one logical rollout (`rollout`, ids in [0, N)) share the penalty of its longest row.
  Source: Yu et al. 2025, arXiv 2503.14476 (DAPO). Ours differs: the paper counts the response, this counts what it is
  given (in a Method: the whole row, prompt and tool results included).
  """
  if not 0 < margin <= limit:
    raise ValueError(f"soft_overlong needs 0 < margin <= limit, got margin {margin} and limit {limit}")
  n = check_shapes(reward=(reward, "N"), length=(length, "N"), rollout=(rollout, "N"))["N"]
  check_ids("rollout", rollout, n)
  if rollout is not None:
    length = jax.ops.segment_max(length, rollout, length.shape[0])[rollout]
  return reward + jnp.clip((limit - margin - length) / margin, -1.0, 0.0)


def generated_tokens(mask: Bool[Array, "N T"], *, rollout: Int[Array, "N"] | None = None) -> Float[Array, "N"]:
  """Tokens that the policy wrote, over all rows of the logical rollout."""
  check_shapes(mask=(mask, "N T"), rollout=(rollout, "N"))
  return over_rollouts(jnp.sum(jnp.asarray(mask), axis=1).astype(jnp.float32), rollout)


def is_correct(outcome: Float[Array, "N"]) -> Bool[Array, "N"]:
  return jnp.asarray(outcome) >= 1 - 1e-6


def reference_bonus(
  outcome: Float[Array, "N"],
  generated: Float[Array, "N"],
  reference_accuracy: Float[Array, "N"],
  reference_tokens: Float[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  beta: float = 0.5,
) -> Float[Array, "N"]:
  """1[correct] (1 + beta alpha clip(1 - L / tau, 0, 1)).

  alpha is the accuracy of a reference policy on the task and tau its mean length. Short answers pay where the task is
  easy; thinking costs nothing where it is hard (alpha = 0) or where tau is unknown (0).
  Source: Shim et al. 2026, arXiv 2609.19671 (When2Think: IDAC). Reconstruction: the equation was not available.
  """
  check_shapes(
    outcome=(outcome, "N"), generated=(generated, "N"), reference_accuracy=(reference_accuracy, "N"),
    reference_tokens=(reference_tokens, "N"), valid=(valid, "N"),
  )  # fmt: skip
  check_range("reference_accuracy", reference_accuracy, 0, 1, where=valid)
  tau = jnp.asarray(reference_tokens, jnp.float32)
  saved = jnp.where(tau > 0, jnp.clip(1 - jnp.asarray(generated) / jnp.where(tau > 0, tau, 1.0), 0.0, 1.0), 0.0)
  paid = is_correct(outcome) if valid is None else is_correct(outcome) & jnp.asarray(valid)
  return jnp.where(paid, 1 + beta * jnp.asarray(reference_accuracy, jnp.float32) * saved, 0.0)


def difficulty_bonus(
  outcome: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  reference_accuracy: Float[Array, "N"],
  reference_tokens: Float[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  truncated: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  beta: float = 0.5,
) -> Float[Array, "N"]:
  """`reference_bonus` of the tokens that the policy wrote, thinking and answer; a truncated rollout is not correct.

  `reference_accuracy` and `reference_tokens` are sampled once per task from a reference policy (16 samples, say).
  """
  check_shapes(mask=(mask, "N T"), outcome=(outcome, "N"), truncated=(truncated, "N"), rollout=(rollout, "N"))
  outcome = jnp.asarray(outcome) if truncated is None else jnp.where(jnp.asarray(truncated), 0.0, outcome)
  length = generated_tokens(mask, rollout=rollout)
  return reference_bonus(outcome, length, reference_accuracy, reference_tokens, valid=valid, beta=beta)


def behaviour_of_modes(
  logp: Float[Array, "N T"], mask: Bool[Array, "N T"], *, probability: float = 0.5
) -> Float[Array, "N T"]:
  """`logp` with log(probability) at each row's first action token, drawn from THINK and NOTHINK with fixed odds.

  As the denominator of the ratio it makes the first token's weight pi / probability, so both modes keep being tried.
  Source: Shim et al. 2026, arXiv 2609.19671 (When2Think). Reconstruction: the even odds are AdaptThink's, arXiv
  2505.13417.
  """
  check_shapes(mask=(mask, "N T"), logp=(logp, "N T"))
  if not 0 < probability <= 1:
    raise ValueError(f"probability must lie in (0, 1], got {probability}")
  mask = jnp.asarray(mask, bool)
  return jnp.where(mask & (jnp.cumsum(mask, axis=1) == 1), jnp.log(jnp.float32(probability)), logp)


def tool_cost(calls: Float[Array, "N K"], weight: Float[Array, "K"] | None = None) -> Float[Array, "N"]:
  """C = sum_k w_k calls_k over the K types of tool; weights are 1 by default."""
  check_shapes(calls=(calls, "N K"), weight=(weight, "K"))
  calls = jnp.asarray(calls, jnp.float32)
  return jnp.sum(calls if weight is None else calls * jnp.asarray(weight), axis=1)


def efficiency_gate(cost: Float[Array, "N"], least: Float[Array, "N"], *, eps: float) -> Float[Array, "N"]:
  """2 sigmoid(-(cost - least) / (least + eps)): 1 at the least cost, 0.7551 at 1.5 times that. In (0, 1]."""
  check_shapes(cost=(cost, "*N"), least=(least, "*N"))
  return 2 * jax.nn.sigmoid(-(jnp.asarray(cost, jnp.float32) - least) / (least + eps))


def least_of_group(
  cost: Float[Array, "N"], correct: Bool[Array, "N"], group: Int[Array, "N"]
) -> Float[Array, "N"]:
  """The least cost among the group's correct rollouts, at each row; inf if there is none."""
  n = check_shapes(cost=(cost, "N"), correct=(correct, "N"), group=(group, "N"))["N"]
  check_ids("group", group, n)
  cost = jnp.where(jnp.asarray(correct), jnp.asarray(cost, jnp.float32), jnp.inf)
  return jax.ops.segment_min(cost, jnp.asarray(group), n)[group]


def gated_efficiency(
  outcome: Float[Array, "N"],
  tool_cost: Float[Array, "N"],
  mask: Bool[Array, "N T"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  tool_eps: float = 1.0,
  length_eps: float = 1e-6,
) -> Float[Array, "N"]:
  """R = 1[correct] gate(tool cost) gate(tokens written), each against the least of the group's correct rollouts.

  1 only for a correct rollout that is least in both; a wrong one gets 0, however short. The eps keep the gate soft
  where the least is 0.
  Source: Xie et al. 2026, arXiv 2606.07074 (SlimSearcher), from notes of the paper. The eps are ours, and that the
  length counts only what the policy wrote.
  """
  check_shapes(mask=(mask, "N T"), rollout=(rollout, "N"))
  correct = _correct(outcome, tool_cost, group, valid)
  return _gates(correct, tool_cost, generated_tokens(mask, rollout=rollout), group, tool_eps, length_eps)


def most_efficient(
  outcome: Float[Array, "N"],
  tool_cost: Float[Array, "N"],
  generated: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  tool_eps: float = 1.0,
  length_eps: float = 1e-6,
) -> Bool[Array, "N"]:
  """Of each group the correct trajectory with the largest product of gates (the first of several): the SFT filter.

  No other correct one of the group has both less cost and fewer tokens. Groups without a correct one keep none.
  Source: Xie et al. 2026, arXiv 2606.07074 (SlimSearcher).
  """
  check_shapes(outcome=(outcome, "N"), generated=(generated, "N"))
  correct = _correct(outcome, tool_cost, group, None)
  score = jnp.where(correct, _gates(correct, tool_cost, generated, group, tool_eps, length_eps), -1.0)
  n, row = score.shape[0], jnp.arange(score.shape[0])
  best = correct & (score == jax.ops.segment_max(score, group, n)[group])
  return best & (row == jax.ops.segment_min(jnp.where(best, row, n), group, n)[group])


def least_tool_calls(
  outcome: Float[Array, "N"],
  tool_cost: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  alpha: float = 1.0,
  smooth: float = 1.0,
) -> Float[Array, "N"]:
  """R = alpha r_tool 1[correct] with m calls and n the least among the group's correct ones.

  r_tool = sin(pi f / 2n) with f = 2nm / (m + n), which is 1 at m = n; for n = 0 it is cos(pi m / (2m + smooth)).
  Source: Wang et al. 2025, arXiv 2504.14870 (OTC-GRPO); the sine and the case n = 0 from memory, alpha and smooth ours.
  """
  correct = _correct(outcome, tool_cost, group, valid)
  m = jnp.asarray(tool_cost, jnp.float32)
  n = least_of_group(m, correct, group)
  n = jnp.where(jnp.isfinite(n), n, 0.0)
  mapped = 2 * m / jnp.maximum(m + n, 1e-6)  # f / n
  ratio = jnp.where(n > 0, jnp.sin(jnp.pi / 2 * mapped), few_tool_calls(m, smooth=smooth))
  return jnp.where(correct, alpha * ratio, 0.0)


def few_tool_calls(tool_cost: Float[Array, "N"], *, smooth: float = 1.0) -> Float[Array, "N"]:
  """cos(pi m / (2m + smooth)): 1 without a call, towards 0 with many. OTC's factor without a group (PPO).

  Source: Wang et al. 2025, arXiv 2504.14870.
  """
  m = jnp.asarray(tool_cost, jnp.float32)
  return jnp.cos(jnp.pi * m / (2 * m + smooth))


def solved_tasks_pay_for_tools(
  reward: Float[Array, "N"],
  outcome: Float[Array, "N"],
  tool_cost: Float[Array, "N"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
  rollout: Int[Array, "N"] | None = None,
  beta: float = 0.5,
) -> Float[Array, "N"]:
  """R [d + (1 - d) exp(-beta (c - c_min))], d = 1 - (successes of the group) / (its rollouts).

  On an easy task extra calls cost nearly everything, on a hard one nearly nothing. c_min over the group's correct
  rollouts; without one, or below it, the factor is 1.
  Source: arXiv 2606.02132 (EAPO), from notes; it samples 16 rollouts, at least 2 of them without tools.
  """
  check_shapes(reward=(reward, "N"), outcome=(outcome, "N"), rollout=(rollout, "N"))
  correct = _correct(outcome, tool_cost, group, valid)
  n = correct.shape[0]
  check_ids("rollout", rollout, n)
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
  counted = first_rows(jnp.arange(n) if rollout is None else jnp.asarray(rollout), valid)
  size, won = (jax.ops.segment_sum((counted & x).astype(jnp.float32), group, n)[group] for x in (counted, correct))
  easy = won / jnp.maximum(size, 1.0)
  cost = jnp.asarray(tool_cost, jnp.float32)
  least = least_of_group(cost, correct, group)
  extra = jnp.where(jnp.isfinite(least), jnp.maximum(cost - jnp.where(jnp.isfinite(least), least, 0.0), 0.0), 0.0)
  return jnp.where(valid, jnp.asarray(reward, jnp.float32) * (1 - easy + easy * jnp.exp(-beta * extra)), 0.0)


def _correct(outcome, cost, group, valid):
  n = check_shapes(outcome=(outcome, "N"), tool_cost=(cost, "N"), group=(group, "N"), valid=(valid, "N"))["N"]
  check_ids("group", group, n)
  return is_correct(outcome) if valid is None else is_correct(outcome) & jnp.asarray(valid)


def _gates(correct, cost, length, group, tool_eps, length_eps):
  factor = jnp.ones(correct.shape)
  for x, eps in ((cost, tool_eps), (length, length_eps)):
    least = least_of_group(x, correct, group)
    factor *= efficiency_gate(x, jnp.where(jnp.isfinite(least), least, 1.0), eps=eps)
  return jnp.where(correct, factor, 0.0)
