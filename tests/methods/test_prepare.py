import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.advantages import standardize_tokens
from jaxagent.losses import (
  importance_within,
  positive_nll,
  positive_token_weight,
  sequence_mean,
  token_mean,
  truncated_importance,
)
from jaxagent.methods import PRESETS, Given, Method, credit, dapo, grpo, grpo_kl, minibatches, plain, prepare, weigh
from jaxagent.methods.prepare import call
from jaxagent.rollout.packing import pack

N = 16


def with_parts(**parts):
  return dataclasses.replace(grpo, objective=dataclasses.replace(grpo.objective, **parts))


CORRECTED = with_parts(weight=(truncated_importance,), keep=(importance_within,), aggregate=token_mean)


def test_what_is_kept_is_mask_and_valid_and_every_keep_and_the_minibatch():
  r = tiny.ragged()
  minibatch = np.arange(N) % 2 == 0
  p = prepare(CORRECTED, r, minibatch=minibatch)
  rho = np.exp(r.logp_old - r.logp_rollout)
  want = r.mask & r.valid[:, None] & (rho >= 0.5) & (rho <= 2) & minibatch[r.rollout][:, None]
  assert_array_equal(p.keep, want)
  assert_allclose(p.aggregate, want / want.sum(), rtol=1e-6)
  assert_allclose(np.asarray(p.weight)[want], np.minimum(rho, 2)[want], rtol=1e-6)


def test_advantage_and_weight_do_not_depend_on_the_minibatch():
  r = tiny.ragged()
  whole = prepare(CORRECTED, r)
  parts = [prepare(CORRECTED, r, minibatch=m) for m in minibatches(r, 3, key=jax.random.key(0))]
  for name in ("advantage", "weight", "keep"):
    assert_array_equal(sum(np.asarray(getattr(p, name), np.float32) for p in parts), getattr(whole, name))
  assert_allclose([p.aggregate.sum() for p in parts], np.ones(3), rtol=1e-6)


def test_minibatches_partition_the_valid_logical_rollouts():
  r = tiny.ragged()
  masks = np.asarray(minibatches(r, 4, key=jax.random.key(1)))
  assert masks.sum(0).max() == 1 and masks.sum(1).max() - masks.sum(1).min() <= 1
  assert set(np.flatnonzero(masks.any(0))) == set(r.rollout[r.valid])


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "gspo", "sft"])
def test_rubbish_at_masked_places_changes_nothing(name):
  nan, zero, huge = (prepare(PRESETS[name], tiny.ragged(rubbish=x)) for x in (np.nan, 0.0, 1e9))
  for other in (zero, huge):
    for field in ("advantage", "weight", "keep", "aggregate"):
      assert_array_equal(getattr(nan, field), getattr(other, field))
  for x in (nan.advantage, nan.weight, nan.aggregate, nan.rollouts.logp_old, nan.rollouts.logp_rollout):
    assert (np.asarray(x)[~np.asarray(nan.keep)] == 0).all()


def test_float_columns_of_the_method_are_cleaned_and_others_are_not():
  r = tiny.ragged()
  columns = {"quality": np.where(r.mask, 1.0, np.nan), "row": np.full(N, np.nan), "kind": np.ones(r.mask.shape, int)}
  p = prepare(grpo, dataclasses.replace(r, columns=columns)).rollouts.columns
  assert_array_equal(p["quality"], r.mask & r.valid[:, None])
  assert np.isnan(p["row"]).all() and (p["kind"] == 1).all()


def test_a_permutation_of_the_batch_permutes_the_result():
  r = tiny.ragged()
  order = np.random.default_rng(0).permutation(N)
  a, b = prepare(CORRECTED, r), prepare(CORRECTED, jax.tree.map(lambda x: x[order], r))
  for field in ("advantage", "weight", "keep", "aggregate"):
    assert_allclose(getattr(b, field), np.asarray(getattr(a, field))[order], rtol=1e-5, atol=1e-7)


def test_same_under_jit():
  r = tiny.ragged()
  a, b = prepare(CORRECTED, r), jax.jit(partial(prepare, CORRECTED))(r)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-6), (a.advantage, a.aggregate), (b.advantage, b.aggregate))


def test_slots_are_chained():
  def doubled(advantage):
    return 2 * advantage

  def per_token(advantage, mask):
    return advantage[:, None] + jnp.arange(mask.shape[1])

  r = tiny.ragged()
  base = np.asarray(prepare(grpo, r).advantage)
  chained = prepare(with_parts(advantage=(*grpo.objective.advantage, doubled, per_token)), r)
  keep = np.asarray(chained.keep)
  assert_allclose(np.asarray(chained.advantage)[keep], (2 * base + np.arange(tiny.T))[keep], rtol=1e-5)


def test_rewards_are_shaped_before_advantages():
  def halved(outcome):
    return outcome / 2

  def turns(reward, turn_reward):
    return turn_reward + reward[:, None]

  p = prepare(dataclasses.replace(grpo, reward=(halved, turns)), tiny.ragged()).rollouts
  assert_allclose(p.reward, p.outcome / 2)
  assert_allclose(p.turn_reward[:, 1], p.outcome / 2)


