import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxagent import config as run_config
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy, weight
from jaxagent.models.moe import FusedMoe, Moe, collect, dispatch, group, grouped_product, route, tile_rows
from jaxagent.models.policy import on_mesh
from jaxagent.models.sharding import shard_params
from jaxagent.training.sharding import make_mesh

SAMPLER = jnp.array([[2.0, 1.0, 1.01, 0.0]])  # chooses experts 0 and 2
TRAINER = jnp.array([[2.0, 1.02, 1.0, 0.0]])  # would choose 0 and 1


def dense_weights(experts, weights, count):
  """g [N, E], 0 off the chosen experts."""
  return jnp.sum(jax.nn.one_hot(experts, count) * weights[..., None], axis=1)


@pytest.mark.parametrize(
  "norm_topk_prob, want",
  [(True, [0.731059, 0, 0.268941, 0]), (False, [0.532332, 0, 0.195834, 0])],
)
def test_replay_by_hand(norm_topk_prob, want):
  pick = functools.partial(route, experts_per_token=2, norm_topk_prob=norm_topk_prob)
  recorded, _, _ = pick(SAMPLER)
  np.testing.assert_array_equal(recorded, [[0, 2]])
  np.testing.assert_array_equal(pick(TRAINER)[0], [[0, 1]])
  for record in (recorded, recorded.astype(jnp.int16)):
    experts, weights, probabilities = pick(TRAINER, recorded=record)
    np.testing.assert_allclose(dense_weights(experts, weights, 4)[0], want, atol=1e-6)
    np.testing.assert_allclose(probabilities[0], jax.nn.softmax(TRAINER[0]), atol=1e-6)


def test_gradient_of_the_live_weights_by_hand():
  def first(logits):
    _, weights, _ = route(logits, experts_per_token=2, recorded=jnp.array([[0, 2]]))
    return weights[0, 0]

  np.testing.assert_allclose(jax.grad(first)(TRAINER)[0], [0.196612, 0, -0.196612, 0], atol=1e-6)


def test_an_incomplete_record_is_live():
  logits = jnp.concatenate([TRAINER, TRAINER, TRAINER])
  recorded = jnp.array([[3, 2], [-1, -1], [-1, 3]], jnp.int16)
  experts, _, _ = route(logits, experts_per_token=2, recorded=recorded)
  np.testing.assert_array_equal(experts, [[3, 2], [0, 1], [0, 1]])


def test_recorded_experts_of_no_probability_give_finite_weights():
  logits = jnp.array([[200.0, 0.0, -1.0]])
  grad = jax.grad(lambda x: route(x, experts_per_token=2, recorded=jnp.array([[1, 2]]))[1][0, 0])(logits)
  np.testing.assert_allclose(grad, [[0, 0.196612, -0.196612]], atol=1e-6)


