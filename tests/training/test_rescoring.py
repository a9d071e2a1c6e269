"""Sampled tokens under other first prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from numpy.testing import assert_allclose

from jaxagent.training.rescoring import ROW, rescored
from jaxagent.training.sharding import make_mesh
from jaxagent.training.step import make_scorer
from jaxagent.types import Completion, Trajectory

POLICY = tiny.tiny_policy(positions=ROW)
PARAMS = POLICY.init(jax.random.key(0))


def rollout(number, prompt, *turns):
  row = Trajectory(0, 0, number, temperature=0.7, status="done")
  row.append_context(prompt)
  for ids in turns:
    zeros = np.zeros(len(ids))
    row.append_action(Completion(np.array(ids), zeros, zeros, zeros, "stop"))
    row.append_context([3])
  return row


def reference(row, prefix):
  """log softmax(logits / T) of the row's tokens after its prompt, in a forward of the whole stream."""
  ids = [*prefix, *row.tokens[row.prefix_length :]]
  tokens = jnp.array([ids])
  states = POLICY.forward(PARAMS, tokens, jnp.arange(len(ids))[None], jnp.zeros_like(tokens)).states
  logp = jax.nn.log_softmax(POLICY.head(PARAMS, states)[0] / row.temperature)
  return np.array([logp[at - 1, ids[at]] for at in range(len(prefix), len(ids))])


def test_tokens_keep_their_places_and_few_programs_are_compiled():
  scorer, asked = make_scorer(POLICY, mesh=make_mesh(devices=jax.devices()[:1]), chunk=64), []
  for number in range(9):
    row = rollout(number, range(1, 3 + number % 4), [5, 6, 7 + number], [9])
    asked.append((row, list(range(20, 21 + number % 5))))
    for (row, prefix), logp in zip(asked, rescored(scorer, PARAMS, asked, microbatch_rows=2)):
      action = np.array(row.action)
      want = np.zeros(len(row.tokens))
      want[row.prefix_length :] = reference(row, prefix)
      assert_allclose(logp[action], want[action], atol=1e-5)
      assert not logp[: row.prefix_length].any()
  assert scorer._cache_size() == 4  # of 1, 2, 4 and 8 microbatches
