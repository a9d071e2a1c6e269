from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from thinned import thinned

import jaxagent
from jaxagent import optim
from jaxagent.optim import MatrixSpec, gram_newton_schulz, muon, muon_metrics, newton_schulz, scale_by_muon

SHAPES = {"square": (24, 24), "wide": (16, 64), "tall": (64, 16), "layers": {"w": (3, 24, 24), "norm": (3, 24)},
          "bias": (24,), "experts": {"up": (4, 16, 32)}}  # fmt: skip
OPTAX = optax.contrib.MuonDimensionNumbers


def tree(seed, shapes=SHAPES):
  flat, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(structure, [jnp.asarray(rng.normal(size=s), jnp.float32) for s in flat])


def dimensions(params):
  """The same partition for optax.contrib.muon, which takes None for AdamW."""
  label = lambda x: OPTAX(x - 2, x - 1) if x >= 2 else None  # noqa: E731
  return {
    **{name: label(2) for name in ("square", "wide", "tall")}, "bias": None, "experts": {"up": label(3)},
    "layers": {"w": label(3), "norm": None},
  }  # fmt: skip


def relative(x, y):
  return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), x, y)))


def steps(tx, n=20, seed=0):
  """Updates of n steps from gradients that do not depend on the updates."""
  params, update = tree(seed), jax.jit(tx.update)
  state, out = tx.init(params), []
  for i in range(n):
    updates, state = update(tree(100 + i), state, params)
    out.append(jax.tree.map(np.asarray, updates))
  return out, state


@thinned("shape_scale, name", ["width", "rms"], ["plain", "gram"], every=3)
def test_equal_to_optax_over_twenty_steps(shape_scale, name):
  """1e-5 for the same iteration; 1e-4 for the Gram form on these well-conditioned matrices."""
  reference = optax.contrib.muon(
    0.02, weight_decay=0.1, adam_weight_decay=0.1, muon_weight_dimension_numbers=dimensions,
    consistent_rms=0.2 if shape_scale == "rms" else None,
  )  # fmt: skip
  ours = muon(
    0.02, weight_decay=0.1, adam=optax.adamw(0.02, weight_decay=0.1, nesterov=True),
    iteration=newton_schulz if name == "plain" else gram_newton_schulz,
    scale=optim.rms_scale if shape_scale == "rms" else None,
  )  # fmt: skip
  tolerance = 1e-5 if name == "plain" else 1e-4
  for got, want in zip(steps(ours)[0], steps(reference)[0]):
    assert relative(got, want) < tolerance


def test_without_nesterov():
  params = {"w": (8, 24)}
  ours, theirs = scale_by_muon(nesterov=False), optax.contrib.scale_by_muon(
    nesterov=False, weight_dimension_numbers={"w": OPTAX()}
  )  # fmt: skip
  states = [tx.init(tree(0, params)) for tx in (ours, theirs)]
  for i in range(3):
    got, states[0] = ours.update(tree(i, params), states[0])
    want, states[1] = theirs.update(tree(i, params), states[1])
    assert relative(got, jax.tree.map(lambda x: x * np.sqrt(3), want)) < 1e-5


def test_the_front_door_of_the_readme():
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    jaxagent.optim.muon(2e-2, adam=optax.adamw(1e-5), labels=jaxagent.optim.hidden_matrices),
  )
  updates, _ = steps(tx, 1)
  s = np.linalg.svd(updates[0]["square"], compute_uv=False)
  assert 0.02 * 0.67 < s.min() and s.max() < 0.02 * 1.21
  assert np.abs(updates[0]["bias"]).max() < 1.01e-5


def test_zero_gradients_give_zero_updates():
  params = tree(0)
  tx = muon(0.1, adam=optax.sgd(0.1))
  updates, state = tx.update(optax.tree.zeros_like(params), tx.init(params), params)
  jax.tree.map(lambda x: assert_array_equal(x, 0 * x), updates)
  assert all(x == 0 for x in muon_metrics(state).values())


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_update_does_not_depend_on_the_gradient_s_size(size):
  params = {"w": (8, 24)}
  tx = scale_by_muon()
  want, _ = tx.update(tree(1, params), tx.init(tree(0, params)))
  got, _ = tx.update(jax.tree.map(lambda x: x * size, tree(1, params)), tx.init(tree(0, params)))
  assert relative(got, want) < 1e-4


