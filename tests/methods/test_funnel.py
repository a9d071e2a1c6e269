"""Experience Funnel: sampled divergences against sums over the vocabulary, the preset against a loop, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from every_preset import METHODS, dressed
from numpy.testing import assert_allclose

from jaxagent.losses import (
  jensen_shannon,
  sampled_jensen_shannon,
  sampled_student_kl,
  selection_weight,
  student_kl,
)
from jaxagent.methods import Given, credit, experience_funnel, plain, prepare
from jaxagent.methods.funnel import distilled_kl
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.packing import pack, unpack
from jaxagent.rollout.restate import with_prefix
from jaxagent.training.loss import loss
from jaxagent.training.scoring import score
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import init_state, make_train_step
from jaxagent.types import Completion, PerTurn, Trajectory

P, Q = (jnp.asarray(np.random.default_rng(i).normal(size=(5, 11)) * 2, jnp.float32) for i in (0, 1))


def test_means_over_the_vocabulary_are_the_divergences():
  log_p, log_q = jax.nn.log_softmax(P), jax.nn.log_softmax(Q)
  teacher = jnp.exp(log_p)
  assert_allclose(jnp.sum(teacher * sampled_jensen_shannon(log_p, log_q), -1), jensen_shannon(P, Q), rtol=1e-5)
  assert_allclose(jnp.sum(teacher * sampled_student_kl(log_q, log_p, limit=80.0), -1), student_kl(Q, P), rtol=1e-5)


def test_the_mean_gradient_is_that_of_the_divergence():
  log_p = jax.nn.log_softmax(P)
  sampled = lambda q: jnp.sum(jnp.exp(log_p) * sampled_student_kl(jax.nn.log_softmax(q), log_p, limit=80.0))  # noqa: E731
  assert_allclose(jax.grad(sampled)(Q), jax.grad(lambda q: jnp.sum(student_kl(q, P)))(Q), rtol=1e-4, atol=1e-6)


def test_single_tokens():
  d = np.array([0.0, 1.0, -2.0, 15.0, -100.0])
  assert_allclose(sampled_student_kl(d, 0 * d), [0, 1, 1 - 3 * np.exp(-2), 9 * np.exp(10) + 1, 1], rtol=1e-6)
  u = np.exp(d[:3])
  want = (u * np.log(u) - (1 + u) * np.log((1 + u) / 2)) / 2
  assert_allclose(sampled_jensen_shannon(0 * d[:3], d[:3]), want, rtol=1e-5, atol=1e-12)
  assert np.isfinite(sampled_jensen_shannon(np.array([-1e9, 0.0]), np.array([0.0, -1e9]))).all()
  assert jax.grad(sampled_student_kl)(20.0, 0.0) == 0


def test_token_weights_against_a_loop():
  r = tiny.ragged(ref=True)
  r = dressed(r, r.logp_rollout, np.nan)
  c, p = r.columns, prepare(METHODS["experience_funnel"], r)
  live = r.mask & r.valid[:, None]
  free = c["selection"] < 0
  weight, total = np.zeros(live.shape), 0.0
  for i in np.flatnonzero(~free & r.valid):
    d = np.where(live[i], r.logp_old[i] - c["logp_privileged"][i], 0.0).astype(np.float64)
    u = np.exp(d)
    j = np.where(live[i], (u * d - (1 + u) * np.log((1 + u) / 2)) / 2, 0)
    if live[i].any() and j.any():
      weight[i] = c["selection"][i] * j / (j.sum() / live[i].sum() + 1e-8)
      total += c["selection"][i] * live[i].sum()
  assert total > 0
  assert_allclose(p.rollouts.columns["distilled"] * p.aggregate, weight / total, rtol=2e-4, atol=1e-6)
  assert_allclose(np.sum(p.aggregate[~free]), 1, rtol=1e-5)
  of_rollout = {k: live[free & (r.rollout == k)].sum() for k in r.rollout}  # GRPO's mean over rollouts
  rollouts = sum(tokens > 0 for tokens in of_rollout.values())
  for i in np.flatnonzero(free):
    assert_allclose(p.aggregate[i], live[i] / max(rollouts * of_rollout[r.rollout[i]], 1), rtol=1e-5)
  assert (p.advantage[~free] == 0).all() and np.abs(p.advantage[free]).max() > 0
  metrics = credit(METHODS["experience_funnel"], r)[1]
  assert_allclose(metrics["distilled/rows"], (~free & r.valid).sum() / r.valid.sum(), rtol=1e-6)


def test_numbers_that_are_none_are_not_left_out():
  """A NaN among the log-probs of a distilled row reaches the loss, where the loop stops at it."""
  r = tiny.ragged(ref=True)
  r = dressed(r, r.logp_rollout, 0.0)
  row = np.flatnonzero((r.columns["selection"] > 0) & r.valid & r.mask.any(1))[0]
  at = np.flatnonzero(r.mask[row])[0]
  spoiled = r.columns["logp_privileged"].copy()
  spoiled[row, at] = np.nan
  method = METHODS["experience_funnel"]
  p = prepare(method, dataclasses.replace(r, columns={**r.columns, "logp_privileged": spoiled}))
  own = {k: p.rollouts.columns[k] for k in ("logp_privileged", "distilled")}
  assert np.isnan(distilled_kl(r.logp_rollout, **own)[row, at])
  bad = np.where(np.arange(16) == row, np.nan, r.columns["selection"])
  with pytest.raises(ValueError, match="selection must lie in"):
    prepare(method, dataclasses.replace(r, columns={**r.columns, "selection": bad}))


def test_edges_of_the_sampled_divergence():
  assert sampled_student_kl(-np.inf, -1.0) == 1 and np.isfinite(sampled_student_kl(0.0, -np.inf))
  for limit in (0.0, -1.0, 100.0, np.nan):
    with pytest.raises(ValueError, match="limit must lie in"):
      sampled_student_kl(0.0, 0.0, limit=limit)


def test_rows_with_the_state_change_nothing_for_those_without():
  r = tiny.ragged(ref=True)
  r = dressed(r, r.logp_rollout, np.nan)
  other = np.where(r.columns["selection"] < 0, r.reward, 1 - r.reward)
  method = METHODS["experience_funnel"]
  a, b = prepare(method, r), prepare(method, dataclasses.replace(r, reward=other))
  assert_allclose(a.advantage, b.advantage)


def finished(prompt, action, **changes):
  t = Trajectory(task=0, group=0, rollout=0, **changes)
  t.append_context(prompt)
  n = len(action)
  logp = -0.1 * np.arange(1, n + 1)
  routing = np.zeros((len(prompt) + n - 1, 1, 1), np.int16)
  t.append_action(Completion(np.array(action), logp, logp, np.full(n, 4), "stop", np.zeros(n), routing))
  t.status = "done"
  return t


def test_another_first_prompt():
  t = finished([5, 6, 7], [1, 2])
  t.columns = {"judged": np.arange(5.0), "whole": 3, "turns": PerTurn([0.5])}
  t.append_context([9])
  t.columns["judged"] = np.arange(6.0)
  moved = with_prefix(t, [8])
  assert (moved.tokens, moved.prefix_length) == ([8, 1, 2, 9], 1)
  assert moved.action == [False, True, True, False] and moved.turn == [-1, 0, 0, -1] and moved.version == [-1, 4, 4, -1]
  assert_allclose(moved.logp_rollout, [0, -0.1, -0.2, 0])
  assert_allclose(moved.columns["logp_privileged"], [0, -0.1, -0.2, 0])
  assert_allclose(moved.columns["judged"], [0, 3, 4, 5])
  assert moved.columns["whole"] == 3 and moved.columns["turns"] == (0.5,) and moved.routing == []
  assert t.tokens == [5, 6, 7, 1, 2, 9] and "logp_privileged" not in t.columns
  assert_allclose(to_rollouts([moved], tokens=8, turns=2).columns["logp_privileged"][0, :4], [0, -0.1, -0.2, 0])


@pytest.mark.parametrize(
  ("change", "prefix", "message"),
  [
    ({"status": "running"}, [1], "finished rollout"),
    ({"prefix_length": 0}, [1], "a prompt of 0"),
    ({}, [], "at least one token"),
    ({}, [1.5], "must be token ids"),
    ({}, [-1], "must be token ids"),
  ],
)
def test_what_cannot_be_moved(change, prefix, message):
  with pytest.raises(ValueError, match=message):
    with_prefix(dataclasses.replace(finished([5, 6], [1]), **change), prefix)


@pytest.mark.slow
def test_the_policy_learns_what_the_state_told_it():
  """A teacher that sees the state answers 3; the policy that does not see it comes to do the same."""
  policy = tiny.tiny_policy()
  params = policy.init(jax.random.key(0))
  prompt, state = [7, 8], [9, 9, 7, 8]
  selection = selection_weight(np.zeros(8), np.zeros(8), np.tile([1.0, 0.0], 4))
  rows = []
  for i, weight in enumerate(np.asarray(selection)):
    told = with_prefix(finished(state, [3 if weight else 5]), prompt)
    told.columns = {"logp_privileged": np.array([0, 0, -0.05], np.float32), "selection": float(weight)}
    free = finished(prompt, [4])
    free.columns = {"logp_privileged": np.zeros(3, np.float32), "selection": -1.0}
    rows += [dataclasses.replace(t, rollout=2 * i + j) for j, t in enumerate((told, free))]
  r = to_rollouts(rows, tokens=4, turns=1)
  tokens, plan = pack(plain(r), row_tokens=4, rows=16, microbatches=1)
  run = jax.jit(partial(score, policy, chunk=64))
  one = jax.tree.map(lambda x: x[0], tokens)
  r = dataclasses.replace(r, logp_old=unpack(np.asarray(run(params, one).logp)[None], plan))

  method = experience_funnel(annotator=Given(("selection", "logp_privileged")))
  batch, plan = pack(prepare(method, r), row_tokens=4, rows=16, microbatches=1)
  mesh, tx = make_mesh(devices=jax.devices()[:1]), optax.adam(1e-2)
  step = make_train_step(policy, method, tx, mesh=mesh, chunk=64)
  train = init_state(policy, method, tx, params, mesh=mesh)
  before = loss(policy, method.objective, params, jax.tree.map(lambda x: x[0], batch), chunk=64)[0]
  for _ in range(30):
    train, metrics = step(train, batch, 1)
  logp = unpack(np.asarray(run(train.params, one).logp)[None], plan)
  first = r.logp_old[np.arange(16), r.length - 1], logp[np.arange(16), r.length - 1]
  chosen = np.repeat(np.asarray(selection) > 0, 2) & (r.columns["selection"] > 0)
  assert metrics["loss"] < 0.5 * before and np.all(first[1][chosen] > -0.5) and np.all(first[0][chosen] < -1)
  ignored = r.columns["selection"] == 0
  assert np.all(first[1][ignored] < first[0][ignored])  # not imitated: its probability goes to the answer
