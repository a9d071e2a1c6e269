"""The critic: what its values are, what its updates fit, and in which order a step does what."""

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

from jaxagent import config as configuration
from jaxagent import run as runs
from jaxagent.advantages import value_targets
from jaxagent.envs.base import Observation, Step
from jaxagent.losses import explained_variance
from jaxagent.methods import Given, credit, grpo, mpo, plain, ppo, t1, vapo
from jaxagent.methods.prepare import returns
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.value import value_model
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training import critic as critics
from jaxagent.training import loop
from jaxagent.training.build import build, critic_updates, total_updates
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.critic import Fit, make_critic_step, make_value_scorer, to_fit, value_loss
from jaxagent.training.phases import NonFinite
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import init_state

POLICY = tiny.tiny_policy()
MODEL = value_model(POLICY)
SGD = optax.sgd(1.0)


def params(seed=0):
  """With a head that is not zero."""
  p = MODEL.init(jax.random.key(seed))
  return {**p, "value_head": 0.3 * jax.random.normal(jax.random.key(seed + 1), p["value_head"].shape)}


def one_device():
  return make_mesh(devices=jax.devices()[:1])


@functools.cache
def scorer():
  return make_value_scorer(MODEL, mesh=one_device())


def scored(p, r, row_tokens, rows):
  batch, plan = pack(plain(r), row_tokens=row_tokens, rows=rows)
  return tuple(unpack(x, plan) for x in jax.device_get(scorer()(p, batch, plan.microbatches)))


def reference(p, r):
  """Values after each token of each row, every row alone and whole."""
  out = np.zeros(r.tokens.shape, np.float32)
  for n in np.flatnonzero(r.valid & (r.length > 0)):
    length = r.length[n]
    row = jnp.asarray(r.tokens[n, :length])[None]
    states = POLICY.forward(p["trunk"], row, jnp.arange(length)[None], jnp.zeros_like(row)).states
    out[n, :length] = (states @ p["value_head"])[0, :, 0]
  return out


# values


@pytest.mark.parametrize("row_tokens, rows", [(tiny.T, 16), (3 * tiny.T, 2)])
def test_values_are_those_of_a_full_forward_before_each_token_and_after_it(row_tokens, rows):
  r, p = tiny.ragged(), params()
  before, after = scored(p, r, row_tokens, rows)
  want, inside = reference(p, r), np.arange(tiny.T) < np.where(r.valid, r.length, 0)[:, None]
  assert_allclose(after, want, atol=1e-5)
  assert_allclose(before[:, 1:], np.where(inside[:, 1:], want[:, :-1], 0), atol=1e-5)
  assert not before[:, 0].any() and np.abs(want).max() > 0.1


