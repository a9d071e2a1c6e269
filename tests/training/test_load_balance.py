"""The balance of a mixture's experts as a term: what it reads of the model, and that the law holds for it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose
from thinned import thinned

from jaxagent import config as configuration
from jaxagent.losses import load_balance, sequence_mean, token_mean
from jaxagent.methods import grpo, plain, prepare
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training.build import build
from jaxagent.training.loop import check_method
from jaxagent.training.loss import loss
from jaxagent.training.sharding import make_mesh

POLICY = decoder_policy(
  DecoderConfig(
    vocab_size=tiny.V,
    width=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    experts=6,
    experts_per_token=2,
    expert_width=8,
  )
)
PARAMS = jax.jit(POLICY.init)(jax.random.key(0))
BALANCED = dataclasses.replace(grpo.objective, terms=((1.0, load_balance),))
ALONE = dataclasses.replace(BALANCED, advantage=(lambda reward: 0 * reward,))


def prepared(objective, aggregate=sequence_mean):
  method = dataclasses.replace(grpo, objective=dataclasses.replace(objective, aggregate=aggregate))
  r = tiny.ragged()
  return prepare(method, dataclasses.replace(r, reward=np.nan_to_num(r.reward)))


@functools.cache
def step():
  value = lambda p, b: loss(POLICY, BALANCED, p, b, chunk=64)[0]  # noqa: E731
  return jax.jit(jax.value_and_grad(value), compiler_options=tiny.QUICK)


def update(p, row_tokens, rows, place=lambda x: x):
  tokens, plan = pack(p, row_tokens=row_tokens, rows=rows)
  parts = [step()(PARAMS, jax.tree.map(lambda x, m=m: place(x[m]), tokens)) for m in range(plan.microbatches)]
  return jax.tree.map(lambda *x: np.sum(x, axis=0), *parts)


@functools.cache
def balances():
  """Each row's balance, by loops over layers and experts."""
  p = plain(tiny.ragged())
  b, plan = pack(p, row_tokens=tiny.T, rows=16, microbatches=1)
  b = jax.tree.map(lambda x: x[0], b)
  aux = jax.jit(POLICY.forward)(PARAMS, b.tokens, b.position, b.segment).aux
  probs, experts = (unpack(np.asarray(aux[k])[None], plan) for k in ("router_probs", "routing"))
  out = np.zeros(16)
  for n in np.flatnonzero(plan.row >= 0):
    length = int(p.rollouts.length[n])
    for layer in range(2):
      f = np.bincount(experts[n, :length, layer].ravel(), minlength=6) / (2 * length)
      out[n] += 6 * np.sum(f * probs[n, :length, layer].mean(0)) / 2
  return out


@thinned("aggregate", [token_mean, sequence_mean], every=2)
def test_the_loss_is_the_mean_balance_of_the_rows(aggregate):
  p = prepared(ALONE, aggregate)
  value, slope = update(p, 24, 16)
  assert_allclose(value, np.sum(np.asarray(p.aggregate) * balances()[:, None]), rtol=1e-5)
  assert np.abs(slope["layers"]["mlp"]["router"]).max() > 1e-4
  assert np.ptp(balances()[balances() > 0]) > 0.05


@thinned("layout", ["eight devices", (24, 4), (48, 8), (72, 8)], every=4)
def test_packing_cutting_and_devices_change_nothing(layout):
  p = prepared(BALANCED)
  value, slope = update(p, 24, 16)
  if layout == "eight devices":
    over_eight = NamedSharding(make_mesh(), PartitionSpec("data"))
    other_value, other = update(p, 48, 8, lambda x: jax.device_put(x, over_eight))
  else:
    other_value, other = update(p, *layout)
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(slope)))
  assert_allclose(other_value, value, rtol=1e-5)
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=0, atol=1e-5 * norm), other, slope)


def test_a_dense_model_has_no_balance():
  method = dataclasses.replace(grpo, objective=BALANCED)
  config = configuration.load(None, {"model.shape": {"width": 16, "layers": 1, "heads": 2, "mlp_width": 16}})
  with pytest.raises(ValueError, match="reads experts, router_probs, which this loop does not provide"):
    check_method(config, build(config, method=method))
  tokens, _ = pack(prepared(BALANCED), row_tokens=24, rows=16, microbatches=1)
  with pytest.raises(ValueError, match="load_balance reads router_probs, experts, which this batch does not have"):
    loss(
      tiny.tiny_policy(),
      BALANCED,
      tiny.tiny_policy().init(jax.random.key(0)),
      jax.tree.map(lambda x: x[0], tokens),
      chunk=64,
    )


def test_tokens_that_replay_keeps_on_their_way_are_counted_where_they_predict():
  tokens, _ = pack(prepared(BALANCED), row_tokens=24, rows=8)
  batch = jax.tree.map(lambda x: x[0], tokens)
  at = (batch.tokens, batch.position, batch.segment)
  own = np.array(POLICY.forward(PARAMS, *at, prefix_end=batch.prefix_end).aux["routing"])
  other, predicts = own.copy(), np.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
  for kind, count in ((predicts, 5), (~predicts & (batch.segment >= 0), 3)):
    row, token = (x[:count] for x in np.nonzero(kind))
    other[row, token, 1] = (own[row, token, 1] + 1) % 6

  @jax.jit
  def tally(routing):
    return loss(POLICY, BALANCED, PARAMS, dataclasses.replace(batch, routing=routing), chunk=64)[1].sums

  assert tally(own)["routing/rerouted_tokens"] == 0
  sums = tally(other)
  assert_allclose(sums["routing/rerouted_tokens"], 5, atol=1e-4)
  assert sums["tokens"] > 5 and "routing/rerouted_tokens" not in tally(None)
