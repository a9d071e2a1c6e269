"""Every preset: the same update however its rollouts are packed, cut into microbatches and spread over devices.

It goes through the trainer's step. What a step compiles is the differentiated half of an objective, its surrogate and
terms; the rest reaches it as arrays. All halves are put into one program, and a column says which is meant; one test
compiles each half alone, once for the presets that share it.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from every_preset import METHODS, dressed, tracked

from jaxagent import config
from jaxagent.methods import Given, Method, grpo, plain, prepare
from jaxagent.methods.objective import SCORE_COLUMNS, TOKEN_COLUMNS, slot_parameters
from jaxagent.methods.prepare import call
from jaxagent.rollout.packing import pack, unpack
from jaxagent.training.scoring import score
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import init_state, make_train_step

pytestmark = pytest.mark.slow
POLICY = tiny.tiny_policy()
PARAMS = POLICY.init(jax.random.key(0))
KEPT = optax.chain(optax.trace(0.0), optax.scale(0.0))  # keeps the gradient in its state and moves nothing
LIMIT = 1e-5

WHOLE = (None, dict(row_tokens=tiny.T, rows=16, microbatches=1))
LAYOUTS = {  # mesh, packing
  "one device": (None, dict(row_tokens=2 * tiny.T, rows=1)),
  "data 8": (config.Mesh(data=8), dict(row_tokens=tiny.T, rows=8)),
  "fsdp 2, tensor 4": (config.Mesh(data=1, fsdp=2, tensor=4), dict(row_tokens=3 * tiny.T, rows=2)),
}


def half(method):
  """The differentiated half of its objective, as something to compare."""
  o = method.objective
  return frozen(o.surrogate), tuple((coefficient, frozen(term)) for coefficient, term in o.terms)


def frozen(slot):
  return (slot.func, *sorted(slot.keywords.items())) if isinstance(slot, functools.partial) else slot


HALVES = {half(m): name for name, m in reversed(METHODS.items())}  # each half, by the first preset that has it


@functools.cache
def rollouts():
  """Rows with NaN wherever nobody may look, and the columns of every preset."""
  r = tiny.ragged(ref=True)
  tokens, plan = pack(plain(r), row_tokens=tiny.T, rows=16, microbatches=1)
  run = jax.jit(functools.partial(score, POLICY, chunk=64), compiler_options=tiny.QUICK)
  r = dressed(r, unpack(run(PARAMS, jax.tree.map(lambda x: x[0], tokens)).logp[None], plan), np.nan)
  found = {k: x for m in METHODS.values() for k, x in tracked(m, r).items()}
  return dataclasses.replace(r, columns={**r.columns, **found})


@functools.cache
def prepared():
  """Every preset's batch, in one program. All have the same columns; `half` is the number of the preset's half."""
  run = jax.jit(lambda r: {name: prepare(m, r) for name, m in METHODS.items()}, compiler_options=tiny.QUICK)
  found = jax.tree.map(np.asarray, run(rollouts()))
  absent = {k: np.zeros_like(x) for p in found.values() for k, x in p.rollouts.columns.items()}
  number = {h: np.full(len(rollouts().valid), i) for i, h in enumerate(HALVES)}
  return {
    name: with_columns(p, {**absent, **p.rollouts.columns, "half": number[half(METHODS[name])]})
    for name, p in found.items()
  }


def with_columns(p, columns):
  return dataclasses.replace(p, rollouts=dataclasses.replace(p.rollouts, columns=columns))


def all_halves() -> Method:
  """Its surrogate and terms are those that the column `half` names; the rest of its objective is never called."""
  objectives = [METHODS[name].objective for name in HALVES.values()]
  columns = prepared()["grpo"].rollouts.columns
  read = {k for o in objectives for slot in o.differentiated for k in slot_parameters(slot)}
  names = read & {*TOKEN_COLUMNS, *SCORE_COLUMNS, *columns}
  surrogate = switch([functools.partial(call, o.surrogate) for o in objectives], names)
  term = switch([functools.partial(total, o.terms) for o in objectives], names)
  objective = dataclasses.replace(grpo.objective, surrogate=surrogate, terms=((1.0, term),))
  return Method(objective, annotators=(Given(tuple(columns)),))


def total(terms, columns):
  return sum((c * call(term, columns) for c, term in terms), start=jnp.zeros_like(columns["logp"]))


def switch(functions, names):
  """A slot that reads these columns and calls one of the functions on them."""

  def slot(half, **columns):
    return jax.lax.switch(jnp.max(half), functions, columns)

  names = ("half", *sorted(names - {"half"}))
  slot.__signature__ = inspect.Signature([inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in names])
  return slot


class Step:
  """The trainer's step on a mesh, from parameters that stay where they are."""

  def __init__(self, method, sizes):
    mesh = make_mesh(devices=jax.devices()[:1]) if sizes is None else make_mesh(sizes)
    self.step = make_train_step(POLICY, method, KEPT, mesh=mesh, chunk=64)
    self.state = init_state(POLICY, method, KEPT, PARAMS, mesh=mesh)

  def __call__(self, p, packing):
    """Loss, gradient, and the number of microbatches."""
    tokens, plan = pack(p, **packing)
    self.state, metrics = self.step(self.state, tokens, plan.microbatches)
    assert metrics["nonfinite"] == 0 and metrics["tokens"] == p.keep.sum()
    return float(metrics["loss"]), jax.tree.map(np.asarray, self.state.opt_state[0].trace), plan.microbatches


@functools.cache
def step_of_all(sizes):
  return Step(all_halves(), sizes)


@functools.cache
def whole(name):
  sizes, packing = WHOLE
  return step_of_all(sizes)(prepared()[name], packing)


def norm(slope):
  return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(slope)))


def assert_same(name, update, other):
  """The gradient and the loss, both to 1e-5 of the gradient's norm.

  The loss is up to 16 times that norm (`sft`) and its rounding still fits: seen are 6e-6 at most (`vespo`, whose weight
  is an exponential of a sequence's log-ratio), 3e-6 for all others, and gradients to 2e-6.
  """
  (value, slope, microbatches), (other_value, other_slope, several) = update, other
  assert microbatches == 1 < several
  size = norm(slope)
  assert np.isfinite(size) and size > 1e-6, name
  assert norm(jax.tree.map(np.subtract, slope, other_slope)) <= LIMIT * size, name
  assert abs(value - other_value) <= LIMIT * size, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_cutting_and_devices_change_nothing(layout):
  sizes, packing = LAYOUTS[layout]
  for name, p in prepared().items():
    assert_same(name, whole(name), step_of_all(sizes)(p, packing))


@pytest.mark.parametrize("name", HALVES.values())
def test_each_half_alone(name):
  for sizes, packing in LAYOUTS.values():
    assert_same(name, whole(name), Step(METHODS[name], sizes)(prepared()[name], packing))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_update_of_a_batch(layout):
  """Without `logp_old` the current log-probs stand in for it, wherever nothing before the step reads it."""
  sizes, packing = LAYOUTS[layout]
  for name, p in prepared().items():
    if "logp_old" not in METHODS[name].needs:
      p = dataclasses.replace(p, rollouts=dataclasses.replace(p.rollouts, logp_old=None))
      assert_same(name, step_of_all(None)(p, WHOLE[1]), step_of_all(sizes)(p, packing))
