"""The law: the loss of an update and its gradient are the same however the batch is cut, packed, padded or sharded."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal
from thinned import thinned

from jaxagent.losses import (
  constant,
  entropy_bonus,
  importance_within,
  kl_reverse,
  masked_importance,
  sequence_mean,
  sequence_sum,
  token_mean,
  truncated_importance,
)
from jaxagent.methods import PRESETS, Method, grpo, grpo_kl, prepare, sft
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training.loss import loss, sampler_gap
from jaxagent.training.scoring import score
from jaxagent.training.sharding import make_mesh

POLICY = tiny.tiny_policy()
PARAMS = POLICY.init(jax.random.key(0))
logp_of = jax.jit(lambda params, b: score(POLICY, params, b, chunk=64).logp, compiler_options=tiny.QUICK)
METHODS = {k: v for k, v in PRESETS.items() if isinstance(v, Method)} | {
  "grpo_kl": grpo_kl(0.1),
  "reverse_kl_and_entropy": dataclasses.replace(
    grpo, objective=dataclasses.replace(grpo.objective, terms=((0.1, kl_reverse), (0.01, entropy_bonus)))
  ),
}
AGGREGATES = {
  "token_mean": token_mean,
  "sequence_mean": sequence_mean,
  "sequence_sum": sequence_sum,
  "constant": partial(constant, max_tokens=24),
}
CORRECTIONS = {
  "none": {},
  "tis": {"weight": (truncated_importance,)},
  "icepop": {"weight": (masked_importance,)},
  "mis": {"keep": (importance_within,)},
}
LAYOUTS = [(24, 4), (48, 8)]  # row_tokens, rows


def changed(method, **parts):
  return dataclasses.replace(method, objective=dataclasses.replace(method.objective, **parts))


def gradient(name):
  """Compiled once per surrogate, terms and shape: the other slots act before the gradient."""
  return _gradient(METHODS[name].objective.surrogate, METHODS[name].objective.terms)


@functools.cache
def _gradient(surrogate, terms):
  objective = dataclasses.replace(grpo.objective, surrogate=surrogate, terms=terms)
  value = lambda p, b: loss(POLICY, objective, p, b, chunk=64)  # noqa: E731
  return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=tiny.QUICK)


def one_row_batch(prepared):
  """Everything in one microbatch, three rows of which are in use."""
  tokens, plan = pack(prepared, row_tokens=200, rows=3, microbatches=1)
  return jax.tree.map(lambda x: jnp.asarray(x[0]), tokens), plan


def whole(name, prepared, row_tokens, rows, place=lambda x: x):
  """Loss and gradient of an update, summed over its microbatches."""
  tokens, plan = pack(prepared, row_tokens=row_tokens, rows=rows)
  parts = [gradient(name)(PARAMS, jax.tree.map(lambda x: place(x[m]), tokens)) for m in range(plan.microbatches)]  # noqa: B023
  return jax.tree.map(lambda *x: np.sum(x, axis=0), *[(value, slope) for (value, _), slope in parts])


def assert_same(got, want, tolerance=1e-5):
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(want[1])))
  assert norm > 1e-6 and np.isfinite(norm)
  assert_allclose(got[0], want[0], rtol=tolerance, atol=tolerance * norm)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=0, atol=tolerance * norm), got[1], want[1])


def over_eight():
  return lambda x: jax.device_put(x, NamedSharding(make_mesh(), PartitionSpec("data")))


@thinned("name", METHODS, every=5)
def test_the_law_for_every_aggregation(name):
  for i, aggregate in enumerate(AGGREGATES.values()):
    p = prepare(changed(METHODS[name], aggregate=aggregate), tiny.ragged(seed=i, ref=True))
    padded = whole(name, p, 24, 16)
    for layout in LAYOUTS:
      assert_same(whole(name, p, *layout), padded)
    if name in ("gspo", "reverse_kl_and_entropy"):
      assert_same(whole(name, p, 48, 8, over_eight()), padded)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_law_for_every_correction_and_minibatch(correction):
  method, r = changed(grpo, **CORRECTIONS[correction]), tiny.ragged(ref=True)
  for minibatch in (None, np.arange(16) < 8):
    p = prepare(method, r, minibatch=minibatch)
    padded = whole("grpo", p, 24, 16)
    for layout in LAYOUTS:
      assert_same(whole("grpo", p, *layout), padded)


@pytest.mark.parametrize("name", ["gspo", "reverse_kl_and_entropy"])
def test_rubbish_at_masked_places_changes_nothing(name):
  def spoiled(x):
    """After packing, in what the loss reads."""
    b, _ = one_row_batch(prepare(METHODS[name], tiny.ragged(ref=True)))
    floats = {k: jnp.where(b.mask, getattr(b, k), x) for k in ("logp_old", "logp_ref", "logp_rollout", "weight")}
    return dataclasses.replace(b, **floats)

  results = [gradient(name)(PARAMS, spoiled(x)) for x in (0.0, np.nan, 1e9, -np.inf)]
  for other in results[1:]:
    jax.tree.map(assert_array_equal, other, results[0])


def by_loops(r, advantage, clip=0.2):
  """GRPO, one rollout and one token at a time, in double precision."""
  segment = np.where(np.arange(tiny.T) < r.length[:, None], 0, -1)
  states = POLICY.forward(PARAMS, np.maximum(r.tokens, 0), r.position, segment).states
  logits = np.asarray(POLICY.head(PARAMS, states), np.float64) / r.temperature[:, None, None]
  total, rollouts = 0.0, sorted(set(r.rollout[r.valid]))
  for i in rollouts:
    rows = [n for n in range(16) if r.rollout[n] == i and r.valid[n]]
    count = sum(r.mask[n].sum() for n in rows)
    for n in rows:
      for t in np.flatnonzero(r.mask[n]):
        logp = logits[n, t - 1, r.tokens[n, t]] - np.log(np.exp(logits[n, t - 1]).sum())
        ratio = np.exp(logp - r.logp_old[n, t])
        total -= min(ratio * advantage[n], np.clip(ratio, 1 - clip, 1 + clip) * advantage[n]) / count / len(rollouts)
  return total


def test_equals_loops():
  r = tiny.ragged(seed=3)
  p = prepare(grpo, r)
  advantage = np.asarray(p.advantage).sum(1) / np.maximum(np.asarray(p.keep).sum(1), 1)
  value, _ = whole("grpo", p, 48, 8)
  assert_allclose(value, by_loops(r, advantage), rtol=1e-5)


def test_gradient_equals_finite_differences():
  b, _ = one_row_batch(prepare(METHODS["reverse_kl_and_entropy"], tiny.ragged(ref=True)))
  f = gradient("reverse_kl_and_entropy")
  _, slope = f(PARAMS, dataclasses.replace(b, logp_old=b.logp_rollout))
  direction = jax.tree.map(lambda x: x / np.sqrt(sum(np.sum(np.square(v)) for v in jax.tree.leaves(slope))), slope)

  def at(e):
    moved = jax.tree.map(lambda x, d: x + e * d, PARAMS, direction)
    return f(moved, dataclasses.replace(b, logp_old=b.logp_rollout))

  numeric = (at(5e-3)[0][0] - at(-5e-3)[0][0]) / 1e-2
  analytic = sum(np.sum(x * d) for x, d in zip(jax.tree.leaves(slope), jax.tree.leaves(direction)))
  assert_allclose(numeric, analytic, rtol=0.03)


def test_without_logp_old_the_current_parameters_stand_for_it():
  r = tiny.ragged()
  b, _ = one_row_batch(prepare(grpo, dataclasses.replace(r, logp_old=None)))
  (value, tally), slope = gradient("grpo")(PARAMS, b)
  own = logp_of(PARAMS, b)
  (value2, _), slope2 = gradient("grpo")(PARAMS, dataclasses.replace(b, logp_old=own))
  assert_same((value, slope), (value2, slope2))
  assert tally.sums["clip_fraction"] == 0


def test_supervised_fine_tuning_is_the_cross_entropy():
  r = tiny.ragged()
  b, plan = one_row_batch(prepare(sft, r))
  logp = unpack(np.asarray(logp_of(PARAMS, b))[None], plan)
  (value, _), _ = gradient("sft")(PARAMS, b)
  assert_allclose(value, -logp[r.mask & r.valid[:, None]].mean(), rtol=1e-5)


def test_only_the_tokens_in_the_mask_get_gradient():
  """On a policy whose token t depends on its own logits alone, the gradient is nonzero exactly at the actions."""
  r = tiny.ragged()
  tokens, _ = pack(prepare(sft, r), row_tokens=24, rows=16)
  b = jax.tree.map(lambda x: jnp.asarray(x[0]), tokens)

  def forward(params, tokens, position, segment, **_):
    return dataclasses.replace(POLICY.forward(PARAMS, tokens, position, segment), states=params)

  table = dataclasses.replace(POLICY, forward=forward, head=lambda params, states: states)
  logits = jnp.zeros((*b.tokens.shape, tiny.V))
  value = lambda x: loss(table, sft.objective, x, b, chunk=64)[0]  # noqa: E731
  slope = jax.jit(jax.grad(value), compiler_options=tiny.QUICK)(logits)
  moved = np.abs(np.asarray(slope)).sum(-1) > 0
  assert_array_equal(moved[:, :-1], np.asarray(b.mask)[:, 1:])
  assert not moved[:, -1].any()


def test_coefficients_may_be_schedules():
  ramp = lambda updates: 0.1 * updates  # noqa: E731
  scheduled = dataclasses.replace(grpo.objective, terms=((ramp, kl_reverse),))
  fixed = dataclasses.replace(grpo.objective, terms=((0.3, kl_reverse),))
  b, _ = one_row_batch(prepare(grpo_kl(0.1), tiny.ragged(ref=True)))
  traced = jax.jit(lambda u: loss(POLICY, scheduled, PARAMS, b, chunk=64, updates=u)[0], compiler_options=tiny.QUICK)
  plain = jax.jit(lambda: loss(POLICY, fixed, PARAMS, b, chunk=64)[0], compiler_options=tiny.QUICK)
  assert_allclose(traced(3), plain(), rtol=1e-6)
  assert traced(0) != traced(3) and traced._cache_size() == 1


def test_sampler_gap_golden():
  rho = np.log(np.array([[0.3, 0.8, 1, 1.7, 6.0, 1]]))
  mask = np.array([[1, 1, 1, 1, 1, 0]], bool)
  gap = sampler_gap(np.where(mask, rho, np.nan), np.zeros((1, 6)), mask)
  assert_allclose(gap["kl/rollout_train"], 0.780946, atol=1e-6)
  assert_allclose(gap["logp_gap/max"], np.log(6), rtol=1e-6)
  assert_allclose(gap["logp_gap/mean"], np.abs(rho).sum() / 5, rtol=1e-6)
