"""The loop: what a step is made of, and that a run is a function of its config and its step."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from luck import TINY, Luck, LuckyTasks
from thinned import thinned
from tiny import ragged

from jaxagent import config as configuration
from jaxagent.methods import credit, grpo, grpo_kl, otc, spo_plus_plus, weigh
from jaxagent.training import loop
from jaxagent.training.build import build
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.phases import NonFinite

MOE = {"width": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_width": 8}


def tiny(**changes) -> configuration.Config:
  return configuration.load(None, {**TINY, **{k.replace("__", "."): v for k, v in changes.items()}})


def run(config, *, hooks=None, resume=False, parts=None, **arguments):
  records = []
  parts = parts or build(config, env=LuckyTasks(), **arguments)
  hooks = dataclasses.replace(hooks or loop.Hooks(), record=records.append)
  return loop.train(config, parts, hooks=hooks, resume=resume), records


def flat(state):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(state))])


def test_a_run_records_every_promised_metric_and_learns_nothing_silently():
  state, records = run(tiny())
  assert [r["step"] for r in records] == [1, 2, 3, 4] and {r["phase"] for r in records} == {"train"}
  promised = {
    "reward/mean", "success/mean", "loss", "grad_norm", "entropy", "kl/rollout_train", "logp_gap/max", "logp_gap/mean",
    "clip_fraction", "groups/equal_reward_share", "rollouts/valid", "rollouts/truncated", "rollouts/failed",
    "tokens_per_second/rollout", "tokens_per_second/update", "time/rollout", "time/update", "time/step",
  }  # fmt: skip
  for record in records:
    assert promised <= set(record)
    assert all(np.isfinite(v) for v in record.values() if isinstance(v, float))
    assert record["logp_gap/max"] < 1e-4 and record["rollouts/valid"] == 8
  assert int(state.train.updates) == 4 and any(r["grad_norm"] > 0 for r in records)


@thinned("method", [grpo_kl(0.1), grpo], every=2)
def test_two_n_steps_equal_n_steps_a_resume_and_n_steps(tmp_path, method):
  whole, records = run(tiny(), method=method)
  half = tiny(run__steps=2)
  with Checkpointer(tmp_path) as checkpointer:
    run(half, hooks=loop.Hooks(checkpointer=checkpointer), method=method)
  with Checkpointer(tmp_path) as checkpointer:
    resumed, rest = run(tiny(), hooks=loop.Hooks(checkpointer=checkpointer), resume=True, method=method)
  np.testing.assert_array_equal(flat(whole), flat(resumed))
  clock = ("time/", "tokens_per_second/")
  kept = [{k: v for k, v in r.items() if not k.startswith(clock)} for r in (*records[2:], *rest)]
  assert kept[:2] == kept[2:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["rollout", "update"])
def test_a_signal_saves_the_last_finished_step(tmp_path, number, where):
  class Knock(Luck):
    async def step(self, actions):
      if where == "rollout" and knocks[0] == 13:
        os.kill(os.getpid(), number)
      knocks[0] += 1
      return await super().step(actions)

  knocks, config = [0], tiny()
  parts = build(config, env=LuckyTasks(environment=Knock))

  def on_rollouts(step, rollouts, trajectories):
    if where == "update" and step == 2:
      os.kill(os.getpid(), number)

  with Checkpointer(tmp_path) as checkpointer:
    hooks = loop.Hooks(checkpointer=checkpointer, rollouts=on_rollouts)
    with pytest.raises(KeyboardInterrupt):
      run(config, hooks=hooks, parts=parts)
    finished = checkpointer.latest()
    assert finished == (1 if where == "rollout" else 2)
    knocks[0] = 100
    resumed, _ = run(config, hooks=loop.Hooks(checkpointer=checkpointer), parts=parts, resume=True)
  whole, _ = run(config)
  np.testing.assert_array_equal(flat(whole), flat(resumed))


def test_a_batch_that_is_not_finite_is_kept_and_not_applied(tmp_path):
  kept = []
  config = tiny()
  poison = optax.chain(optax.stateless(lambda g, p: jax.tree.map(lambda x: x, g)), optax.sgd(1.0))
  surrogate = lambda logp, advantage: jnp.where(advantage == 0, 0.0, logp * jnp.inf)  # noqa: E731
  method = dataclasses.replace(grpo, objective=dataclasses.replace(grpo.objective, surrogate=surrogate))
  hooks = loop.Hooks(dump=lambda step, *batch: kept.append((step, batch)) or "the dump")
  with pytest.raises(NonFinite, match="the batch is kept in the dump"):
    run(config, hooks=hooks, method=method, tx=poison)
  assert len(kept) == 1


@pytest.mark.slow
def test_epochs_and_minibatches_clip_against_the_parameters_before_the_first_update():
  config = tiny(training__epochs=2, training__minibatches=2, optimizer__learning_rate=0.05)
  state, records = run(config)
  assert int(state.train.updates) == 16
  assert max(r["clip_fraction"] for r in records) > 0
  assert max(r["logp_gap/max"] for r in records) < 1e-4


@pytest.mark.slow
def test_the_gap_between_sampler_and_trainer_does_not_grow_over_thirty_updates():
  _, records = run(tiny(run__steps=30, optimizer__learning_rate=3e-3))
  gaps = [r["logp_gap/max"] for r in records]
  assert max(gaps) < 1e-4


@pytest.mark.slow
def test_a_mixture_replays_what_the_sampler_used():
  config = tiny(model__shape=MOE, run__steps=3, optimizer__learning_rate=1e-2)
  _, records = run(config)
  assert max(r["logp_gap/max"] for r in records) < 1e-4
  assert all(0 <= r["routing/rerouted_tokens"] < 0.05 for r in records)


def test_warm_start_lowers_the_loss_and_stops_where_told(tmp_path):
  config = tiny(sft__steps=30, sft__batch=8, sft__eval_every=10, sft__stop_at=0.5, run__steps=0)
  parts, records = build(config), []
  held_out = iter([0.1, 0.6])
  hooks = loop.Hooks(record=records.append, evaluate=lambda engine: {"eval/success": next(held_out, 1.0)})
  loop.train(config, parts, hooks=hooks)
  losses = [r["loss"] for r in records if r["phase"] == "sft" and "loss" in r]
  assert len(losses) == 20 and losses[-1] < losses[0] - 0.2


def test_failures_of_the_environment_are_counted_and_train_nothing():
  class Broken(Luck):
    async def step(self, actions):
      calls[0] += 1
      if calls[0] % 4 == 0:
        raise OSError("the tool's machine is gone")
      return await super().step(actions)

  calls = [0]
  config = tiny(run__steps=2)
  _, records = run(config, parts=build(config, env=LuckyTasks(environment=Broken)))
  assert [r["rollouts/failed"] for r in records] == [2, 2] and [r["rollouts/valid"] for r in records] == [6, 6]


@pytest.mark.parametrize(
  "changes, method, message",
  [
    ({}, "value", "reads value, but the run has no critic"),
    ({"rollout__top_p": 0.9}, "tis", "biased"),
  ],
)
def test_what_a_method_cannot_do_is_said_before_anything_runs(changes, method, message):
  slots = {"value": lambda value: value, "tis": lambda logp_old, logp_rollout: jnp.exp(logp_old - logp_rollout)}
  chosen = dataclasses.replace(grpo, objective=dataclasses.replace(grpo.objective, weight=(slots[method],)))
  with pytest.raises(ValueError, match=message):
    run(tiny(**changes), method=chosen)


@pytest.mark.slow
def test_a_memory_too_small_for_the_tasks_is_an_error():
  with pytest.raises(ValueError, match=r"task must hold ids in \[0, 2\)"):
    run(tiny(run__steps=2), method=spo_plus_plus(tasks=2))  # the second step has tasks 2 and 3


@pytest.mark.slow
def test_what_the_environment_says_is_the_method_s_column():
  """A preset that declares a column without a source takes it from the steps."""

  class Frugal(Luck):
    async def step(self, actions):
      return dataclasses.replace(await super().step(actions), info={"columns": {"tool_cost": 1.0}})

  config = tiny(run__steps=1)
  parts = build(config, env=LuckyTasks(environment=Frugal), method=otc())
  assert np.isfinite(run(config, parts=parts)[1][0]["loss"])
  with pytest.raises(ValueError, match="nothing provides tool_cost"):
    run(config, method=otc())


def test_fewer_tasks_than_prompts_is_an_error():
  config = tiny()
  with pytest.raises(ValueError, match=r"has 1 tasks but rollout\.prompts is 2"):
    run(config, parts=build(config, env=LuckyTasks(1)))


class Mean:
  """The running mean of the rewards, as a baseline."""

  columns = ("baseline",)

  def init(self):
    return jnp.zeros(())

  def update(self, state, rollouts):
    return 0.5 * state + 0.5 * rollouts.reward.mean(), {"baseline": jnp.full(rollouts.reward.shape, state)}


class Length:
  columns = ("written", "place")

  async def __call__(self, trajectories, tools):
    assert len({t.group for t in trajectories}) == 1 and tools.chat.eot
    return {"written": [sum(t.action) for t in trajectories], "place": [np.arange(len(t.tokens)) for t in trajectories]}


@pytest.mark.slow
def test_memories_and_facts_reach_the_objective_and_the_memory_survives(tmp_path):
  seen = []

  def less_baseline(reward, baseline, written, place, mask):
    jax.debug.callback(lambda *x: seen.append(x), baseline[0], written, (place == jnp.arange(place.shape[1])) | ~mask)
    return reward - baseline

  method = dataclasses.replace(
    grpo,
    objective=dataclasses.replace(grpo.objective, advantage=(less_baseline,)),
    trackers=(Mean(),),
    annotators=(Length(),),
  )
  whole, records = run(tiny(), method=method)
  jax.effects_barrier()
  assert all((np.asarray(written) > 0).all() and np.asarray(right).all() for _, written, right in seen)
  expected = 0.0
  for record in records:
    expected = 0.5 * expected + 0.5 * record["reward/mean"]
  np.testing.assert_allclose(whole.train.trackers[0], expected, rtol=1e-6)
  with Checkpointer(tmp_path) as checkpointer:
    run(tiny(run__steps=2), hooks=loop.Hooks(checkpointer=checkpointer), method=method)
    resumed, _ = run(tiny(), hooks=loop.Hooks(checkpointer=checkpointer), resume=True, method=method)
  np.testing.assert_array_equal(flat(whole), flat(resumed))


SLIDING = {**TINY["model.shape"], "attention": "prefix_sliding", "window": 4, "max_prefix": 48}


def test_a_sliding_policy_trains_on_the_last_window_and_scores_it_as_it_sampled_it():
  """Rollouts of 8 tokens after the prompt, of which the last 4 have a loss; 4 windows are exact for two layers."""
  method = dataclasses.replace(grpo_kl(0.1), metrics=(("advantage", lambda advantage, mask: (advantage * mask).max()),))
  _, records = run(tiny(model__shape=SLIDING, training__backprop_windows=4, training__minibatches=2), method=method)
  for record in records:
    assert record["tokens"] <= 4 * 8 < record["rollouts/sampled_tokens"] and record["logp_gap/max"] < 1e-4
    assert record["method/advantage"] > 0


def test_advantages_are_those_of_whole_rollouts():
  """A reward that counts the tokens that were sampled is not changed by what is cut afterwards."""

  def counted(mask, outcome):
    return outcome + mask.sum(-1)

  parts = build(tiny(model__shape=SLIDING, training__backprop_windows=1), env=LuckyTasks())
  method = dataclasses.replace(grpo, reward=(counted,))
  whole, _ = credit(method, ragged())
  cut = loop.truncation(tiny(model__shape=SLIDING, training__backprop_windows=1), parts)(jax.device_get(whole))
  prepared = weigh(method, cut)
  kept, advantage = np.asarray(prepared.keep), np.asarray(whole.columns["advantage"])
  assert 0 < kept.sum() < np.asarray(whole.mask).sum() and kept.sum(1).max() <= 4
  for row, of_row in enumerate(kept):
    assert set(np.asarray(prepared.advantage)[row, of_row]) <= set(advantage[row, np.asarray(whole.mask)[row]])
  assert np.abs(np.asarray(prepared.advantage)).max() > 0


def reads_old(logp_old, mask):
  return (logp_old * mask).sum(-1)


@pytest.mark.parametrize(
  ("shape", "method", "message"),
  [
    (TINY["model.shape"], grpo, "the model has full attention"),
    ({**SLIDING, "attention": ["prefix_sliding", "full"]}, grpo, "full, prefix_sliding attention"),
    (
      SLIDING,
      dataclasses.replace(grpo, objective=dataclasses.replace(grpo.objective, advantage=(reads_old,))),
      "read logp_old of whole rollouts",
    ),
  ],
)
def test_what_cannot_be_cut_is_said_before_anything_runs(shape, method, message):
  with pytest.raises(ValueError, match=message):
    run(tiny(model__shape=shape, training__backprop_windows=4), method=method)
