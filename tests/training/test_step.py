import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from numpy.testing import assert_allclose, assert_array_equal
from thinned import thinned

from jaxagent import config
from jaxagent.losses import kl_reverse
from jaxagent.methods import PRESETS, grpo, plain, prepare, sft
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.sharding import param_shardings
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training.loss import loss
from jaxagent.training.optimizer import make_optimizer
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import init_state, make_scorer, make_train_step

POLICY = tiny.tiny_policy()
SGD = optax.chain(optax.sgd(1.0), optax.scale_by_schedule(lambda count: 1.0))  # with a count to watch


def params():
  return POLICY.init(jax.random.key(0))


def one_device():
  return make_mesh(devices=jax.devices()[:1])


def batch(method=grpo, rows=8, seed=0, ref=True):
  return pack(prepare(method, tiny.ragged(seed, ref=ref)), row_tokens=48, rows=rows)


@functools.cache
def step_of(method, tx, mesh):
  return make_train_step(POLICY, method, tx, mesh=mesh, chunk=64)


@functools.cache
def scorer_of():
  return make_scorer(POLICY, mesh=one_device(), chunk=64, columns=("logp", "entropy"))


def built(method=grpo, tx=SGD, mesh=None, start=None):
  mesh = mesh or one_device()
  start = params() if start is None else start
  return step_of(method, tx, mesh), init_state(POLICY, method, tx, start, mesh=mesh)


def test_one_update_is_the_gradient_of_the_loss_and_compiles_once():
  value = lambda p, b: loss(POLICY, grpo.objective, p, b, chunk=64)  # noqa: E731
  gradient = jax.jit(jax.grad(value, has_aux=True), compiler_options=tiny.QUICK)
  step, state = built()
  step.clear_cache()
  for seed in range(3):
    before = jax.tree.map(np.asarray, state.params)
    tokens, plan = batch(seed=seed)
    flat = jax.tree.map(lambda x: jnp.asarray(x.reshape(-1, *x.shape[2:])), tokens)
    slope, tally = gradient(before, flat)
    state, metrics = step(state, tokens, plan.microbatches)
    norm = float(optax.tree.norm(slope))
    jax.tree.map(lambda new, old, g: assert_allclose(new, old - g, atol=1e-5 * norm), state.params, before, slope)  # noqa: B023
    assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert_allclose(metrics["loss"], tally.sums["loss"], rtol=1e-4)
    assert metrics["tokens"] == np.sum(tokens.mask) and metrics["nonfinite"] == 0
  assert step._cache_size() == 1 and state.updates == 3


def test_the_number_of_microbatches_is_traced_and_their_size_does_not_matter():
  results = []
  for rows in (4, 8):
    step, state = built()
    tokens, plan = batch(rows=rows)
    state, metrics = step(state, tokens, plan.microbatches)
    results.append((state.params, metrics))
  for other in results[1:]:
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=2e-5, atol=1e-5), other, results[0])


def test_the_state_is_donated_and_the_parameters_it_began_with_are_not():
  start = params()
  step, state = built(start=start)
  tokens, plan = batch()
  new, _ = step(state, tokens, plan.microbatches)
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
  assert not any(x.is_deleted() for x in jax.tree.leaves(start))
  jax.tree.map(lambda x, y: x + y, new.params, start)


def test_a_loss_that_is_not_finite_changes_nothing_and_says_so():
  step, state = built()
  tokens, plan = batch()
  spoiled = dataclasses.replace(tokens, advantage=np.where(tokens.mask, np.float32(np.nan), tokens.advantage))
  before = jax.tree.map(np.asarray, state)
  state, metrics = step(state, spoiled, plan.microbatches)
  assert metrics["nonfinite"] == 1 and not np.isfinite(metrics["loss"])
  jax.tree.map(assert_array_equal, state, before)
  state, metrics = step(state, tokens, plan.microbatches)
  assert metrics["nonfinite"] == 0 and state.updates == 1


