import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.sampling import rules
from jaxagent.sampling.rules import NO_ID, Bias, Rules

sample, inverse_cdf, keep = jax.jit(rules.sample), jax.jit(rules.inverse_cdf), jax.jit(rules.keep)
VOCABULARY = 11
LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -1.5, -2.0, -np.inf], np.float32)
CASES = {  # temperature, top_k, top_p, min_p
  "plain": (1.0, 0, 1.0, 0.0),
  "cold": (0.5, 0, 1.0, 0.0),
  "hot": (3.0, 0, 1.0, 0.0),
  "top_k": (1.0, 4, 1.0, 0.0),
  "top_k among equals": (1.0, 2, 1.0, 0.0),
  "top_k of all": (1.0, VOCABULARY, 1.0, 0.0),
  "top_p": (1.0, 0, 0.7, 0.0),
  "min_p": (1.0, 0, 1.0, 0.2),
  "top_k and top_p": (1.5, 5, 0.8, 0.0),
  "all": (1.3, 8, 0.9, 0.15),
  "one": (1.0, 1, 1.0, 0.0),
}
BIASED = {  # how to sample, logit_bias, allowed
  "logit_bias": (CASES["plain"], {0: -2.0, 3: 1.5, 8: 3.0}, None),
  "logit_bias, cold": (CASES["cold"], {2: 0.5, 9: 2.5}, None),
  "logit_bias that forbids": (CASES["hot"], {0: -np.inf, 10: 5.0}, None),  # 10 stays impossible
  "logit_bias, then top_k": (CASES["top_k"], {9: 5.0, 1: -1.0}, None),
  "logit_bias, then top_p": (CASES["top_p"], {7: 2.5, 0: -0.5}, None),
  "logit_bias, then min_p": (CASES["min_p"], {5: 1.5, 0: -3.0}, None),
  "logit_bias, then all": (CASES["all"], {4: 1.0, 8: 3.0, 0: -1.0}, None),
  "allowed": (CASES["plain"], {}, (1, 4, 6, 8, 10)),
  "allowed, hot": (CASES["hot"], {}, (9, 2, 0)),
  "allowed, then top_k and top_p": (CASES["top_k and top_p"], {}, (0, 2, 3, 5, 6, 7, 8)),
  "allowed and logit_bias": (CASES["cold"], {6: 1.5, 3: 9.0}, (1, 4, 6, 8)),
  "allowed and logit_bias, then all": (CASES["all"], {6: 2.0, 5: 1.0}, (0, 2, 4, 5, 6, 8)),
}
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}  # 1 in 1000


def reference(logits, temperature, top_k, top_p, min_p):
  """The distribution that is drawn from, one entry after the other, in float64."""
  p = np.exp(logits.astype(np.float64) / temperature)
  p /= p.sum()
  order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: top_k or None]
  of_k, mass, chosen = sum(p[i] for i in order), 0.0, []
  for i in order:
    if top_p < 1 and mass >= top_p * of_k:
      break
    chosen.append(i)
    mass += p[i]
  q = np.zeros_like(p)
  for i in chosen:
    if p[i] >= min_p * p.max():
      q[i] = p[i]
  return p, q / q.sum()


def broadcast(rows, temperature, top_k, top_p, min_p, bias=None):
  real, whole = (lambda x: jnp.full(rows, x, jnp.float32)), (lambda x: jnp.full(rows, x, jnp.int32))
  return Rules(real(temperature), whole(top_k), real(top_p), real(min_p), bias)


def biases(rows, logit_bias, allowed):
  """The rows' `Bias`, and what it adds to the logits."""
  ids = list(logit_bias if allowed is None else allowed)
  table, added = np.full(8, NO_ID, np.int32), np.zeros(8, np.float32)
  table[: len(ids)], added[: len(ids)] = ids, [logit_bias.get(i, 0.0) for i in ids]
  rest = np.float32(0.0 if allowed is None else -np.inf)
  shift = np.full(VOCABULARY, rest)
  shift[ids] = added[: len(ids)]
  return Bias(*(jnp.broadcast_to(x, (rows, *x.shape)) for x in (table, added, rest))), shift


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_log_probs(case):
  assert_drawn(CASES[case])


@pytest.mark.parametrize("case", BIASED)
def test_frequencies_and_log_probs_with_bias(case):
  assert_drawn(*BIASED[case])


