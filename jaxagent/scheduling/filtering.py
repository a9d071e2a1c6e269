"""Which groups are worth a gradient, after they were paid for."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_shapes

EQUAL = 1e-6  # relative spread below which the outcomes of a group are the same number


def mixed_groups(
  outcome: Float[Array, "N"], group: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Bool[Array, "N"]:
  """Rows whose group has different outcomes: 0 < successes < G for binary ones. Usable as a `keep`.

  `outcome` is the environment's, before any shaping: a length penalty would make every group look mixed. `group` holds
  ids in [0, N). `valid=False` rows decide nothing and are dropped.
  Source: Yu et al. 2025, arXiv 2503.14476 (DAPO's dynamic sampling). Ours differs: outcomes need not be binary.
  """
  outcome = jnp.asarray(outcome, jnp.float32)
  n = outcome.size
  valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid)
  check_shapes(outcome=(outcome, "N"), group=(group, "N"), valid=(valid, "N"))
  check_ids("group", group, n)
  group = jnp.asarray(group)
  high = jax.ops.segment_max(jnp.where(valid, outcome, -jnp.inf), group, n)[group]
  low = jax.ops.segment_min(jnp.where(valid, outcome, jnp.inf), group, n)[group]
  scale = jnp.maximum(1.0, jnp.maximum(jnp.abs(high), jnp.abs(low)))
  return valid & (high - low > EQUAL * scale)


def mixed_share(keep: Bool[Array, "N"], group: Int[Array, "N"], valid: Bool[Array, "N"]) -> Float[Array, ""]:
  """Share of the groups with a valid row that `mixed_groups` keeps; 0 where there is none."""
  check_shapes(keep=(keep, "N"), group=(group, "N"), valid=(valid, "N"))
  n = jnp.size(keep)
  check_ids("group", group, n)
  kept, present = (jax.ops.segment_max(jnp.asarray(x).astype(int), jnp.asarray(group), n) > 0 for x in (keep, valid))
  return jnp.sum(kept) / jnp.maximum(jnp.sum(present), 1)