@pytest.mark.slow
def test_parts_heads_and_transposes_are_matrices_of_their_own():
  tx = scale_by_muon(scale=lambda rows, columns: 1.0)
  alone = lambda g: tx.update({"w": g}, tx.init({"w": g}))[0]["w"]  # noqa: E731

  def with_spec(g, spec):
    fused = scale_by_muon(scale=lambda rows, columns: 1.0, specs={"w": spec})
    return fused.update({"w": g}, fused.init({"w": g}))[0]["w"]

  q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(16, n)), jnp.float32) for i, n in enumerate((16, 8, 8)))
  got = with_spec(jnp.concatenate([q, k, v], 1), MatrixSpec(split=(16, 8, 8)))
  assert_allclose(got, jnp.concatenate([alone(x) for x in (q, k, v)], 1), atol=1e-5)
  heads = q.reshape(16, 2, 8)
  got = with_spec(heads, MatrixSpec(batch_axes=(1,), rows=0, columns=2))
  assert_allclose(got, jnp.stack([alone(heads[:, i]) for i in range(2)], 1), atol=1e-5)
  assert_allclose(with_spec(heads, MatrixSpec(rows=0, columns=(1, 2))).reshape(16, 16), alone(q), atol=1e-5)
  assert_allclose(with_spec(k.T, MatrixSpec(rows=1, columns=0)), alone(k).T, atol=1e-5)
  stacked = jnp.stack([k, v])
  assert_allclose(alone(stacked), jnp.stack([alone(k), alone(v)]), atol=1e-5)


@pytest.mark.parametrize(
  "rows, columns, width, rms", [(4096, 4096, 1, 12.8), (4096, 11008, 1.6394, 20.984), (8, 2, 1, 0.5657)]
)
def test_scales(rows, columns, width, rms):
  """[in, out]: the update of a widening matrix is larger. 12.8 and 20.98 are printed in the Moonlight paper."""
  assert_allclose([optim.width_scale(rows, columns), optim.rms_scale(rows, columns)], [width, rms], rtol=1e-4)


COMPOSED = {
  "schedule": lambda: muon(optax.linear_schedule(0.1, 0.0, 10)),
  "inject_hyperparams": lambda: optax.inject_hyperparams(muon)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
  "MultiSteps": lambda: optax.MultiSteps(muon(0.1), every_k_schedule=2),
  "partition": lambda: optax.partition(
    {"muon": optax.chain(scale_by_muon(), optax.scale(-0.1)), "adam": optax.adamw(0.1)}, optim.hidden_matrices
  ),
  "masked": lambda: optax.chain(
    optax.masked(scale_by_muon(), lambda p: jax.tree.map(lambda x: x == "muon", optim.hidden_matrices(p))),
    optax.scale(-0.1),
  ),
  "chain": lambda: optax.chain(optax.clip_by_global_norm(1e6), muon(0.1), optax.scale(1.0)),
  "apply_if_finite": lambda: optax.apply_if_finite(muon(0.1), 3),
}  # fmt: skip


