"""Every preset on episodes of a two-agent environment, its facts from annotators: what the loop does with a method."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from scripted import ScriptedEngine

from jaxagent import config as configuration
from jaxagent.envs.base import Observation, Step
from jaxagent.losses import load_balance
from jaxagent.methods import PRESETS, Given, Method, grpo, plain, prepare
from jaxagent.models.chat import Chat
from jaxagent.models.policy import Hidden
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.collect import collect
from jaxagent.rollout.episode import Limits
from jaxagent.rollout.packing import pack, unpack
from jaxagent.sampling.request import Sampling
from jaxagent.training import loop
from jaxagent.training.annotate import annotate, with_columns
from jaxagent.training.build import build
from jaxagent.training.loss import loss
from jaxagent.training.scoring import score
from jaxagent.types import PerTurn

TASKS, SAMPLES, TOKENS, TURNS = 3, 4, 96, 4
CHAT = Chat(byte_tokenizer())
OPTIONS = {
  "spo_plus_plus": {"tasks": TASKS}, "spo_muon": {"tasks": TASKS}, "dapo_within": {"limit": 60, "margin": 30},
}  # fmt: skip


class Pair:
  """Agent 0, agent 1, agent 0: the outcome is the parity of all that they wrote."""

  tool_format = None

  async def reset(self, seed):
    self.said, self.turns = seed, 0
    return {0: Observation(({"role": "user", "content": str(seed % 10)},))}

  async def step(self, actions):
    [(agent, action)] = actions.items()
    self.said, self.turns = self.said + sum(map(ord, action.text)), self.turns + 1
    paid = {agent: 0.1 * (self.said % 3)}
    if self.turns == 3:
      return Step(turn_rewards=paid, outcome=float(self.said % 2), status="done")
    return Step({1 - agent: Observation(({"role": "user", "content": "so"},))}, turn_rewards=paid)

  async def close(self):
    pass


class Pairs:
  def size(self, split):
    return TASKS

  def environment(self, split, index):
    return Pair(), index


def facts(trajectory):
  """What judges, teachers, encoders and a critic might say of it."""
  t = trajectory
  rng, turns, length = np.random.default_rng([t.task, t.rollout, t.agent]), t.turns, len(t.tokens)
  first = next((i for i, action in enumerate(t.action) if action), 0)
  quality = rng.random(turns)
  return {
    "rewards": rng.normal(size=2), "penalties": -0.3 * rng.random(2), "verdict": rng.integers(-1, 2, 5),
    "step_quality": PerTurn(np.where(quality < 0.2, np.nan, quality)), "step_credit": PerTurn(rng.random(turns)),
    "anchor": PerTurn(rng.integers(-1, 2, turns) * 2_000_000_000), "potential": PerTurn(rng.random(turns + 1)),
    "logp_privileged": np.array(t.logp_rollout) + rng.normal(size=length), "first_error": rng.integers(first, length),
    "tool_cost": int(rng.integers(0, 5)), "assertions_passed": rng.integers(-1, 20), "reference_accuracy": rng.random(),
    "reference_tokens": float(rng.integers(2, 20)), "forced": np.arange(length) == first,
    "value": rng.normal(size=length), "bootstrap": 0.0,
    "selection": np.random.default_rng([7, t.task, t.rollout]).choice([-1.0, -1.0, 0.0, 0.5, 1.0]),
  }  # fmt: skip


def sourced(name) -> Method:
  """The preset, its annotators asking `facts`; a critic is one more annotator."""
  preset = PRESETS[name]
  method = preset if isinstance(preset, Method) else preset(**OPTIONS.get(name, {}))
  annotators = tuple(Given(a.columns, facts) for a in method.annotators)
  if critic := tuple(sorted({"value", "bootstrap"} & method.needs)):
    annotators += (Given(critic, facts),)
  return dataclasses.replace(method, annotators=annotators)


METHODS = {name: sourced(name) for name in PRESETS}
TABLE = np.random.default_rng(0).normal(size=(TOKENS, CHAT.tokenizer.vocab_size)).astype(np.float32)
POLICY = dataclasses.replace(
  tiny.tiny_policy(),
  forward=lambda params, tokens, position, segment, **_: Hidden(params[position]),
  head=lambda params, states: states,
)


@functools.cache
def batch():
  """Trajectories of a scripted policy, and their rollouts with the log-probs of the table."""
  engine = ScriptedEngine(
    CHAT.tokenizer, CHAT.eot, lambda text, rng: "".join(rng.choices("abcd", k=rng.randint(1, 5)))
  )
  trajectories = collect(
    engine, CHAT, Pairs(), split="train", indices=range(TASKS), samples=SAMPLES, key=jax.random.key(1),
    sampling=Sampling(max_tokens=8), limits=Limits(max_turns=TURNS, max_tokens=TOKENS),
  )  # fmt: skip
  r = to_rollouts(trajectories, tokens=TOKENS, turns=TURNS, multiple=32)
  tokens, plan = packed(plain(r))
  scored = jax.jit(functools.partial(score, POLICY, chunk=4096), compiler_options=tiny.QUICK)(TABLE, tokens)
  logp = unpack(np.asarray(scored.logp)[None], plan)
  reference = logp + 0.2 * np.random.default_rng(1).normal(size=logp.shape).astype(np.float32)
  return trajectories, dataclasses.replace(r, logp_rollout=logp, logp_old=logp, logp_ref=reference)


def packed(p):
  tokens, plan = pack(p, row_tokens=TOKENS, rows=32, microbatches=1)
  return jax.tree.map(lambda x: x[0], tokens), plan


def annotated(method):
  trajectories, r = batch()
  r = with_columns(r, annotate(method.annotators, trajectories, None, r))
  for tracker in method.trackers:
    r = with_columns(r, tracker.update(tracker.init(), r)[1])
  return r


@functools.cache
def updates():
  """Loss and gradient of every preset: all batches prepared in one program, differentiated in another."""
  columns = {name: annotated(method) for name, method in METHODS.items()}
  together = lambda all: {name: prepare(METHODS[name], r) for name, r in all.items()}  # noqa: E731
  tokens = {k: packed(p)[0] for k, p in jax.jit(together, compiler_options=tiny.QUICK)(columns).items()}

  def each(params, tokens):
    value = lambda w, name: loss(POLICY, METHODS[name].objective, w, tokens[name], chunk=4096)[0]  # noqa: E731
    return {name: jax.value_and_grad(value)(params, name) for name in METHODS}

  return jax.tree.map(np.asarray, jax.jit(each, compiler_options=tiny.QUICK)(TABLE, tokens))


def test_the_batch_has_teams_and_mixed_groups():
  trajectories, r = batch()
  assert len(trajectories) == 2 * TASKS * SAMPLES and set(r.agent.tolist()) == {0, 1}
  assert all(0 < r.outcome[(r.group == g) & (r.length > 0)].mean() < 1 for g in range(TASKS))
  assert {t.turns for t in trajectories} == {1, 2} and r.turn.max() == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_facts_through_annotators_give_a_gradient(name):
  value, slope = updates()[name]
  assert np.isfinite(value) and np.isfinite(slope).all() and np.abs(slope).max() > 1e-6


TINY = {
  "model.shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16},
  "rollout.prompts": TASKS, "rollout.samples": SAMPLES, "rollout.max_turns": TURNS, "rollout.max_tokens": TOKENS,
  "rollout.max_turn_tokens": 5, "rollout.slots": 8, "training.microbatch_rows": 8, "evaluation.tasks": 0,
  "optimizer.learning_rate": 1e-3, "run.steps": 1, "run.checkpoint_every": 1,
}  # fmt: skip


def one_step(method, **changes):
  records, config = [], configuration.load(None, {**TINY, **changes})
  loop.train(config, build(config, method=method, env=Pairs()), hooks=loop.Hooks(record=records.append))
  return records[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_step_of_the_loop(name):
  record = one_step(METHODS[name])
  assert record["nonfinite"] == 0 and np.isfinite(record["loss"]) and 1e-6 < record["grad_norm"] < np.inf
  assert record["rollouts/failed"] == 0 and record["rollouts/valid"] == TASKS * SAMPLES


@pytest.mark.slow
def test_a_mixture_is_balanced_in_the_loop():
  shape = {"width": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_width": 8}
  objective = dataclasses.replace(grpo.objective, terms=((1.0, load_balance),))
  losses = [
    one_step(dataclasses.replace(grpo, objective=o), **{"model.shape": shape})["loss"]
    for o in (grpo.objective, objective)
  ]
  assert 0.9 < losses[1] - losses[0] < 2  # even use is 1, two experts for all tokens are 2