def test_a_critic_that_begins_has_the_trunk_of_the_policy_and_values_nothing():
  start = POLICY.init(jax.random.key(3))
  adopted = MODEL.adopt(start)
  jax.tree.map(assert_array_equal, adopted["trunk"], start)
  assert not np.asarray(adopted["value_head"]).any() and not scored(adopted, tiny.ragged(), tiny.T, 16)[0].any()
  decoder = decoder_policy(DecoderConfig(8, width=8, layers=1, heads=1, mlp_width=8, tied=False))
  model = value_model(decoder)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert "head" not in shapes["trunk"] and shapes["value_head"].shape == (8, 1)
  assert jax.tree.structure(shapes) == jax.tree.structure(model.axes, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def fit_of(truncated: bool):
  config = tiny_config(critic__bootstrap_truncated=truncated, critic__init="fresh")
  return Fit(config, ppo(), critics.Critic(MODEL, SGD), one_device())


@pytest.mark.parametrize("truncated", [True, False])
def test_only_rollouts_that_were_cut_off_are_bootstrapped_and_only_if_wanted(truncated):
  r, p = tiny.ragged(), params()
  got = fit_of(truncated).valued(init_state(MODEL, critics.WITHOUT_MEMORY, SGD, p, mesh=one_device()), r)
  if not truncated:
    assert got.bootstrap is None
    return
  after = reference(p, r)
  cut = r.truncated & r.valid & (r.length > 0)
  want = np.where(cut, after[np.arange(16), np.maximum(r.length - 1, 0)], 0)
  assert_allclose(got.bootstrap, want, atol=1e-5)
  assert 0 < cut.sum() < 16 and np.abs(want).max() > 0.01


# updates


def batch(r, target, value, rows=16, row_tokens=tiny.T, subset=None):
  return pack(to_fit(dataclasses.replace(r, value=value), target, subset), row_tokens=row_tokens, rows=rows)


def targets(seed=0):
  r = tiny.ragged(seed)
  rng = np.random.default_rng(seed)
  live = r.mask & r.valid[:, None]
  return r, np.where(live, rng.normal(size=live.shape), np.nan), np.where(live, rng.normal(size=live.shape), np.nan)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_is_the_mean_over_all_actions_of_valid_rollouts(clip):
  r, target, old = (np.float32(x) if isinstance(x, np.ndarray) else x for x in targets())
  p = params()
  tokens, _ = batch(r, np.nan_to_num(target), old)
  one = jax.tree.map(lambda x: jnp.asarray(x[0]), tokens)
  total, tally = jax.jit(functools.partial(value_loss, MODEL, clip=clip))(p, one)
  value = np.pad(reference(p, r), ((0, 0), (1, 0)))[:, :-1]
  live = r.mask & r.valid[:, None]
  squares = (value - target) ** 2
  if clip is not None:
    near = old + np.clip(value - old, -clip, clip)
    clipped = live & ((near - target) ** 2 > squares)
    squares = np.maximum(squares, (near - target) ** 2)
    assert tally.sums["clip_fraction"] == clipped.sum() > 0
  assert_allclose(total, 0.5 * squares[live].mean(), rtol=1e-5)
  assert tally.sums["tokens"] == live.sum()


def test_one_update_is_the_gradient_of_the_loss_and_compiles_once():
  step, mesh = make_critic_step(MODEL, SGD, mesh=one_device()), one_device()
  state = init_state(MODEL, critics.WITHOUT_MEMORY, SGD, params(), mesh=mesh)
  slope_of = jax.jit(jax.grad(functools.partial(value_loss, MODEL, clip=0.2), has_aux=True))
  for seed in range(3):
    r, target, old = targets(seed)
    before = jax.tree.map(np.asarray, state.params)
    whole, _ = batch(r, np.nan_to_num(target), old)
    slope, _ = slope_of(before, jax.tree.map(lambda x: jnp.asarray(x[0]), whole))
    tokens, plan = batch(r, np.nan_to_num(target), old, rows=4, row_tokens=2 * tiny.T)
    state, metrics = step(state, tokens, plan.microbatches)
    norm = float(optax.tree.norm(slope))
    jax.tree.map(lambda new, x, g: assert_allclose(new, x - g, atol=1e-5 * norm), state.params, before, slope)  # noqa: B023
    assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  assert step._cache_size() == 1 and state.updates == 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(data=8), dict(data=2, fsdp=4), dict(data=1, fsdp=2, tensor=4)])
def test_eight_devices_make_the_same_update_as_one(sizes):
  updated = []
  for mesh in (one_device(), make_mesh(configuration.Mesh(**sizes))):
    r, target, old = targets()
    tokens, plan = batch(r, np.nan_to_num(target), old, rows=8, row_tokens=2 * tiny.T)
    state = init_state(MODEL, critics.WITHOUT_MEMORY, SGD, params(), mesh=mesh)
    state, metrics = make_critic_step(MODEL, SGD, mesh=mesh)(state, tokens, plan.microbatches)
    values = make_value_scorer(MODEL, mesh=mesh)(state.params, tokens, plan.microbatches)
    updated.append(jax.device_get((state.params, metrics, values)))
  scale = float(updated[0][1]["grad_norm"])
  jax.tree.map(lambda x, y: assert_allclose(y, x, atol=1e-5 * max(scale, 1)), *updated)


def test_values_learn_a_function_of_the_state():
  """The return is 1 where the last prompt token is even: known at the first action, and from then on."""
  r = tiny.ragged(rubbish=0.0)
  last = r.tokens[np.arange(16), np.maximum(r.prefix_length - 1, 0)]
  r = dataclasses.replace(r, reward=np.where(last % 2 == 0, 1.0, 0.0).astype(np.float32))
  tx = optax.adam(3e-3)
  mesh, live = one_device(), r.mask & r.valid[:, None]
  state = init_state(MODEL, critics.WITHOUT_MEMORY, tx, MODEL.init(jax.random.key(0)), mesh=mesh)
  step, score = make_critic_step(MODEL, tx, mesh=mesh), scorer()
  explained = []
  for _ in range(60):
    whole, plan = pack(plain(r), row_tokens=tiny.T, rows=16)
    value = unpack(jax.device_get(score(state.params, whole, plan.microbatches)[0]), plan)
    target = np.asarray(value_targets(r.reward, r.turn_reward, value, live, r.turn))
    explained.append(float(explained_variance(value, target, live)))
    tokens, plan = batch(r, target, value)
    for _ in range(4):
      state, _ = step(state, tokens, plan.microbatches)
    if explained[-1] > 0.95:
      break
  assert abs(explained[0]) < 1e-6 and explained[-1] > 0.9, explained