@thinned("name", COMPOSED, every=4)
def test_composes_with_optax_and_compiles_once(name):
  tx, params = COMPOSED[name](), tree(0)
  chex.clear_trace_counter()
  update = jax.jit(chex.assert_max_traces(tx.update, n=1))
  state = jax.jit(tx.init)(params)
  for i in range(4):
    updates, state = update(tree(i), state, params)
  assert jax.tree.structure(updates) == jax.tree.structure(params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
  bare = muon(0.1)
  direct = bare.init(params)
  for i in range(4):
    want, direct = jax.jit(bare.update)(tree(i), direct, params)
  rate = {"schedule": 0.7, "inject_hyperparams": 0.7}.get(name, 1.0)
  if name != "MultiSteps":
    assert relative(updates["square"], want["square"] * rate) < 1e-4
  placed = optax.tree.map_params(
    tx, lambda x: "parameter", state, transform_non_params=lambda x: "other",
    is_leaf=lambda x: isinstance(x, optax.MaskedNode),
  )  # fmt: skip
  assert {"parameter", "other"} <= set(jax.tree.leaves(placed))
  assert muon_metrics(state)["update_rms"] > 0


@pytest.mark.slow
def test_multi_steps_is_the_update_of_the_mean():
  params, tx = tree(0), muon(0.1)
  several = optax.MultiSteps(tx, every_k_schedule=2)
  state = several.init(params)
  _, state = several.update(tree(1), state, params)
  got, _ = several.update(tree(2), state, params)
  mean = jax.tree.map(lambda x, y: (x + y) / 2, tree(1), tree(2))
  assert relative(got, tx.update(mean, tx.init(params), params)[0]) < 1e-4


def test_labels_may_be_a_tree_or_any_function():
  params = tree(0)
  found = optim.hidden_matrices(params)
  want, _ = muon(0.1).update(tree(1), muon(0.1).init(params), params)
  for given in (found, lambda p: found):
    tx = muon(0.1, labels=given)
    assert relative(tx.update(tree(1), tx.init(params), params)[0], want) < 1e-6


@pytest.mark.parametrize(
  "labels, said",
  [
    ({"w": "muon"}, "labels must be a tree like the parameters"),
    ({"w": "muon", "b": "sgd"}, "parameter b has the label 'sgd'"),
    ({"w": "muon", "b": "muon"}, r"parameter b of shape \(4,\) has no axis -2"),
  ],
)
def test_labels_that_do_not_fit(labels, said):
  params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
  with pytest.raises(ValueError, match=said):
    muon(0.1, labels=labels).init(params)


def test_scale_by_muon_refuses_vectors_and_adam_s_parameters():
  with pytest.raises(ValueError, match=r"parameter b of shape .* has no axis"):
    scale_by_muon().init({"b": jnp.ones(4)})
  with pytest.raises(ValueError, match="parameter w has no place in Muon by its label 'adam'"):
    scale_by_muon(specs={"w": "adam"}).init({"w": jnp.ones((4, 4))})


def test_dtypes():
  params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
  gradient = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.bfloat16)}
  tx = scale_by_muon(iteration=partial(newton_schulz, dtype=jnp.bfloat16), mu_dtype=jnp.float32)
  updates, state = tx.update(gradient, tx.init(params))
  assert updates["w"].dtype == jnp.bfloat16 and state.mu["w"].dtype == jnp.float32
  assert 0.6 < np.linalg.svd(np.float32(updates["w"]), compute_uv=False).min()


def exact_rank(x):
  s = np.linalg.svd(x, compute_uv=False)
  return (s**2).sum() ** 2 / (s**4).sum() / len(s)


def test_metrics_against_singular_values():
  rng = np.random.default_rng(0)
  gradient = {"w": jnp.asarray(rng.normal(size=(96, 128)) * np.geomspace(1, 1e-2, 96)[:, None], jnp.float32)}
  tx = scale_by_muon(scale=lambda rows, columns: 3.0)
  updates, state = tx.update(gradient, tx.init(gradient))
  got, x = muon_metrics(state), np.asarray(updates["w"]) / 3
  assert_allclose(got["update_rms"], 3 * np.sqrt(np.mean(x**2)), rtol=1e-4)
  largest = np.linalg.norm(x, 2)
  assert 0.8 * largest < got["spectral_norm"] <= 1.0001 * largest
  assert_allclose(got["effective_rank"], exact_rank(x), rtol=0.1)
  assert_allclose(got["momentum_rank"], exact_rank(gradient["w"]), rtol=0.35)


def test_metrics_show_a_collapse_and_are_empty_without_muon():
  full, one = {"w": (64, 64)}, jnp.outer(jnp.arange(1.0, 65), jnp.ones(64))
  tx = scale_by_muon()
  healthy = muon_metrics(tx.update(tree(0, full), tx.init(tree(0, full)))[1])
  collapsed = muon_metrics(tx.update({"w": one}, tx.init({"w": one}))[1])
  assert collapsed["effective_rank"] < 0.05 < 0.8 < healthy["effective_rank"]
  assert muon_metrics(optax.adamw(1e-3).init(tree(0, full))) == {}
