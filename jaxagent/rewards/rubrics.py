"""Rewards from a judge's verdicts on the criteria of a rubric, blind to the outcome.

`verdict [N, C]` is 1 (passed), -1 (failed) or 0 (does not apply, or not a criterion of the row's task); the rows of a
group share their criteria. A verdict that failed to parse is no 0: its rollout is not valid.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxagent.checks import check_ids, check_range, check_shapes


def unanimous(verdicts: Int[Array, "K N C"]) -> Int[Array, "N C"]:
  """The lowest of K verdicts: passed only if all K passed. For a policy that judges itself.

  Source: Gandhi et al. 2026, arXiv 2609.04094 (DRACO), K = 3. That failed outranks "does not apply" is our reading.
  """
  check_shapes(verdicts=(verdicts, "K N C"))
  return jnp.min(jnp.asarray(verdicts), axis=0)


def discriminative(
  verdict: Int[Array, "N C"], group: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Bool[Array, "N C"]:
  """Whether some rollout of the group failed the criterion: the others tell nothing apart and are dropped.

  Source: Gandhi et al. 2026, arXiv 2609.04094 (DRACO).
  """
  n = _checked(verdict, group, valid)
  failed = jnp.asarray(verdict) < 0
  failed = failed if valid is None else failed & jnp.asarray(valid)[:, None]
  return jax.ops.segment_sum(failed.astype(jnp.int32), jnp.asarray(group), n)[group] > 0


def rubric_reward(
  verdict: Int[Array, "N C"], group: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Float[Array, "N"]:
  """R = (p - f) / (p + f) over the criteria that someone in the group failed; 0 if none applies. In [-1, 1].

  Source: Gandhi et al. 2026, arXiv 2609.04094 (DRACO), equation 3. Ours differs: nothing.
  """
  keep = discriminative(verdict, group, valid=valid)
  passed, failed = (jnp.sum(keep & (jnp.asarray(verdict) == v), axis=1) for v in (1, -1))
  return (passed - failed) / jnp.maximum(passed + failed, 1).astype(jnp.float32)


def step_quality(
  verdict: Int[Array, "N C"],
  citation: Bool[Array, "N C S"],
  group: Int[Array, "N"],
  *,
  valid: Bool[Array, "N"] | None = None,
) -> Float[Array, "N S"]:
  """Q_s = p_s / (p_s + f_s) over the kept criteria that cite turn s; NaN for a turn that none cites.

  The column `step_quality` of `redistribute_by_quality`, which gives uncited turns the mean of the cited ones.
  Source: Gandhi et al. 2026, arXiv 2609.04094 (DRACO). Ours differs: nothing.
  """
  check_shapes(verdict=(verdict, "N C"), citation=(citation, "N C S"))
  verdict = jnp.where(discriminative(verdict, group, valid=valid), jnp.asarray(verdict), 0)
  cites = jnp.asarray(citation, bool)
  passed, failed = (jnp.sum(cites & (verdict == v)[:, :, None], axis=1) for v in (1, -1))
  cited = passed + failed
  return jnp.where(cited > 0, passed / jnp.maximum(cited, 1), jnp.nan)


def _checked(verdict, group, valid):
  n = check_shapes(verdict=(verdict, "N C"), group=(group, "N"), valid=(valid, "N"))["N"]
  check_ids("group", group, n)
  check_range("verdict", verdict, -1, 1, where=valid)
  return n