# in the loop

SLIDING = {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp_width": 16, "attention": "prefix_sliding"}
TINY = {
  "model.shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16},
  "rollout.prompts": 2, "rollout.samples": 4, "rollout.max_turns": 2, "rollout.max_tokens": 96,
  "rollout.max_turn_tokens": 8, "rollout.slots": 8, "training.microbatch_rows": 8, "optimizer.learning_rate": 1e-3,
  "evaluation.tasks": 0, "run.steps": 3, "run.checkpoint_every": 1, "critic.init": "policy",
}  # fmt: skip
MOE = {"width": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_width": 8}
ASSERTIONS = Given(("assertions_passed",), lambda t: {"assertions_passed": int(sum(t.tokens)) % 9})
METHODS = {"ppo": ppo(), "vapo": vapo(), "mpo": mpo(), "t1": t1(annotator=ASSERTIONS)}


class Luck:
  """Two turns; the outcome is the parity of what was written, and a third of the trials is cut off."""

  tool_format = None

  async def reset(self, seed):
    self.said, self.turns = seed, 0
    return {0: Observation(({"role": "user", "content": str(seed % 10)},))}

  async def step(self, actions):
    self.said, self.turns = self.said + sum(map(ord, actions[0].text)), self.turns + 1
    if self.turns == 2 or self.said % 3 == 0:
      return Step(outcome=float(self.said % 2), status="truncated" if self.said % 3 == 1 else "done")
    return Step({0: Observation(({"role": "user", "content": "so"},))}, turn_rewards={0: 0.1})

  async def close(self):
    pass


class Tasks:
  def size(self, split):
    return None

  def environment(self, split, index):
    return Luck(), index


def tiny_config(**changes):
  return configuration.load(None, {**TINY, **{k.replace("__", "."): v for k, v in changes.items()}})


def run(config, method, *, hooks=None, resume=False, **arguments):
  records = []
  hooks = dataclasses.replace(hooks or loop.Hooks(), record=records.append)
  parts = build(config, env=Tasks(), method=method, **arguments)
  return loop.train(config, parts, hooks=hooks, resume=resume), records


def flat(state):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(state))])


def check_three_steps(method, **changes):
  state, records = run(tiny_config(**changes), method)
  promised = {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/clip_fraction", "time/critic"}
  for record in records:
    assert promised <= set(record) and record["nonfinite"] == 0
    assert all(np.isfinite(record[k]) for k in ("critic/loss", "critic/grad_norm", "loss", "grad_norm"))
  assert records[0]["critic/grad_norm"] > 0 and 0 < records[0]["critic/loss"]
  assert np.abs(np.asarray(state.critic.params["value_head"])).max() > 0
  assert int(state.critic.updates) == int(state.train.updates) == 3


@pytest.mark.parametrize("name", METHODS)
def test_every_preset_that_reads_values_trains_its_critic(name):
  assert critics.reads_value(METHODS[name])
  check_three_steps(METHODS[name], critic__bootstrap_truncated=name != "t1")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_mixture_trains_a_critic_without_replay(name):
  check_three_steps(METHODS[name], model__shape=MOE)


@pytest.mark.parametrize("name, lam", [("ppo", 0.95), ("vapo", 1.0), ("mpo", 1.0), ("t1", 1.0)])
def test_what_the_critic_of_a_preset_learns(name, lam):
  """Advantage + value by a loop over the actions of each row, from the rewards that the preset trains on."""
  r = tiny.ragged(rubbish=0.0)
  live, value = r.mask & r.valid[:, None], targets()[1]
  r = dataclasses.replace(r, value=value.astype(np.float32), bootstrap=0.1 * np.arange(16, dtype=np.float32))
  if name == "t1":
    r = dataclasses.replace(r, columns={"assertions_passed": np.arange(16)})
  with pytest.raises(ValueError, match="pass it through credit first"):
    returns(METHODS[name], r)
  credited, _ = credit(METHODS[name], r)
  got, reward = np.asarray(returns(METHODS[name], credited)), np.asarray(credited.reward)
  assert not got[~live].any()
  for n in np.flatnonzero(live.any(1)):
    after, advantage, received = r.bootstrap[n], 0.0, reward[n]
    for t in reversed(np.flatnonzero(live[n])):
      advantage = received + after - value[n, t] + lam * advantage
      assert_allclose(got[n, t], advantage + value[n, t], rtol=1e-4, atol=1e-5)
      after, received = value[n, t], 0.0


@pytest.mark.slow
def test_values_are_of_whole_rollouts_where_the_policy_is_trained_on_their_ends():
  shape = {**SLIDING, "window": 4, "max_prefix": 48}
  seen, original = [], Fit.__call__
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Fit, "__call__", lambda *a, **k: seen.append(float(np.sum(a[2].mask))) or original(*a, **k))
    _, records = run(tiny_config(model__shape=shape, training__backprop_windows=2), ppo())
  for whole, record in zip(seen, records, strict=True):
    assert whole == record["rollouts/sampled_tokens"] > record["tokens"] > 0
    assert np.isfinite(record["critic/loss"]) and record["logp_gap/max"] < 1e-4