def test_shaping_is_a_baseline_of_the_state_in_every_row_of_a_rollout():
  r = tiny.ragged()
  assert r.rollout[0] == r.rollout[1]
  turn = r.turn + (r.turn >= 0) * (np.arange(N) == 1)[:, None]  # the second row ends after the first
  phi = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
  r = dataclasses.replace(r, turn=turn, turn_reward=np.zeros((N, 3), np.float32), columns={"potential": phi})
  returns = r.reward[:, None] - np.take_along_axis(phi, np.maximum(turn, 0), 1)
  want = standardize_tokens(returns, r.mask & r.valid[:, None])
  assert_allclose(prepare(PRESETS["shaping"](), r).advantage, want, atol=1e-5)


def test_truncated_rollouts_leave_the_loss_but_not_their_group():
  r = tiny.ragged()
  p = prepare(dapo, r)
  assert not np.asarray(p.keep)[r.truncated].any()
  assert_allclose(p.advantage, np.where(p.keep, prepare(grpo, r).advantage, 0), rtol=1e-6)


def test_a_missing_column_is_named():
  r = dataclasses.replace(tiny.ragged(), logp_old=None)
  with pytest.raises(ValueError, match="importance_within reads logp_old, which this batch does not have"):
    prepare(CORRECTED, r)
  with pytest.raises(ValueError, match="reads nonsense, which no column provides"):
    with_parts(advantage=(lambda nonsense: nonsense,))


def test_an_absent_optional_column_leaves_the_default():
  assert call(lambda reward, value=3: reward + value, {"reward": 1, "value": None}) == 4
  assert call(partial(lambda reward, *, scale: reward * scale, scale=5), {"reward": 2, "scale": 7}) == 10


IMITATION = with_parts(
  aggregate=token_mean, terms=((0.1, positive_nll),), columns=(("positive_weight", positive_token_weight),)
)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
@pytest.mark.parametrize("minibatch", [None, np.arange(N) < 8])
def test_a_term_has_a_mean_of_its_own_however_the_update_is_cut(aggregate, minibatch):
  r = dataclasses.replace(tiny.ragged(), outcome=(np.maximum(np.arange(N) - 1, 0) % 3 == 0).astype(np.float32))
  p = prepare(with_parts(**{**vars(IMITATION.objective), "aggregate": aggregate}), r, minibatch=minibatch)
  correct = np.asarray(p.keep) & (r.outcome >= 1)[:, None]
  weight = np.asarray(p.aggregate * p.rollouts.columns["positive_weight"])
  assert_allclose(weight, correct / correct.sum(), rtol=1e-5)
  tokens, plan = pack(p, row_tokens=48, rows=2)
  assert plan.microbatches > 1
  parts = (tokens.aggregate * tokens.columns["positive_weight"]).sum((1, 2))
  assert_allclose(parts.sum(), 1, rtol=1e-5)


def test_columns_of_the_update_have_names_of_their_own_and_are_checked():
  with pytest.raises(ValueError, match="'entropy' is a column already"):
    with_parts(columns=(("entropy", positive_token_weight),))
  with pytest.raises(ValueError, match="positive_nll reads positive_weight, which no column provides"):
    with_parts(terms=((0.1, positive_nll),))
  threshold = lambda logp_ref, aggregate: logp_ref * aggregate  # noqa: E731
  assert "logp_ref" in with_parts(columns=(("threshold", threshold),)).needs


def test_rows_sampled_greedily_are_refused():
  r = tiny.ragged()
  cold = dataclasses.replace(r, temperature=np.where(np.arange(N) == 3, 0, r.temperature))
  with pytest.raises(ValueError, match=r"row 3 was sampled at temperature 0\.0"):
    prepare(grpo, cold)


def test_a_batch_without_actions_is_refused():
  r = tiny.ragged()
  with pytest.raises(ValueError, match="no token to train on: 16 rows, 0 of them valid"):
    prepare(grpo, dataclasses.replace(r, valid=np.zeros(N, bool)))


def test_shapes_are_checked():
  with pytest.raises(ValueError, match=r"logp_old must have leading axes \(16, 24\)"):
    prepare(grpo, dataclasses.replace(tiny.ragged(), logp_old=np.zeros((N, 3))))


def test_plain_keeps_every_action():
  r = tiny.ragged()
  p = plain(r)
  assert_array_equal(p.keep, r.mask & r.valid[:, None])
  assert not np.asarray(p.aggregate).any()


def test_presets_are_differences_of_one_another():
  g, d = grpo.objective, {k: m.objective for k, m in PRESETS.items() if isinstance(m, Method)}
  assert d["dr_grpo"].surrogate is g.surrogate and d["gspo"].aggregate is sequence_mean and not g.terms
  assert d["dapo"].surrogate.keywords == {"high": 0.28} and d["dapo"].aggregate is token_mean
  assert PRESETS["dr_grpo_within"](max_tokens=7).objective.aggregate.keywords == {"max_tokens": 7}
  assert grpo.needs == frozenset() and grpo_kl(0.1).needs == {"logp_ref"} and CORRECTED.needs == {"logp_old"}