def assert_drawn(case, logit_bias=None, allowed=None, count=50_000):
  """Chi-square of the frequencies against the exact distribution; both log-probs and the entropy."""
  logits = jnp.broadcast_to(LOGITS, (count, VOCABULARY))
  uniform = jax.random.uniform(jax.random.key(3), (count,))
  bias, shift = (None, 0.0) if logit_bias is None else biases(count, logit_bias, allowed)
  drawn = jax.tree.map(np.asarray, sample(logits, uniform, broadcast(count, *case, bias)))
  p, q = reference(LOGITS, *case)[0], reference(LOGITS + shift, *case)[1]
  seen = np.bincount(drawn.id, minlength=VOCABULARY)
  assert (seen[q == 0] == 0).all()
  expected = q[q > 0] * count
  assert (expected >= 5).all()
  if len(expected) > 1:
    assert ((seen[q > 0] - expected) ** 2 / expected).sum() < CRITICAL[len(expected) - 1]
  np.testing.assert_allclose(drawn.logp_rollout, np.log(p[drawn.id]), atol=2e-6)
  np.testing.assert_allclose(drawn.logp_sampled, np.log(q[drawn.id]), atol=2e-6)
  positive = p[p > 0]
  np.testing.assert_allclose(drawn.entropy, -(positive * np.log(positive)).sum(), atol=2e-6)


@pytest.mark.parametrize("size", (5, 129))
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_keep_equals_reference_on_mixed_rows(size, seed):
  rng = np.random.default_rng(seed)
  logits = rng.normal(0, 2, (len(CASES), size)).astype(np.float32)
  logits[:, 1::3] = logits[:, :1]  # ties
  each = Rules(*(np.array(column) for column in zip(*CASES.values())))
  z = logits / each.temperature[:, None].astype(np.float32)
  kept = np.asarray(keep(jnp.asarray(z), jax.tree.map(jnp.asarray, each)))
  for row, case in enumerate(CASES.values()):
    q = reference(logits[row], *case)[1]
    mass = np.sort(q)[::-1].cumsum()
    if case[2] < 1 and np.abs(mass / case[2] - 1).min() < 1e-5:
      continue  # float32 may fall on either side
    np.testing.assert_array_equal(kept[row], q > 0, err_msg=str(case))


def test_a_row_depends_on_itself_alone():
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(0, 1, (len(CASES), 300)), jnp.float32)
  uniform = jnp.asarray(rng.uniform(size=len(CASES)), jnp.float32)
  each = Rules(*(jnp.asarray(column) for column in zip(*CASES.values())))
  together = sample(logits, uniform, each)
  for row in range(len(CASES)):
    one = jax.tree.map(lambda x: x[row : row + 1], (logits, uniform, each))  # noqa: B023
    alone = sample(*one)
    np.testing.assert_array_equal(alone.id[0], together.id[row])
    for name in ("logp_rollout", "logp_sampled", "entropy"):
      np.testing.assert_allclose(getattr(alone, name)[0], getattr(together, name)[row], atol=1e-6)


def test_without_truncation_both_log_probs_are_the_same_number_beside_truncated_rows():
  logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (2, 1000)), jnp.float32)
  each = Rules(jnp.ones(2), jnp.array([0, 5]), jnp.ones(2), jnp.zeros(2))
  drawn = sample(logits, jnp.array([0.4, 0.4]), each)
  assert drawn.logp_rollout[0] == drawn.logp_sampled[0]
  assert drawn.logp_rollout[1] < drawn.logp_sampled[1]


def test_temperature_0_is_greedy_with_the_log_probs_of_temperature_1():
  logits = jnp.array([[0.0, 3.0, 1.0, 3.0]])
  drawn = sample(logits, jnp.array([0.99]), broadcast(1, 0.0, 3, 0.5, 0.1))
  assert int(drawn.id[0]) == 1  # the first of equals
  np.testing.assert_allclose(drawn.logp_rollout, jax.nn.log_softmax(logits)[:, 1], atol=1e-6)
  assert float(drawn.logp_sampled[0]) == 0


@pytest.mark.parametrize("logit_bias, allowed, best", [
  ({6: 4.0}, None, 6), ({0: -np.inf}, None, 1), ({6: 9.0}, (3, 7), 3), ({7: 3.0}, (3, 7), 7), ({10: 50.0}, None, 0),
])  # fmt: skip
def test_greedy_takes_the_best_of_the_biased_logits(logit_bias, allowed, best):
  bias, _ = biases(1, logit_bias, allowed)
  for truncation in ((0, 1.0, 0.0), (3, 0.5, 0.1)):
    drawn = sample(jnp.asarray(LOGITS)[None], jnp.array([0.99]), broadcast(1, 0.0, *truncation, bias))
    assert int(drawn.id[0]) == best and float(drawn.logp_sampled[0]) == 0
    np.testing.assert_allclose(drawn.logp_rollout[0], jax.nn.log_softmax(LOGITS)[best], atol=1e-6)