jitted_group = jax.jit(group, static_argnums=(1, 2))
CASES = {
  "spread": np.random.default_rng(0).permuted(np.tile(np.arange(5), (37, 1)), axis=1)[:, :2],
  "one expert gets all": np.array([[3, 1]] * 20),
  "one token": np.array([[4, 0]]),
  "last expert only": np.array([[4]] * 9),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", [1, 8])
def test_groups_place_every_choice_once_in_a_tile_of_its_expert(case, tile):
  experts = CASES[case]
  groups = jitted_group(jnp.asarray(experts), 5, tile)
  slot, choice = np.asarray(groups.slot).ravel(), np.asarray(groups.choice)
  assert len(set(slot)) == experts.size  # nothing dropped, nothing shared
  np.testing.assert_array_equal(choice[slot], np.arange(experts.size))
  assert (choice >= 0).sum() == experts.size
  np.testing.assert_array_equal(np.asarray(groups.tile_expert)[slot // tile], experts.ravel())


@pytest.mark.slow
def test_dispatch_and_collect_have_the_gradients_of_plain_gathers():
  experts = jnp.asarray(CASES["spread"])
  groups = jitted_group(experts, 5, 8)
  x = jax.random.normal(jax.random.key(0), (37, 3))
  rows = jax.random.normal(jax.random.key(1), (groups.choice.size, 3))

  def plain_dispatch(x):
    return jnp.where((groups.choice >= 0)[:, None], x[jnp.maximum(groups.choice, 0) // 2], 0)

  for ours, plain, argument in (
    (lambda x: dispatch(x, groups), plain_dispatch, x),
    (lambda rows: collect(rows, groups), lambda rows: rows[groups.slot], rows),
  ):
    y, pull = jax.vjp(ours, argument)
    want, plain_pull = jax.vjp(plain, argument)
    np.testing.assert_array_equal(y, want)
    g = jax.random.normal(jax.random.key(2), y.shape)
    np.testing.assert_allclose(pull(g)[0], plain_pull(g)[0], atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_grouped_product_equals_ragged_dot(case):
  experts = jnp.asarray(CASES[case])
  groups = jitted_group(experts, 5, 8)
  x = jax.random.normal(jax.random.key(0), (experts.shape[0], 6))
  weights = jax.random.normal(jax.random.key(1), (5, 6, 4))
  got = jax.jit(lambda x: collect(grouped_product(dispatch(x, groups), weights, groups), groups))(x)
  order = jnp.argsort(experts.ravel(), stable=True)
  rows = jnp.repeat(x, experts.shape[1], axis=0)[order]
  sizes = jnp.bincount(experts.ravel(), length=5)
  want = jax.lax.ragged_dot(rows, weights, sizes)[jnp.argsort(order)]
  np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)


CONFIG = DecoderConfig(
  vocab_size=20, width=12, layers=2, heads=2, experts=6, experts_per_token=3, expert_width=10, norm_topk_prob=False
)


def moe_and_dense(x, routing=None, config=CONFIG):
  moe = Moe(config, nnx.Rngs(0), weight)
  graph, params = nnx.split(moe)

  def dense(params, x):
    p = nnx.to_pure_dict(params)
    flat = x.reshape(-1, x.shape[-1])
    recorded = None if routing is None else routing.reshape(-1, 3)
    experts, weights, _ = route(
      flat @ p["router"], experts_per_token=3, norm_topk_prob=config.norm_topk_prob, recorded=recorded
    )
    hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", flat, p["gate"])) * jnp.einsum("nd,edf->enf", flat, p["up"])
    every = jnp.einsum("enf,efd->end", hidden, p["down"])
    return jnp.einsum("ne,end->nd", dense_weights(experts, weights, 6), every).reshape(x.shape)

  return params, lambda params, x: nnx.merge(graph, params)(x, routing)[0], dense


@pytest.mark.parametrize("replayed", [False, True])
def test_mixture_equals_all_experts_computed_in_value_and_gradient(replayed):
  x = jax.random.normal(jax.random.key(1), (2, 9, 12))
  shuffled = np.random.default_rng(1).permuted(np.tile(np.arange(6), (18, 1)), axis=1)
  routing = jnp.asarray(shuffled[:, :3].reshape(2, 9, 3))
  params, ours, dense = moe_and_dense(x, routing if replayed else None)
  g = jax.random.normal(jax.random.key(2), x.shape)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_pull(f, params, x):
    y, pull = jax.vjp(f, params, x)
    return y, pull(g)

  got, want = value_and_pull(ours, params, x), value_and_pull(dense, params, x)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), got, want)
  assert float(jnp.abs(got[1][0]["router"][...]).max()) > 1e-3


def test_the_fused_layout_is_the_same_mixture():
  x = jax.random.normal(jax.random.key(1), (2, 4, 12))
  moe = Moe(CONFIG, nnx.Rngs(0), weight)
  y, aux = jax.jit(lambda x: moe(x))(x)
  fused, fused_aux = jax.jit(lambda x: FusedMoe(moe)(x))(x)
  np.testing.assert_allclose(fused, y, atol=1e-6)
  np.testing.assert_array_equal(fused_aux["routing"], aux["routing"])
  assert aux["routing"].dtype == jnp.int8 and aux["routing"].shape == (2, 4, 3)
  assert aux["router_probs"].dtype == jnp.float32 and aux["router_probs"].shape == (2, 4, 6)


@functools.cache
def model():
  policy = decoder_policy(CONFIG)
  params = jax.jit(policy.init)(jax.random.key(0))
  params = {**params, "embed": params["embed"] * 50}  # a token's own experts, not a common bias, decide
  return policy, params, jax.jit(policy.forward)


ROWS = (jnp.arange(12).reshape(2, 6), jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.zeros((2, 6), jnp.int32))


@pytest.mark.slow
def test_replay_of_the_own_record_changes_nothing_and_of_another_one_rules():
  _, params, forward = model()
  live = forward(params, *ROWS)
  assert live.aux["routing"].shape == (2, 6, 2, 3) and live.aux["router_probs"].shape == (2, 6, 2, 6)
  absent = jnp.full_like(live.aux["routing"], -1)
  for routing in (live.aux["routing"], absent):
    same = forward(params, *ROWS, routing=routing)
    np.testing.assert_allclose(same.states, live.states, atol=1e-6)
    np.testing.assert_array_equal(same.aux["routing"], live.aux["routing"])
  other = (live.aux["routing"] + 1) % 6
  replayed = forward(params, *ROWS, routing=other)
  np.testing.assert_array_equal(replayed.aux["routing"], other)
  assert float(jnp.abs(replayed.states - live.states).max()) > 1e-3
  one = forward(params, *ROWS, routing=absent.at[0, 2].set(other[0, 2]))
  np.testing.assert_array_equal(one.aux["routing"][1], live.aux["routing"][1])
  np.testing.assert_allclose(one.states[0, :2], live.states[0, :2], atol=1e-6)  # before the replayed token
  assert float(jnp.abs(one.states[0, 2] - live.states[0, 2]).max()) > 1e-3


def test_router_probabilities_carry_a_gradient():
  """What a load-balance term differentiates."""
  policy, params, _ = model()
  grad = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(policy.forward(p, *ROWS).aux["router_probs"]))))(params)
  assert float(jnp.abs(grad["layers"]["mlp"]["router"]).min(axis=(1, 2)).max()) > 0