def test_two_n_steps_equal_n_steps_a_resume_and_n_steps(tmp_path):
  options = dict(critic__epochs=2, critic__minibatches=2, training__minibatches=2, critic__warmup_steps=1)
  whole, records = run(tiny_config(run__steps=4, **options), ppo())
  with Checkpointer(tmp_path) as checkpointer:
    run(tiny_config(run__steps=2, **options), ppo(), hooks=loop.Hooks(checkpointer=checkpointer))
  with Checkpointer(tmp_path) as checkpointer:
    hooks = loop.Hooks(checkpointer=checkpointer)
    resumed, rest = run(tiny_config(run__steps=4, **options), ppo(), hooks=hooks, resume=True)
  assert_array_equal(flat(whole), flat(resumed))
  assert [r["critic/loss"] for r in records[2:]] == [r["critic/loss"] for r in rest]
  assert int(whole.critic.updates) == 2 + 3 * 4 and int(whole.train.updates) == 3 * 2


def test_a_run_without_a_critic_is_not_resumed_with_one(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    hooks = loop.Hooks(checkpointer=checkpointer)
    run(tiny_config(run__steps=1, critic__init=None), grpo, hooks=hooks)
    with pytest.raises(ValueError, match="has no critic, which this config asks for"):
      run(tiny_config(), ppo(), hooks=hooks, resume=True)


@thinned("freezes", [True, False], every=2)
def test_warm_up_leaves_the_policy_alone_if_it_is_told_to(freezes):
  options = dict(critic__warmup_steps=2, critic__warmup_epochs=3, critic__warmup_freezes_policy=freezes)
  config, seen = tiny_config(**options), []
  parts = build(config, env=Tasks(), method=ppo())
  start = jax.device_get(parts.params)
  original = loop.Update.__call__

  def watched(self, state, rollouts, **options):
    state, record = original(self, state, rollouts, **options)
    seen.append((jax.device_get(state.train), int(state.critic.updates), record))
    return state, record

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Update, "__call__", watched)
    loop.train(config, parts)
  assert [updates for _, updates, _ in seen] == [3, 6, 7] == [3, 6, critic_updates(config)]
  assert [int(train.updates) for train, _, _ in seen] == ([0, 0, 1] if freezes else [1, 2, 3])
  assert int(seen[-1][0].updates) == total_updates(config)
  for train, _, record in seen[:2]:
    same = [np.array_equal(x, y) for x, y in zip(jax.tree.leaves(train.params), jax.tree.leaves(start))]
    assert all(same) if freezes else not all(same)
    assert record["logp_gap/max"] < 1e-4 and record["tokens"] > 0 and ("loss" in record) is not freezes


@thinned("name", ["ppo", "mpo"], every=2)
def test_the_policy_is_updated_by_the_values_before_any_update(name):
  """The advantage that reaches the first and the last update of a step is that of the values before the step."""
  config = tiny_config(training__epochs=2, critic__learning_rate_multiple=100.0, run__steps=1)
  parts = build(config, env=Tasks(), method=METHODS[name])
  order, advantages = [], []
  with pytest.MonkeyPatch.context() as patch:
    for cls, attribute in ((Fit, "valued"), (loop.Update, "updated"), (Fit, "__call__")):
      patch.setattr(cls, attribute, noted(cls, attribute, order))
    update = loop.Update(config, parts)
    weigh = update.weigh
    update.weigh = lambda credited, subset: advantages.append(credited) or weigh(credited, subset)
    patch.setattr(loop, "Update", lambda *_: update)
    loop.train(config, parts)
  assert [what for what, *_ in order] == ["valued", "updated", "__call__"]
  valued = order[0][2]
  credited, _ = credit(METHODS[name], valued)
  for seen in advantages:
    assert_allclose(seen.columns["advantage"], credited.columns["advantage"], atol=1e-6)
  assert len(advantages) == 2
  fitted = order[2][1][1]
  assert_allclose(fitted.value, np.where(fitted.mask, valued.value, 0))