def test_a_row_without_bias_beside_a_biased_one_is_drawn_as_alone():
  (bias, _), uniform = biases(2, {3: 2.0}, None), jnp.array([0.4, 0.4])
  bias = Bias(bias.id.at[0].set(NO_ID), bias.added.at[0].set(0.0), bias.rest)
  logits = jnp.broadcast_to(LOGITS, (2, VOCABULARY))
  beside, alone = (sample(logits, uniform, broadcast(2, *CASES["plain"], given)) for given in (bias, None))
  for name in ("id", "logp_rollout", "logp_sampled", "entropy"):
    assert getattr(beside, name)[0] == getattr(alone, name)[0]
  assert beside.logp_sampled[0] == beside.logp_rollout[0] and beside.logp_sampled[1] != beside.logp_rollout[1]


@pytest.mark.parametrize("size", (3, 128, 1000))
def test_inverse_cdf_is_monotone_and_never_draws_probability_0(size):
  rng = np.random.default_rng(size)
  mass = rng.gamma(0.3, size=size).astype(np.float32) * (rng.uniform(size=size) < 0.3)
  mass[1] = 1e-3
  mass[-1] = 0
  edges = np.concatenate([[0.0], mass.cumsum(dtype=np.float64) / mass.sum(dtype=np.float64)]).astype(np.float32)
  grid = np.concatenate([np.linspace(0, 1, 997, endpoint=False), edges, [1 - 2**-24]]).clip(0, 1 - 2**-24)
  uniform = np.sort(grid).astype(np.float32)
  chosen = np.asarray(inverse_cdf(jnp.broadcast_to(mass, (len(uniform), size)), jnp.asarray(uniform)))
  assert (mass[chosen] > 0).all() and (np.diff(chosen) >= 0).all()
  upto = mass.cumsum(dtype=np.float64) / mass.sum(dtype=np.float64)
  clear = np.abs(upto[:, None] - uniform).min(0) > 1e-6
  np.testing.assert_array_equal(chosen[clear], np.searchsorted(upto, uniform[clear], side="right"))


def test_a_single_positive_entry_is_always_drawn():
  mass = np.zeros((4, 300), np.float32)
  mass[:, 137] = 1e-30
  np.testing.assert_array_equal(inverse_cdf(mass, jnp.array([0.0, 0.3, 0.7, 1 - 2**-24])), 137)


def test_extreme_and_broken_logits():
  logits = jnp.array([[1e30, -1e30, 30.0], [-jnp.inf, 0.0, -jnp.inf], [jnp.nan, 0.0, 1.0]])
  drawn = sample(logits, jnp.array([0.5, 0.999, 0.5]), broadcast(3, 1.0, 0, 1.0, 0.0))
  assert drawn.id[:2].tolist() == [0, 1] and drawn.logp_rollout[:2].tolist() == [0, 0]
  assert 0 <= int(drawn.id[2]) < 3 and np.isnan(drawn.logp_rollout[2])
  assert drawn.entropy[:2].tolist() == [0, 0]
  nearly_greedy = sample(logits, jnp.array([0.5, 0.999, 0.5]), broadcast(3, 1e-36, 0, 1.0, 0.0))
  assert nearly_greedy.id[:2].tolist() == [0, 1] and nearly_greedy.logp_rollout[:2].tolist() == [0, 0]


def test_uniforms_depend_on_key_and_position_alone():
  keys = jnp.array([[1, 2], [1, 2], [3, 4]], jnp.uint32)
  uniforms = jax.jit(rules.uniforms)
  a = uniforms(keys, jnp.array([5, 6, 5]))
  b = uniforms(keys[::-1], jnp.array([5, 6, 5]))
  np.testing.assert_array_equal(a, b[::-1])
  assert len(set(a.tolist())) == 3 and (0 <= a).all() and (a < 1).all()


def test_changing_the_rules_compiles_nothing():
  fresh = jax.jit(lambda *arguments: rules.sample(*arguments))
  for case in CASES.values():
    fresh(jnp.zeros((2, 7)), jnp.zeros(2), broadcast(2, *case))
  assert fresh._cache_size() == 1