def test_equal_rewards_give_no_gradient():
  r = tiny.ragged(ref=True)
  tokens, plan = pack(
    prepare(grpo, dataclasses.replace(r, reward=np.full(16, 0.35, np.float32))), row_tokens=48, rows=8
  )
  step, state = built()
  _, metrics = step(state, tokens, plan.microbatches)
  assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and metrics["clip_fraction"] == 0


def test_metrics_are_means_over_kept_tokens():
  tokens, plan = batch()
  scores = scorer_of()(params(), tokens, plan.microbatches)
  logp, entropy, m = np.asarray(scores.logp), np.asarray(scores.entropy), tokens.mask
  step, state = built()
  _, metrics = step(state, tokens, plan.microbatches)
  d, ratio = logp - tokens.logp_rollout, np.exp(logp - tokens.logp_old)
  binds = np.where(tokens.advantage > 0, ratio > 1.2, ratio < 0.8) & (tokens.advantage != 0)
  ref = tokens.logp_ref - logp
  want = {
    "entropy": entropy, "clip_fraction": binds, "kl/rollout_train": np.exp(d) - 1 - d, "logp_gap/mean": np.abs(d),
    "kl/ref": np.exp(ref) - 1 - ref,
  }  # fmt: skip
  for name, values in want.items():
    assert_allclose(metrics[name], values[m].mean(), rtol=1e-5, err_msg=name)
  assert_allclose(metrics["logp_gap/max"], np.abs(d)[m].max(), rtol=1e-5)
  assert 0.05 < metrics["clip_fraction"] < 0.95


def test_the_gap_is_zero_against_its_own_scores():
  r = tiny.ragged(ref=True)
  tokens, plan = pack(plain(r), row_tokens=48, rows=8)
  logp = unpack(scorer_of()(params(), tokens, plan.microbatches).logp, plan)
  tokens, plan = pack(prepare(grpo, dataclasses.replace(r, logp_rollout=logp, logp_old=logp)), row_tokens=48, rows=8)
  step, state = built()
  _, metrics = step(state, tokens, plan.microbatches)
  assert metrics["logp_gap/max"] < 1e-5 and metrics["kl/rollout_train"] < 1e-9 and metrics["clip_fraction"] == 0


def test_stale_data_makes_the_ratio_differ_from_one():
  r = tiny.ragged(ref=True)
  tokens, plan = pack(plain(r), row_tokens=48, rows=8)
  logp = unpack(scorer_of()(params(), tokens, plan.microbatches).logp, plan)
  tokens, plan = pack(prepare(grpo, dataclasses.replace(r, logp_old=logp)), row_tokens=48, rows=8)
  step, state = built()
  state, first = step(state, tokens, plan.microbatches)
  state, second = step(state, tokens, plan.microbatches)
  assert first["clip_fraction"] == 0 < second["clip_fraction"]


def test_supervised_fine_tuning_learns():
  step, state = built(sft, optax.adam(3e-2))
  tokens, plan = batch(sft)
  losses = []
  for _ in range(60):
    state, metrics = step(state, tokens, plan.microbatches)
    losses.append(float(metrics["loss"]))
  assert losses[0] > 4 and losses[-1] < 1.5


def test_scorer_leaves_other_microbatches_alone_and_compiles_once():
  tokens, _ = pack(plain(tiny.ragged(ref=True)), row_tokens=24, rows=8)
  scorer = scorer_of()
  before = scorer._cache_size()
  some, every = scorer(params(), tokens, 1).logp, scorer(params(), tokens, 2).logp
  assert_array_equal(some[0], every[0])
  assert not np.asarray(some[1]).any() and np.asarray(every[1]).any() and scorer._cache_size() == before + 1


