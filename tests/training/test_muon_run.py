"""A whole run with `optimizer.name: muon`: to its end, logged, and the same after a resume."""

import jax
import numpy as np
from luck import TINY, LuckyTasks

from jaxagent import config as configuration
from jaxagent.training import loop
from jaxagent.training.build import build
from jaxagent.training.checkpoint import Checkpointer

MUON = {**TINY, "optimizer.name": "muon", "optimizer.learning_rate": 1e-2}


def run(steps, **hooks):
  config, records = configuration.load(None, {**MUON, "run.steps": steps}), []
  resume = hooks.pop("resume", False)
  state = loop.train(
    config, build(config, env=LuckyTasks()), hooks=loop.Hooks(record=records.append, **hooks), resume=resume
  )
  return jax.device_get(state), records


def test_muon_runs_to_its_end_and_resumes_bit_for_bit(tmp_path):
  whole, records = run(3)
  with Checkpointer(tmp_path) as checkpointer:
    first, _ = run(1, checkpointer=checkpointer)
  with Checkpointer(tmp_path) as checkpointer:
    resumed, rest = run(3, checkpointer=checkpointer, resume=True)
  assert [r["step"] for r in records] == [1, 2, 3] and [r["step"] for r in rest] == [2, 3]
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), first.train.params, whole.train.params)
  assert all(jax.tree.leaves(moved))
  for record in records:
    assert 0.05 < record["muon/update_rms"] < 0.4 and 0.5 < record["muon/spectral_norm"] < 1.3
    assert all(0 < record[f"muon/{name}"] <= 1.1 for name in ("effective_rank", "momentum_rank"))
