"""From a domain, a scale and a seed to a task: the inputs of the agent, and the contract that scores its work."""

import dataclasses
import random

from jaxagent.envs.workflow.contract import Contract, Defect
from jaxagent.envs.workflow.facts import differing, facts
from jaxagent.envs.workflow.world import Corruption, Domain, Files, Scale


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """`files` are the corrupted inputs, `truth` the untouched rendering of the world with the report."""

  domain: Domain
  files: Files
  truth: Files
  contract: Contract
  rules: str


def build(domain: Domain, scale: Scale, seed: int) -> Task:
  """The same domain, scale and seed give the same bytes.

  ValueError: a world with too few records for its defects.
  """
  rng = random.Random(f"{domain.name} {scale} {seed}")
  truth = domain.render(domain.world(rng, scale.rows))
  classes = _draw_classes(domain, scale, rng)
  files = {path: text for path, text in truth.items() if path != domain.report}
  defects, hit = [], set()
  for corruption in classes:
    for key in _draw_targets(corruption, truth, hit, scale, rng):
      damaged = corruption.damage(files, key, rng)
      defects.append(Defect(corruption.name, differing(facts(files, files), facts(damaged, damaged))))
      files = damaged
      hit.add((corruption.path, key))
  drawn = {corruption.name for corruption in classes}
  stages = [(c.name, tuple(name for name in c.after if name in drawn)) for c in classes]
  stages.append(("report", tuple(sorted(drawn))))
  defects.append(Defect("report", frozenset({(domain.report,)})))
  rules = "\n".join([domain.summary, *(c.rule for c in classes), domain.report_rule])
  return Task(domain, files, truth, Contract(truth, tuple(stages), tuple(defects)), rules)


def _draw_classes(domain: Domain, scale: Scale, rng: random.Random) -> list[Corruption]:
  chosen = rng.sample(range(len(domain.corruptions)), min(scale.classes, len(domain.corruptions)))
  return [domain.corruptions[i] for i in sorted(chosen)]


def _draw_targets(corruption: Corruption, truth: Files, hit: set, scale: Scale, rng: random.Random) -> list[str]:
  """Records that no other defect has hit: fewer than `scale.defects` where the class has fewer targets."""
  free = [key for key in corruption.targets(truth) if (corruption.path, key) not in hit]
  if not free:
    raise ValueError(f"no record is left for a defect {corruption.name!r} among {scale.rows} rows; raise rows")
  return rng.sample(free, min(scale.defects, len(free)))