@thinned("name, sizes", ["dapo", "gspo"], [dict(data=8), dict(data=2, fsdp=2, tensor=2)], every=4)
def test_eight_devices_equal_one(name, sizes):
  method = PRESETS[name]
  method = dataclasses.replace(method, objective=dataclasses.replace(method.objective, terms=((0.1, kl_reverse),)))
  tokens, plan = batch(method, ref=True)
  results = []
  for mesh in (one_device(), make_mesh(config.Mesh(**sizes))):
    step, state = built(method, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), mesh)
    where = jax.tree.map(lambda x: x.sharding, state)
    state, metrics = step(state, tokens, plan.microbatches)
    kept = jax.tree.map(np.asarray, (metrics, state.params))
    assert jax.tree.map(lambda x: x.sharding, state) == where
    step(state, tokens, plan.microbatches)
    assert step._cache_size() == 1
    results.append(kept)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-5, atol=1e-5), *results)


def test_optimizer_statistics_lie_beside_their_parameters():
  mesh = make_mesh(config.Mesh(data=2, fsdp=4))
  _, state = built(tx=optax.adamw(1e-3), mesh=mesh)
  assert not state.params["q"].sharding.is_fully_replicated
  moments = state.opt_state[0]
  for tree in (moments.mu, moments.nu):
    assert jax.tree.map(lambda x: x.sharding, tree) == jax.tree.map(lambda x: x.sharding, state.params)
  assert moments.count.sharding.is_fully_replicated


@pytest.mark.slow
def test_muon_on_a_mesh_is_logged_and_equals_one_device():
  tokens, plan = batch()
  results = []
  for mesh in (one_device(), make_mesh(config.Mesh(data=2, fsdp=2, tensor=2))):
    layout = param_shardings(POLICY.axes, params(), mesh=mesh)
    tx = make_optimizer(config.Optimizer(name="muon", learning_rate=1e-2), updates=1, mesh=mesh, layout=layout)
    step, state = built(tx=tx, mesh=mesh)
    where = jax.tree.map(lambda x: x.sharding, state)
    state, metrics = step(state, tokens, plan.microbatches)
    assert jax.tree.map(lambda x: x.sharding, state) == where
    results.append(jax.tree.map(np.asarray, (metrics, state.params)))
  assert {"muon/update_rms", "muon/spectral_norm", "muon/effective_rank"} <= set(results[0][0])
  assert_allclose(results[0][0]["muon/update_rms"], 0.2, rtol=0.2)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-4, atol=1e-5), *results)


def test_trackers_are_initialised_and_carried():
  class Mean:
    columns = ("mean",)

    def init(self):
      return {"mean": jnp.zeros(3)}

    def update(self, state, rollouts):
      return state, {}

  method = dataclasses.replace(grpo, trackers=(Mean(),))
  mesh = one_device()
  state = init_state(POLICY, method, SGD, params(), mesh=mesh)
  assert_array_equal(state.trackers[0]["mean"], np.zeros(3))
  step = make_train_step(POLICY, method, SGD, mesh=mesh, chunk=64)
  out, _ = jax.eval_shape(step, state, batch()[0], 1)
  assert jax.tree.structure(out) == jax.tree.structure(state)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [{}, dict(experts=4, experts_per_token=2, expert_width=32)], ids=["dense", "moe"])
def test_eight_devices_equal_one_with_the_decoder(experts):
  shape = DecoderConfig(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64, **experts)
  policy = decoder_policy(shape)
  start, (tokens, plan), results = policy.init(jax.random.key(0)), batch(), []
  for sizes in (None, dict(data=2, fsdp=2, tensor=2), dict(data=2, tensor=2, expert=2)):
    mesh = one_device() if sizes is None else make_mesh(config.Mesh(**sizes))
    state = init_state(policy, grpo, optax.sgd(1.0), start, mesh=mesh)
    step = make_train_step(policy, grpo, optax.sgd(1.0), mesh=mesh, chunk=64)
    state, metrics = step(state, tokens, plan.microbatches)
    results.append(jax.tree.map(np.asarray, (metrics, state.params)))
  for other in results[1:]:
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-5, atol=1e-5), other, results[0])