def noted(cls, attribute, order):
  original = getattr(cls, attribute)

  def run(self, *arguments, **options):
    result = original(self, *arguments, **options)
    order.append((attribute, arguments, result))
    return result

  return run


def test_the_turns_values_of_mpo_are_those_before_their_first_tokens():
  """Its advantages depend on the values only through token credit once the first tokens' values are kept."""
  r = dataclasses.replace(tiny.ragged(rubbish=0.0), value=None)
  rng = np.random.default_rng(0)
  live = r.mask & r.valid[:, None]
  value = np.where(live, rng.normal(size=live.shape), 0).astype(np.float32)
  first = live & (r.turn != np.pad(r.turn, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
  other = np.where(first, value, 7 * value)
  means = []
  for v in (value, other):
    credited, _ = credit(mpo(), dataclasses.replace(r, value=v))
    a = np.asarray(credited.columns["advantage"])
    means.append([a[n][live[n] & (r.turn[n] == k)].mean() for n in range(14) for k in range(2)])
  assert_allclose(means[0], means[1], atol=1e-5)


@pytest.mark.slow
def test_a_critic_begins_with_that_of_another_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  options = {"run__compilation_cache": None, "tracking__tensorboard": False, "run__steps": 1}
  first = runs.train(tiny_config(**options), method=ppo(), env=Tasks())
  config = tiny_config(critic__init_from="runs/run-1", **options)
  parts = runs.from_run(config, build(config, method=ppo(), env=Tasks()))
  begun, _, _ = loop.warm_start(config, parts, loop.Hooks(), None)
  jax.tree.map(assert_array_equal, begun.critic.params, first.critic.params)
  assert begun.critic.updates == 0 and np.abs(np.asarray(begun.critic.params["value_head"])).max() > 0
  runs.train(tiny_config(critic__init=None, **options), method=grpo, env=Tasks())
  with pytest.raises(ValueError, match="has no critic"):
    runs.from_run(tiny_config(critic__init_from="runs/run-2"), parts)


def test_any_optax_chain_may_be_the_critic_s():
  still = optax.chain(optax.trace(0.0), optax.scale(0.0))
  state, _ = run(tiny_config(), ppo(), critic_tx=still)
  assert not np.asarray(state.critic.params["value_head"]).any() and int(state.critic.updates) == 3


def test_a_critic_that_is_not_finite_stops_the_run_and_says_whose_loss_it_was():
  method = dataclasses.replace(ppo(), returns=lambda mask, reward: jnp.where(mask, jnp.inf, 0.0))
  with pytest.raises(NonFinite, match="the critic's loss or gradient"):
    run(tiny_config(), method)


GIVEN = Given(("value", "bootstrap"), lambda t: {"value": np.zeros(len(t.tokens)), "bootstrap": 0.0})


@pytest.mark.parametrize(
  "method, changes, message",
  [
    (ppo(), {"critic__init": None}, "reads value, but the run has no critic"),
    (grpo, {}, "reads no value from one; remove the section"),
    (grpo, {"critic__init": None, "critic__epochs": 2}, "reads no value from one; remove the section"),
    (dataclasses.replace(ppo(), annotators=(GIVEN,)), {}, "reads no value from one"),
    (dataclasses.replace(ppo(), returns=None), {}, "does not say what a critic is to learn"),
  ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(method, changes, message):
  with pytest.raises(ValueError, match=message):
    run(tiny_config(**changes), method)


def test_a_chain_for_a_critic_that_is_not_there_is_an_error():
  with pytest.raises(ValueError, match="critic_tx is given"):
    build(tiny_config(critic__init=None), env=Tasks(), critic_tx=SGD)


def test_values_from_an_annotator_need_no_critic():
  state, _ = run(tiny_config(critic__init=None), dataclasses.replace(ppo(), annotators=(GIVEN,)))
  assert state.critic is None