@pytest.mark.parametrize(
  "sizes", [dict(data=2, tensor=2, expert=2), pytest.param(dict(data=2, fsdp=2, expert=2), marks=pytest.mark.slow)]
)
def test_experts_over_a_mesh_change_nothing_and_stay_where_they_are(sizes):
  policy, params, _ = model()
  mesh = make_mesh(run_config.Mesh(**sizes))
  rows = tuple(jnp.concatenate([x, x]) for x in ROWS)
  g = jax.random.normal(jax.random.key(4), (*rows[0].shape, CONFIG.width))

  def run(policy, *arguments):
    value = lambda params, *rows: jnp.sum(policy.forward(params, *rows).states * g)  # noqa: E731
    compiled = jax.jit(jax.value_and_grad(value)).lower(*arguments).compile()
    return compiled(*arguments), compiled.as_text()

  want, _ = run(policy, params, *rows)
  placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
  got, hlo = run(on_mesh(policy, mesh), shard_params(params, policy.axes, mesh=mesh), *placed)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)
  gathered = [tuple(map(int, dims.split(","))) for dims in re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-gather", hlo)]
  assert not [shape for shape in gathered if CONFIG.experts in shape and {CONFIG.expert_width, 5} & set(shape)]


@pytest.mark.parametrize(
  "choices, experts, want", [(1, 8, 8), (4096, 8, 128), (512, 8, 64), (128, 64, 8), (300, 8, 32)]
)
def test_tiles_follow_the_mean_group(choices, experts, want):
  assert tile_rows(choices, experts) == want
