"""Every recipe, shrunk: three steps are finite, its own part shows in its metric, and a resumed run is the same run."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from guided import Guided, Spoken, demonstrated

from jaxagent import config as configuration
from jaxagent.advantages import turn_gae
from jaxagent.envs.calculator import evaluate
from jaxagent.envs.hybrid_reasoning import HybridReasoning, write_statistics
from jaxagent.envs.registry import resolve
from jaxagent.methods import Method, grpo, spo_plus_plus
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.training import build as building
from jaxagent.training import funnel, loop
from jaxagent.training.build import build, build_engine, build_method
from jaxagent.training.checkpoint import Checkpointer
from jaxagent.training.sharding import make_mesh

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "configs" / "recipes"
STEPS, TASKS = 3, 16
DENSE = {"width": 16, "layers": 2, "heads": 2, "mlp_width": 16, "qk_norm": True}
MIXTURE = {"width": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_width": 8}
SHRUNK = {
  "model.shape": DENSE, "rollout.prompts": 4, "rollout.samples": 4, "rollout.max_turns": 6, "rollout.max_tokens": 384,
  "rollout.max_turn_tokens": 112, "rollout.slots": 16, "training.microbatch_rows": 8, "training.row_tokens": 384,
  "sft.steps": 0, "evaluation.tasks": 0, "optimizer.learning_rate": 1e-3, "run.steps": STEPS,
}  # fmt: skip
CALLS, SHORT = {"env.options.in_head": 0.0}, {"env.options.chunk": 64}
SINGLE = {"rollout.prompts": 16, "rollout.samples": 1}
CRITIC = {**SINGLE, "critic.warmup_steps": 1, "critic.warmup_epochs": 2, "critic.epochs": 1, "critic.minibatches": 1}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """`metric` is larger with the part than without it (`sign` -1: smaller), as the paper means it to be.

  The part is taken out of the method by `without`, or out of the config by `off`. The metric is that of the first step,
  for which both runs have the same rollouts, or of the `last`, where the part acts on what was learned.
  """

  metric: str
  sign: int = 1
  without: Callable[[Method], Method] | None = None
  off: dict[str, Any] = dataclasses.field(default_factory=dict)
  last: bool = False
  changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def objective(**parts) -> Callable[[Method], Method]:
  return lambda method: dataclasses.replace(method, objective=dataclasses.replace(method.objective, **parts))


def unpaid(method: Method) -> Method:
  return dataclasses.replace(method, reward=())


def all_or_nothing(method: Method) -> Method:
  return dataclasses.replace(method, reward=(lambda outcome: (outcome >= 1).astype(np.float32),))


of_group = objective(advantage=grpo.objective.advantage)
WITHIN = "method/advantage/within_rows"
TABLE = {
  "prefix_sliding": Recipe(
    "tokens", -1, off={"training.backprop_windows": None},
    changes={
      "model.shape": {**DENSE, "attention": "prefix_sliding", "window": 8, "max_prefix": 48},
      "training.backprop_windows": 4, **CALLS,
    },
  ),
  "gepo": Recipe("method/advantage/size", -1, without=of_group),
  "teamgym": Recipe("method/piu/recall", off={"env.options.condition": "solo"}),
  "mpo": Recipe("method/advantage/within_turns", without=objective(advantage=(turn_gae,)), changes=CRITIC | CALLS),
  "t1": Recipe(
    "method/reward/partial", without=all_or_nothing, changes={**CRITIC, "env.options.kinds": ["files", "data"]}
  ),
  "draco": Recipe(WITHIN, without=of_group, changes=CALLS),
  "taspo": Recipe(WITHIN, without=of_group, changes={**CALLS, "method.options.scale": 0.02}),
  "envsched": Recipe(
    "scheduling/informativeness", off={"scheduling.explore": 0.999}, last=True,
    changes={"scheduling.pool": 12, "scheduling.uncertainty": 0.0, "scheduling.explore": 0.0},
  ),
  "spo_muon": Recipe(
    "method/penalised_gap", -1, without=objective(advantage=spo_plus_plus(TASKS).objective.advantage),
    changes=SINGLE | SHORT,
  ),
  "tev": Recipe("method/paid_turns", without=unpaid),
  "search_agent": Recipe(
    "kl/ref", -1, off={"method.options.coefficient": 0.0}, last=True,
    changes={"method.options.coefficient": 1.0, **SHORT},
  ),
  "when2think": Recipe("method/reward/mean", without=unpaid),
  "experience_funnel": Recipe(
    "method/distilled/selected", off={"funnel.candidates": ["Talk."]},
    changes={
      "funnel.candidates": ["Think."], "funnel.gate_tasks": 8, "funnel.max_tokens": 32, "funnel.round_steps": 1,
    },
  ),
  "cliff": Recipe(WITHIN, without=of_group, changes=CALLS),
  "shaping": Recipe("method/paid_turns", without=unpaid),
  "scpo": Recipe("method/paid_turns", without=unpaid, changes=CALLS),
  "slimsearcher": Recipe("method/reward/mean", -1, without=unpaid, changes=SHORT),
}  # fmt: skip
QUICK = ("gepo", "slimsearcher")
WITH_EXPERTS = ("gepo", "taspo", "spo_muon")


def settings(name: str, folder: Path, shape=None, steps=STEPS, **more) -> configuration.Config:
  own = {**SHRUNK, **TABLE[name].changes, "run.steps": steps, "run.checkpoint_every": 1, **more}
  if shape is not None:
    own["model.shape"] = shape
  if name == "when2think":
    own["env.options.reference"] = str(folder / "reference.json")
  return configuration.load(RECIPES / f"{name}.yaml", own)


def run(config, *, method=None, checkpointer=None, resume=False):
  records = []
  parts = build(config, method=method)
  hooks = loop.Hooks(record=records.append, checkpointer=checkpointer, warn=lambda text: None)
  trainer = funnel if config.method.name == "experience_funnel" else loop
  state = trainer.train(config, parts, hooks=hooks, resume=resume)
  return jax.device_get(state[0] if trainer is funnel else state), records


class Told:
  """What is said under the skill "Think.": the answer; without it, what the policy says."""

  def get(self, prompt, default):
    problem = re.search(r"([0-9+*-]+)<\|im_end\|>", prompt)
    return [Spoken((str(evaluate(problem[1])),), "")] if "Think." in prompt else default


@pytest.fixture(autouse=True)
def guided(monkeypatch):
  def engine(config, parts, params, *, version=0):
    skilled = config.method.name == "experience_funnel"
    known = Told() if skilled else demonstrated(parts.tasks, parts.chat, 4 * TASKS)
    return Guided(build_engine(config, parts, params, version=version), parts.chat, known)

  monkeypatch.setattr(building, "make_mesh", lambda sizes: make_mesh(sizes, devices=jax.devices()[:1]))
  monkeypatch.setattr(loop, "build_engine", engine)
  monkeypatch.setattr(funnel, "build_engine", engine)
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT)


def reference(folder: Path) -> None:
  options = configuration.load(RECIPES / "when2think.yaml").env.options
  tasks = HybridReasoning(**{**options, "reference": None})
  rows = [{"reference_accuracy": 0.9, "reference_tokens": 20.0} for _ in range(4 * TASKS)]
  write_statistics(str(folder / "reference.json"), tasks, rows)


def flat(state):
  return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(state)])


def at(records, recipe: Recipe) -> float:
  return records[-1 if recipe.last else 0][recipe.metric]


CASES = [
  pytest.param(name, shape, id=f"{name}{'-experts' * (shape is MIXTURE)}", marks=[] if quick else [pytest.mark.slow])
  for name in TABLE
  for shape, quick in [(None, name in QUICK), *([(MIXTURE, False)] * (name in WITH_EXPERTS))]
]


@pytest.mark.parametrize("name, shape", CASES)
def test_three_steps_the_part_that_it_is_named_for_and_a_resume(name, shape, tmp_path):
  reference(tmp_path)
  recipe = TABLE[name]
  made = partial(settings, name, tmp_path, shape)
  with Checkpointer(tmp_path / "whole", keep=STEPS) as checkpointer:
    whole, records = run(made(), checkpointer=checkpointer)
  assert [r["step"] for r in records] == [1, 2, 3] and all(r["nonfinite"] == 0 for r in records)
  assert all(np.isfinite(r["loss"]) for r in records if "loss" in r) and np.isfinite(flat(whole)).all()
  assert all(r["rollouts/failed"] == 0 and r["logp_gap/max"] < 1e-4 for r in records)

  method = None if recipe.without is None else recipe.without(build_method(made()))
  _, other = run(made(steps=STEPS if recipe.last else 1, **recipe.off), method=method)
  on, off = at(records, recipe), at(other, recipe)
  print(json.dumps({"recipe": name, "metric": recipe.metric, "with": on, "without": off}))
  assert recipe.sign * (on - off) > 1e-6

  for step in range(2, STEPS + 1):
    shutil.rmtree(tmp_path / "whole" / f"{step:08d}")
  with Checkpointer(tmp_path / "whole") as checkpointer:
    assert checkpointer.steps() == [1]
    resumed, _ = run(made(), checkpointer=checkpointer, resume=True)
  np.testing.assert_array_equal(flat(whole), flat(resumed))


@pytest.mark.parametrize("name", TABLE)
def test_demonstrations_fit_the_limits_of_the_recipe(name):
  config = configuration.load(RECIPES / f"{name}.yaml")
  options = {key: value for key, value in config.env.options.items() if key != "reference"}
  tasks, chat = resolve(dataclasses.replace(config.env, options=options)), Chat(byte_tokenizer())
  for index in range(64):
    ids, action = chat.demonstration(*tasks.demonstration(index))
    turns = [len(list(run)) for acts, run in itertools.groupby(action) if acts]
    assert len(ids) <= config.rollout.max_tokens and len(turns) <= config.rollout.max_turns
    assert max(turns) <= config.rollout.max_turn_tokens


def test_every_recipe_is_in_the_table():
  assert set(TABLE) == {path.stem for path in RECIPES.glob("*.yaml")}
