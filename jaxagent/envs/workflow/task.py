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


def truth_of(domain: Domain, scale: Scale, seed: int) -> Files:
  """The untouched rendering of the task's world."""
  return domain.render(domain.world(random.Random(f"world {domain.name} {scale} {seed}"), scale.rows))


def build(domain: Domain, scale: Scale, seed: int) -> Task:
  """The same domain, scale and seed give the same bytes.

  ValueError: a world with too few records for its defects.
  """
  rng = random.Random(f"defects {domain.name} {scale} {seed}")
  truth = truth_of(domain, scale, seed)
  classes = _draw_classes(domain, scale, rng)
  files = {path: text for path, text in truth.items() if path != domain.report}
  defects, targets = [], _draw_targets(classes, truth, scale, rng)
  for corruption in classes:
    for key in targets[corruption.name]:
      damaged, where = corruption.damage(files, key, rng), (corruption.path,)
      defects.append(Defect(corruption.name, differing(facts(files, where), facts(damaged, where))))
      files = damaged
  contract = Contract(truth, domain.report, _stages(domain, classes), tuple(defects))
  rules = "\n".join([domain.summary, *(c.rule for c in classes), "Leave all else as it is.", domain.report_rule])
  return Task(domain, files, truth, contract, rules)


def _stages(domain: Domain, classes: list[Corruption]) -> tuple[tuple[str, tuple[str, ...]], ...]:
  """The drawn classes, each with the drawn ones before it: also those that stand behind one that was not drawn."""
  earlier: dict[str, set[str]] = {}
  for corruption in domain.corruptions:
    earlier[corruption.name] = {*corruption.after, *(name for after in corruption.after for name in earlier[after])}
  drawn = [corruption.name for corruption in classes]
  return tuple((name, tuple(other for other in drawn if other in earlier[name])) for name in drawn)


def _draw_classes(domain: Domain, scale: Scale, rng: random.Random) -> list[Corruption]:
  chosen = rng.sample(range(len(domain.corruptions)), min(scale.classes, len(domain.corruptions)))
  return [domain.corruptions[i] for i in sorted(chosen)]


def _draw_targets(classes: list[Corruption], truth: Files, scale: Scale, rng: random.Random) -> dict[str, list[str]]:
  """Records for each class, none of them twice; fewer than `scale.defects` where there are fewer. The class with the
  fewest to choose from chooses first."""
  chosen: dict[str, list[str]] = {}
  hit: set[tuple[str, str]] = set()
  for corruption in sorted(classes, key=lambda c: len(c.targets(truth))):
    free = [key for key in corruption.targets(truth) if (corruption.path, key) not in hit]
    if not free:
      raise ValueError(f"no record is left for a defect {corruption.name!r} among {scale.rows} rows; raise rows")
    chosen[corruption.name] = keys = rng.sample(free, min(scale.defects, len(free)))
    hit |= {(corruption.path, key) for key in keys}
  return chosen
