"""Where a team that shares information loses against one agent that has it all.

Facts are numbered 0..F-1; a set of facts is a row of booleans, and number s of the 2^F subsets has fact f iff bit f of
s is set. A PIU is a minimal sufficient set: the right decision follows from it, and from no set with one fact less.

Reconstruction: the paper (TeamGym, 2026) was not available; all definitions here are ours, from a short summary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxagent.checks import check_shapes

MAX_FACTS = 20


class Gaps(NamedTuple):
  """Accuracy lost on the way, in units of accuracy: `retrieval` + `communication` = `total`."""

  retrieval: Float[Array, "*M"]
  communication: Float[Array, "*M"]
  total: Float[Array, "*M"]


def fact_subsets(facts: int) -> Bool[Array, "S F"]:
  """All S = 2^F subsets, one a row, for an exact solver to decide on. ValueError beyond 20 facts."""
  if not 0 <= facts <= MAX_FACTS:
    raise ValueError(f"enumeration is for 0 to {MAX_FACTS} facts, got {facts}; give the solver the key facts only")
  return (jnp.arange(2**facts)[:, None] >> jnp.arange(facts)) & 1 == 1


def minimal_sets(correct: Bool[Array, "S"]) -> Bool[Array, "S"]:
  """Which subsets are PIUs: `correct[s]`, and not `correct` of s without f, for every fact f of s.

  `correct` is what an ideal solver decides on each row of `fact_subsets`. The rule looks one fact down, as the
  definition does: with a solver that more facts can mislead, a PIU may contain a smaller one.
  """
  correct = jnp.asarray(correct, bool)
  count = correct.size
  if correct.ndim != 1 or count & (count - 1) or not count:
    raise ValueError(f"correct must have one entry for each of the 2^F subsets, got shape {correct.shape}")
  s, bits = jnp.arange(count)[:, None], 1 << jnp.arange(count.bit_length() - 1)
  has = s & bits != 0
  return correct & ~jnp.any(has & correct[s & ~bits], axis=1)


def distributed(piu: Bool[Array, "K F"], packs: Bool[Array, "A F"]) -> Bool[Array, ""]:
  """No agent's pack contains a PIU (rows of `piu`), and the union of the packs contains one.

  `packs[a]` is all that agent a sees before any message, shared facts included.
  """
  check_shapes(piu=(piu, "K F"), packs=(packs, "A F"))
  piu, packs = jnp.asarray(piu), jnp.asarray(packs)
  alone = jnp.any(jnp.all(~piu[:, None] | packs[None], -1))
  return ~alone & jnp.any(jnp.all(~piu | jnp.any(packs, 0), -1))


def information_gaps(
  accuracy_piu: Float[Array, "*M"], accuracy_pool: Float[Array, "*M"], accuracy_team: Float[Array, "*M"]
) -> Gaps:
  """retrieval = piu - pool, communication = pool - team, total = piu - team.

  Accuracies of one model on the same instances: a single agent given one PIU, a single agent given all packs, the team.
  """
  check_shapes(
    accuracy_piu=(accuracy_piu, "*M"), accuracy_pool=(accuracy_pool, "*M"), accuracy_team=(accuracy_team, "*M")
  )
  piu, pool, team = (jnp.asarray(x, jnp.float32) for x in (accuracy_piu, accuracy_pool, accuracy_team))
  return Gaps(piu - pool, pool - team, piu - team)


def normalised_communication_gap(
  accuracy_pool: Float[Array, "*M"],
  accuracy_team: Float[Array, "*M"],
  accuracy_solo: Float[Array, "*M"],
  *,
  eps: float = 1e-6,
) -> Float[Array, "*M"]:
  """(pool - team) / max(pool - solo, eps): 0 if messages are as good as pooling, 1 if as good as none.

  `accuracy_solo` is the best single agent's, without messages. Meaningless where pooling does not help.
  """
  check_shapes(
    accuracy_pool=(accuracy_pool, "*M"), accuracy_team=(accuracy_team, "*M"), accuracy_solo=(accuracy_solo, "*M")
  )
  pool, team, solo = (jnp.asarray(x, jnp.float32) for x in (accuracy_pool, accuracy_team, accuracy_solo))
  return (pool - team) / jnp.maximum(pool - solo, eps)


def unsurfaced_share(piu: Bool[Array, "*M F"], surfaced: Bool[Array, "*M F"]) -> Float[Array, "*M"]:
  """Share of a PIU's facts that their holder did not bring up, not even in its own reasoning: the retrieval gap, read
  per fact. 0 for an empty PIU."""
  check_shapes(piu=(piu, "*M F"), surfaced=(surfaced, "*M F"))
  return _share(jnp.asarray(piu) & ~jnp.asarray(surfaced), piu)


def undelivered_share(
  piu: Bool[Array, "*M F"], surfaced: Bool[Array, "*M F"], delivered: Bool[Array, "*M F"]
) -> Float[Array, "*M"]:
  """Share of a PIU's facts that were brought up but are in no delivered message: the communication gap, read per
  fact. 0 for an empty PIU."""
  check_shapes(piu=(piu, "*M F"), surfaced=(surfaced, "*M F"), delivered=(delivered, "*M F"))
  return _share(jnp.asarray(piu) & jnp.asarray(surfaced) & ~jnp.asarray(delivered), piu)


def piu_recall(
  piu: Bool[Array, "*M F"], delivered: Bool[Array, "*M F"], decider_pack: Bool[Array, "*M F"]
) -> Float[Array, "*M"]:
  """Share of a PIU's facts that the decider has, by message or in its own pack; 1 for an empty PIU."""
  check_shapes(piu=(piu, "*M F"), delivered=(delivered, "*M F"), decider_pack=(decider_pack, "*M F"))
  return 1.0 - _share(jnp.asarray(piu) & ~(jnp.asarray(delivered) | jnp.asarray(decider_pack)), piu)


