"""Every surrogate, correction and token weight: the same update however its rollouts are packed and cut."""

import dataclasses
import functools

import jax
import numpy as np
import tiny
from numpy.testing import assert_allclose
from thinned import thinned

from jaxagent import losses
from jaxagent.methods import grpo, plain, prepare
from jaxagent.rollout.packing import pack, unpack
from jaxagent.scheduling import mixed_groups
from jaxagent.training.loss import loss
from jaxagent.training.scoring import score

POLICY = tiny.tiny_policy()
PARAMS = POLICY.init(jax.random.key(0))
WIDE = functools.partial(losses.geometric_importance_within, high=1.2)
COMBINATIONS = [  # surrogate, aggregate, weights, keeps
  (losses.dual_clip, losses.turn_mean, (losses.turn_truncated_importance,), ()),
  (losses.two_sided_clip, losses.agent_mean, (losses.sequence_truncated_importance,), (mixed_groups,)),
  (losses.turn_clip, losses.turn_mean, (), (losses.turn_importance_within,)),
  (losses.turn_mean_clip, losses.token_mean, (losses.normalised_truncated_importance,), (losses.not_vetoed,)),
  (losses.cispo, losses.token_mean, (losses.top_entropy,), (WIDE,)),
  (losses.cispo_capped, losses.sequence_mean, (losses.geometric_truncated_importance,), ()),
  (losses.sapo, losses.sequence_mean, (), (losses.binary_kl_within,)),
  (losses.gmpo, losses.sequence_mean, (losses.normalised_sequence_importance,), ()),
  (losses.vespo, losses.sequence_sum, (), (losses.off_policy_within,)),
  (losses.divergence_clip_tv, losses.token_mean, (), (losses.sequence_importance_within,)),
  (losses.divergence_clip_kl, losses.token_mean, (), (losses.top_entropy,)),
]


@functools.cache
def nearly_on_policy():
  """Log-probs of the old policy and of the sampler near those of the parameters; entropies on the actions alone."""
  rollouts, rng = tiny.ragged(ref=True), np.random.default_rng(0)
  tokens, plan = pack(plain(rollouts), row_tokens=24, rows=16, microbatches=1)
  scored = score(POLICY, PARAMS, jax.tree.map(lambda x: x[0], tokens), chunk=64)
  logp, action = unpack(np.asarray(scored.logp)[None], plan), rollouts.mask & rollouts.valid[:, None]
  spoilt = {k: np.where(action, logp + 0.1 * rng.normal(size=logp.shape), np.nan) for k in ("logp_old", "logp_rollout")}
  entropy = np.where(action, rng.random(logp.shape), np.nan)
  columns = {k: x.astype(np.float32) for k, x in {**spoilt, "entropy": entropy}.items()}
  return dataclasses.replace(rollouts, **columns)


def update(objective, prepared, row_tokens, rows):
  tokens, plan = pack(prepared, row_tokens=row_tokens, rows=rows)
  step = jax.jit(
    jax.value_and_grad(lambda p, b: loss(POLICY, objective, p, b, chunk=64)[0]), compiler_options=tiny.QUICK
  )
  parts = [step(PARAMS, jax.tree.map(lambda x, m=m: x[m], tokens)) for m in range(plan.microbatches)]
  return jax.tree.map(lambda *x: np.sum(x, axis=0), *parts)


@thinned("combination", COMBINATIONS, every=5)
def test_packing_and_cutting_change_nothing(combination):
  surrogate, aggregate, weight, keep = combination
  objective = dataclasses.replace(
    grpo.objective, surrogate=surrogate, aggregate=aggregate, weight=weight, keep=keep,
    terms=((0.1, losses.kl_k3_straight), (0.05, losses.kl_k1_weighted)),
  )  # fmt: skip
  prepared = prepare(dataclasses.replace(grpo, objective=objective), nearly_on_policy())
  (value, slope), (other_value, other) = (update(objective, prepared, *layout) for layout in ((24, 4), (48, 8)))
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(slope)))
  assert np.isfinite(norm) and norm > 1e-6
  assert_allclose(value, other_value, rtol=0, atol=1e-5 * norm)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=0, atol=1e-5 * norm), slope, other)
