"""Every preset on one ragged batch, prepared in one program; its loss and gradient in another, beside its parent's."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from every_preset import METHODS, N, T, dressed, tracked
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent import losses as losses_of
from jaxagent.advantages import prompt_rates
from jaxagent.methods import PRESETS, EntropyTracker, Given, RateTracker, Table, plain, prepare
from jaxagent.methods.objective import SCORE_COLUMNS, slot_parameters
from jaxagent.models.policy import Hidden
from jaxagent.rollout.packing import pack
from jaxagent.training.loss import loss
from jaxagent.types import Trajectory

PARENTS = {  # preset: the one that it is a difference of; None: nothing to compare it with
  "grpo": None, "sft": None, "dapo": "grpo", "dapo_within": "grpo", "dr_grpo": "grpo", "dr_grpo_within": "grpo",
  "grpo_kl": "grpo", "gspo": "grpo", "rloo": "grpo",
  "reinforce_plus_plus": "grpo", "reinforce_plus_plus_kl": "reinforce_plus_plus",
  "reinforce_plus_plus_baseline": "reinforce_plus_plus", "bws": "grpo", "gdpo": "grpo",
  "cispo": "grpo", "cispo_capped": "grpo", "sapo": "grpo", "gmpo": "grpo", "vespo": "grpo", "luspo": "gspo",
  "intellect2": "grpo", "dppo": "grpo",
  "ppo": "grpo", "vapo": "ppo", "mpo": "ppo", "t1": "ppo",
  "gigpo": "grpo", "scpo": "gigpo", "tev": "dppo", "shaping": "reinforce_plus_plus",
  "draco": "grpo_kl", "taspo": "grpo", "cliff": "grpo",
  "gepo": "grpo", "spo_plus_plus": "grpo", "spo_muon": "spo_plus_plus",
  "teamgym": "grpo", "teamgym_per_agent": "teamgym",
  "think_only": "bws", "when2think": "think_only", "slimsearcher": "grpo", "otc": "grpo", "eapo": "grpo",
  "search_agent": "grpo_kl", "experience_funnel": "grpo",
}  # fmt: skip
TABLE = np.random.default_rng(0).normal(size=(T, tiny.V)).astype(np.float32)  # the policy: logits by position


@functools.cache
def rollouts(rubbish):
  r = tiny.ragged(rubbish=rubbish, ref=True)
  logits = TABLE[r.position] / r.temperature[:, None, None]
  logp = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.maximum(r.tokens, 0)[..., None], -1)[..., 0]
  return dressed(r, logp, rubbish)


def complete(method, r):
  """The batch with the columns that the method declares and no others."""
  found = {k: x for k, x in r.columns.items() if k in method.columns} | tracked(method, r)
  assert set(found) == set(method.columns)
  return prepare(method, dataclasses.replace(r, columns=found))


prepare_all = jax.jit(lambda r: {k: complete(m, r) for k, m in METHODS.items()}, compiler_options=tiny.QUICK)


@functools.cache
def prepared(rubbish=float("nan")):
  return jax.tree.map(np.asarray, prepare_all(rollouts(rubbish)))


@functools.cache
def losses():
  """Loss and gradient of every preset, in one program over one table of log-probs as the policy."""
  policy = dataclasses.replace(tiny.tiny_policy(), forward=_lookup, head=lambda params, states: states)
  packed = {k: pack(p, row_tokens=T, rows=N, microbatches=1)[0] for k, p in prepared().items()}
  batches = jax.tree.map(lambda x: x[0], packed)

  def each(params):
    value = lambda name: lambda w: loss(policy, METHODS[name].objective, w, batches[name], chunk=T * N)[0]  # noqa: E731
    return {name: jax.value_and_grad(value(name))(params) for name in METHODS}

  return jax.tree.map(np.asarray, jax.jit(each, compiler_options=tiny.QUICK)(TABLE))


def _lookup(params, tokens, position, segment, *, prefix_end=None, routing=None):
  """Logits that depend on the position alone."""
  return Hidden(params[position])


def test_the_table_names_every_preset():
  assert set(PARENTS) == set(PRESETS)


def test_every_column_that_a_preset_declares_is_read():
  for name, method in METHODS.items():
    o = method.objective
    read = {column for slot in (*method.reward, *o.whole, *o.differentiated) for column in slot_parameters(slot)}
    assert set(method.columns) <= read and not set(method.columns) & set(SCORE_COLUMNS), name


@pytest.mark.parametrize("name", PRESETS)
def test_prepared(name):
  p = prepared()[name]
  for x in (p.advantage, p.weight, p.aggregate):
    assert x.shape == (N, T) and np.isfinite(x).all() and (x[~p.keep] == 0).all()
  assert p.keep.any() and not (p.keep & ~rollouts(0.0).mask).any() and not p.keep[~rollouts(0.0).valid].any()
  assert np.abs(p.advantage).max() > 0


@pytest.mark.parametrize("rubbish", [0.0, 1e9])
def test_rubbish_at_masked_places_changes_nothing(rubbish):
  for name, p in prepared().items():
    for field in ("advantage", "weight", "keep", "aggregate"):
      assert_array_equal(getattr(prepared(rubbish)[name], field), getattr(p, field), err_msg=f"{name} {field}")


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_are_finite(name):
  value, slope = losses()[name]
  assert np.isfinite(value) and np.isfinite(slope).all() and np.abs(slope).max() > 1e-6


@pytest.mark.parametrize("name", [k for k, parent in PARENTS.items() if parent])
def test_differs_from_its_parent(name):
  (value, slope), (parent_value, parent_slope) = losses()[name], losses()[PARENTS[name]]
  assert np.abs(slope - parent_slope).max() > 1e-6 * np.abs(parent_slope).max() or abs(value - parent_value) > 1e-6


def test_constants_of_the_papers():
  o = {name: method.objective for name, method in METHODS.items()}
  assert o["draco"].surrogate is losses_of.dual_clip and o["draco"].terms == ((0.01, losses_of.kl_k3),)
  assert o["draco"].aggregate is losses_of.token_mean and o["tev"].surrogate.keywords == {"threshold": 0.15}
  assert o["luspo"].surrogate.keywords == {"low": 2e-3, "high": 2.5e-3} and o["cispo"].surrogate.keywords["low"] == 1
  assert o["spo_muon"].surrogate.keywords == {"high": 0.28, "cap": 2.0}
  assert o["spo_muon"].advantage[-1].keywords == {"ddof": 1} and o["spo_muon"].weight[0].keywords == {"cap": 2.0}
  assert o["t1"].advantage[0].keywords == {"gamma": 1.0, "lam": 1.0} and o["vapo"].terms[0][0] == 0.1
  assert o["search_agent"].terms == ((0.001, losses_of.kl_k3),) and o["intellect2"].surrogate.keywords == {"cap": 4.0}


def test_gepo_stands_on_any_method():
  on_rloo = PRESETS["gepo"](PRESETS["rloo"])
  assert on_rloo.objective.advantage[0] is PRESETS["rloo"].objective.advantage[0] and len(on_rloo.trackers) == 1
  assert on_rloo.objective.surrogate is losses_of.reinforce


def test_a_preset_without_its_columns_says_which():
  with pytest.raises(ValueError, match=r"verdict.*no column provides"):
    PRESETS["draco"](annotator=Given(("step_quality",)))
  with pytest.raises(ValueError, match="reads first_error, which this batch does not have"):
    prepare(METHODS["cliff"], dataclasses.replace(rollouts(0.0), columns={}))


def test_given_asks_its_source_for_every_trajectory():
  group = [Trajectory(task=2, group=0, rollout=i, outcome=float(i), tokens=[5, 6]) for i in (0, 1)]
  table = Table(("first_error", "tool_cost"), {(2, 0): (7, 1.5), (2, 1): (-1, 0.0)})
  given = Given(("first_error", "tool_cost"), table)
  assert asyncio.run(given(group, None)) == {"first_error": [7, -1], "tool_cost": [1.5, 0.0]}


@pytest.mark.parametrize(
  "source, message",
  [
    (None, "nothing provides first_error"),
    (Table(("first_error",), {}), "no entry for task 2, rollout 0"),
    (Table(("first_error",), {(2, 0): (1, 2)}), "must hold first_error, got 2 values"),
    (lambda trajectory: {}, "returned no first_error"),
  ],
)
def test_given_says_what_it_lacks(source, message):
  with pytest.raises(ValueError, match=message):
    asyncio.run(Given(("first_error",), source)([Trajectory(task=2, group=0, rollout=0)], None))


def test_entropy_tracker_on_paper():  # groups of constant log-prob -1, -2, -3: mean 2, std 0.8165
  r = plain(tiny.ragged()).rollouts
  group, logp = np.arange(N) % 3, -1.0 - np.arange(N) % 3
  r = dataclasses.replace(
    r, mask=jnp.ones((N, T), bool), valid=np.ones(N, bool), group=group, logp_rollout=np.tile(logp[:, None], (1, T))
  )
  tracker = EntropyTracker()
  state, found = tracker.update(tracker.init(), r)
  assert_allclose(found["group_entropy"], -logp, rtol=1e-6)
  assert_allclose([found["entropy_low"][0], found["entropy_high"][0]], [1.8367, 2.24495], rtol=1e-4)
  assert int(state.batches) == 1
  after = tracker.update(state, dataclasses.replace(r, logp_rollout=r.logp_rollout - 1))[0]
  assert_allclose(after.low, state.low + 0.01, rtol=1e-5)


def test_rate_tracker_reads_before_it_adds():
  r = rollouts(float("nan"))
  tracker = RateTracker(N, prompt_rates(np.full(N, 3.0), np.full(N, 4.0)))
  state, found = tracker.update(tracker.init(), r)
  assert_allclose(found["baseline"], np.full(N, 3.5 / 5), rtol=1e-6)
  again = tracker.update(state, r)[1]["baseline"]
  won, lost = np.zeros(N), np.zeros(N)
  for i in set(r.rollout[r.valid]):
    task, outcome = r.task[r.rollout == i][0], r.outcome[r.rollout == i][0]
    won[task], lost[task] = won[task] + outcome, lost[task] + 1 - outcome
  decay = np.where(won + lost > 0, 0.875**3, 1.0)  # the batch is of version 3
  want = (3.5 * decay + won) / (5 * decay + won + lost)
  assert_allclose(again[r.valid], want[r.task[r.valid]], rtol=1e-5)
  with pytest.raises(ValueError, match="record `version`"):
    tracker.update(tracker.init(), dataclasses.replace(r, version=None))