def test_grpo_on_paper():  # rewards 1, 0 and lengths 2, 1: advantages +-1, weights 1/4 and 1/2
  r = tiny.ragged(n=4)
  keep = np.zeros((4, tiny.T), bool)
  keep[0, 3:5], keep[1, 4:5] = True, True
  r = dataclasses.replace(
    r, mask=keep, length=np.array([6, 6, 0, 0]), rollout=np.arange(4), group=np.array([0, 0, 2, 3]),
    reward=np.array([1, 0, 0, 0.0]), valid=np.array([True, True, False, False]),
  )  # fmt: skip
  p = prepare(grpo, r)
  assert_allclose(p.advantage[0, 3:5], [1, 1], atol=1e-5)
  assert_allclose(p.advantage[1, 4], -1, atol=1e-5)
  assert_allclose(p.aggregate[0, 3:5], [0.25, 0.25])
  assert_allclose(p.aggregate[1, 4], 0.5)


def given(*names):
  return Given(names)


@pytest.mark.parametrize(
  ("build", "said"),
  [
    (lambda: Method(grpo.objective, annotators=(given("a"), given("b", "a"))), "trackers provide 'a' twice"),
    (lambda: PRESETS["gepo"](PRESETS["gepo"]()), "provide 'entropy_high' twice"),
    (lambda: Method(grpo.objective, metrics=(("a", share), ("a", share))), "Method.metrics names 'a' twice"),
    (lambda: with_parts(columns=(("a", share), ("a", share))), "columns names 'a' twice"),
    *(
      (lambda name=name: Method(grpo.objective, annotators=(given(name),)), f"provides {name!r}, which is made")
      for name in ("advantage", "keep", "aggregate", "weight", "segment", "prefix_end", "logp", "experts", "columns")
    ),
  ],
)
def test_a_name_has_one_provider(build, said):
  with pytest.raises(ValueError, match=said):
    build()


def share(mask):
  return mask.mean()


def test_a_column_of_the_batch_hides_no_field():
  r = tiny.ragged()
  for name in ("reward", "mask", "value"):
    with pytest.raises(ValueError, match=f"columns holds '{name}', which is a field"):
      prepare(grpo, dataclasses.replace(r, columns={name: np.zeros(len(r.valid))}))


def test_credit_once():
  credited, _ = credit(grpo, tiny.ragged())
  with pytest.raises(ValueError, match="has a column 'advantage' already"):
    credit(grpo, credited)
  with pytest.raises(ValueError, match="pass it through credit first"):
    weigh(grpo, tiny.ragged())


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"mask": np.int32}, "mask must have dtype bool, got int32"),
    ({"valid": np.float32}, "valid must have dtype bool, got float32"),
    ({"group": np.float32}, "group must have integers, got float32"),
    ({"rollout": np.float32}, "rollout must have integers, got float32"),
  ],
)
def test_kinds_of_numbers(changes, said):
  r = tiny.ragged()
  for wrap in (lambda f: f, jax.jit):
    with pytest.raises(ValueError, match=said):
      wrap(partial(prepare, grpo))(dataclasses.replace(r, **{k: getattr(r, k).astype(x) for k, x in changes.items()}))


def test_minibatches_are_masks_of_the_logical_rollouts():
  r = tiny.ragged()
  for wrong in (np.ones(3, bool), np.ones(99, bool), np.ones(r.mask.shape, bool)):
    with pytest.raises(ValueError, match="minibatch must have shape"):
      prepare(grpo, r, minibatch=wrong)
  with pytest.raises(ValueError, match="count must be at least 1, got 0"):
    minibatches(r, 0, key=jax.random.key(0))
  some = np.arange(len(r.valid)) % 2 == 0
  want = prepare(grpo, r, minibatch=some)
  for same in (jnp.asarray(some), some.astype(np.int32), some.astype(np.float32)):
    np.testing.assert_array_equal(prepare(grpo, r, minibatch=same).aggregate, want.aggregate)


def test_numpy_inputs_are_left_as_they_were():
  """Also where a keep slot returns a NumPy array: nothing is and-ed in place."""
  r = tiny.ragged()
  mask = r.mask.copy()
  method = with_parts(keep=(lambda mask: np.asarray(mask),))
  some = np.arange(len(r.valid)) % 2 == 0
  p, jitted = prepare(method, r, minibatch=some), jax.jit(partial(prepare, grpo))(r, minibatch=some)
  np.testing.assert_array_equal(r.mask, mask)
  np.testing.assert_array_equal(p.rollouts.mask, jitted.rollouts.mask)


def test_metrics_are_one_number_each():
  r = tiny.ragged()
  method = dataclasses.replace(grpo, metrics=(("a", share), ("b", lambda mask: {"c": mask.sum(), "d": mask.max()})))
  assert set(credit(method, r)[1]) == {"a", "b/c", "b/d"}
  with pytest.raises(ValueError, match=r"metric a must be one number, got shape \(16,\)"):
    credit(dataclasses.replace(grpo, metrics=(("a", lambda reward: reward),)), r)
