"""Token weights `[N, T]`: the loss is the plain sum of weight times per-token loss, however the batch is cut.

`keep [N, T]` marks the tokens that one optimizer update trains on. `rollout [N]` (ids in [0, N)) says which rows are
one logical rollout: it counts once, and only if it has a kept token. A batch without kept tokens has weights 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes
from jaxagent.losses.segments import segment_total, turn_ids


def token_mean(keep: Bool[Array, "N T"]) -> Float[Array, "N T"]:
  """1 / (kept tokens of the update): every token counts the same, long rollouts count more.

  Source: Yu et al. 2025, arXiv 2503.14476 (DAPO).
  """
  return _over(keep, jnp.sum(keep))


def sequence_mean(keep: Bool[Array, "N T"], rollout: Int[Array, "N"]) -> Float[Array, "N T"]:
  """1 / (rollouts x kept tokens of the rollout): the mean over rollouts of the mean over tokens.

  Source: Shao et al. 2024, arXiv 2402.03300 (GRPO). Ours differs: fully masked rollouts are not counted (as in verl,
  not TRL).
  """
  tokens = _tokens(keep, rollout)
  return _over(keep, jnp.sum(tokens > 0) * jnp.maximum(tokens, 1)[rollout][:, None].astype(jnp.float32))


def sequence_sum(keep: Bool[Array, "N T"], rollout: Int[Array, "N"]) -> Float[Array, "N T"]:
  """1 / rollouts: the mean over rollouts of the sum over tokens, the policy gradient of whole sequences.

  With `gspo`, whose loss stands at each token of the sequence, it is LUSPO, arXiv 2602.05261: a sequence's loss times
  its length (clip 2e-3 and 2.5e-3).
  """
  return _over(keep, jnp.sum(_tokens(keep, rollout) > 0))


def constant(keep: Bool[Array, "N T"], rollout: Int[Array, "N"], *, max_tokens: int) -> Float[Array, "N T"]:
  """1 / (rollouts x max_tokens), whatever the rollouts' lengths; bind `max_tokens` with functools.partial.

  Source: Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO).
  """
  if not max_tokens > 0:
    raise ValueError(f"max_tokens must be positive, got {max_tokens}")
  return sequence_sum(keep, rollout) / max_tokens


def turn_mean(keep: Bool[Array, "N T"], turn: Int[Array, "N T"]) -> Float[Array, "N T"]:
  """1 / (turns x kept tokens of the turn): the mean over the batch's turns of the mean over tokens.

  Turns are those of a row (`turn`); only those with a kept token count.
  """
  check_shapes(keep=(keep, "N T"), turn=(turn, "N T"))
  keep, ids = jnp.asarray(keep), turn_ids(turn)
  tokens = segment_total(jnp.ones(keep.shape, jnp.float32), keep, ids)
  share = jnp.where(keep, 1.0 / jnp.maximum(tokens, 1), 0.0)  # adds up to 1 in each turn
  return share / jnp.maximum(jnp.round(jnp.sum(share)), 1)


def agent_mean(
  keep: Bool[Array, "N T"], rollout: Int[Array, "N"], agent: Int[Array, "N"]
) -> Float[Array, "N T"]:
  """1 / (rollouts x agents of the rollout x kept tokens of the agent): an agent weighs the same however much it says.

  `token_mean` is the other weighting of a team: there a talkative agent weighs more. An agent of a rollout without a
  kept token does not count. With one agent it is `sequence_mean`.
  Reconstruction of TeamGym: the paper was not available.
  """
  check_shapes(keep=(keep, "N T"), rollout=(rollout, "N"), agent=(agent, "N"))
  check_ids("rollout", rollout, len(keep))
  keep, rollout, agent = jnp.asarray(keep), jnp.asarray(rollout), jnp.asarray(agent)
  n = keep.shape[0]
  same = (rollout[:, None] == rollout) & (agent[:, None] == agent)
  tokens = same @ jnp.sum(keep, 1).astype(jnp.float32)  # of the row's agent
  first = (jnp.argmax(same, axis=1) == jnp.arange(n)) & (tokens > 0)
  agents = jax.ops.segment_sum(first.astype(jnp.float32), rollout, n)
  return _over(keep, (jnp.sum(agents > 0) * agents[rollout] * tokens)[:, None])


def _tokens(keep, rollout):
  """Kept tokens of each logical rollout, by id."""
  check_shapes(keep=(keep, "N T"), rollout=(rollout, "N"))
  check_ids("rollout", rollout, len(keep))
  return jax.ops.segment_sum(jnp.sum(keep, axis=1), rollout, keep.shape[0])


def _over(keep, denominator):
  return keep / jnp.maximum(denominator, 1).astype(jnp.float32)