def message_waste(
  fact_tokens: Float[Array, "*M F"], piu: Bool[Array, "*M F"], tokens_sent: Float[Array, "*M"]
) -> Float[Array, "*M"]:
  """Tokens spent on facts outside the PIU over tokens sent; 0 where nothing was sent.

  Tokens on no fact at all are in `tokens_sent` only.
  """
  check_shapes(fact_tokens=(fact_tokens, "*M F"), piu=(piu, "*M F"), tokens_sent=(tokens_sent, "*M"))
  wasted = jnp.sum(jnp.where(jnp.asarray(piu), 0.0, jnp.asarray(fact_tokens, jnp.float32)), -1)
  return wasted / jnp.maximum(jnp.asarray(tokens_sent, jnp.float32), 1.0)


def piu_means(
  valid: Bool[Array, "N"],
  piu_recall: Float[Array, "N"] | None = None,
  piu_unsurfaced: Float[Array, "N"] | None = None,
  piu_undelivered: Float[Array, "N"] | None = None,
  message_waste: Float[Array, "N"] | None = None,
) -> dict[str, Float[Array, ""]]:
  """Means over the valid rows of those columns that the environment gives: `recall`, `unsurfaced`, `undelivered`,
  `waste`.
  """
  check_shapes(
    valid=(valid, "N"), piu_recall=(piu_recall, "N"), piu_unsurfaced=(piu_unsurfaced, "N"),
    piu_undelivered=(piu_undelivered, "N"), message_waste=(message_waste, "N"),
  )  # fmt: skip
  columns = {"recall": piu_recall, "unsurfaced": piu_unsurfaced, "undelivered": piu_undelivered, "waste": message_waste}
  valid = jnp.asarray(valid, bool)
  n = jnp.maximum(jnp.sum(valid), 1)
  return {k: jnp.sum(jnp.where(valid, x, 0.0)) / n for k, x in columns.items() if x is not None}


def _share(part: jax.Array, whole) -> Float[Array, "*M"]:
  return jnp.sum(part, -1) / jnp.maximum(jnp.sum(jnp.asarray(whole), -1), 1).astype(jnp.float32)
