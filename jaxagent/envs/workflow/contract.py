"""The progress contract of a task: defects as sets of facts, stages as shares of repaired defects, and their potential.

    c_v = repaired defects of stage v / its defects                       0 in the untouched workspace, by construction
    Phi = sum_v w_v min(c_v, min over the prerequisites u of v of c_u)    `rewards.contract_progress`

A stage of weight 0, "intact", comes before all others: 1 if every fact that no defect touched is as it was, else 0.
So nothing is earned by deleting, filling, shuffling or flooding what was right.
Source: Hu et al. 2026 (Tev), for the contract. The defect as a set of facts, equal weights and the stage "intact" are
ours: the paper's own scorers were not available.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxagent.envs.workflow.facts import Fact, differing, facts
from jaxagent.rewards.progress import all_prerequisites, contract_progress


@dataclasses.dataclass(frozen=True)
class Defect:
  """Repaired iff all of `sites` say what the truth says."""

  stage: str
  sites: frozenset[Fact]


@dataclasses.dataclass(frozen=True, eq=False)
class Contract:
  """`stages` without "intact", each with the stages that must come before it; a file of the truth that the inputs lack
  is the single defect of the last stage."""

  truth: Mapping[str, str]
  stages: tuple[tuple[str, tuple[str, ...]], ...]
  defects: tuple[Defect, ...]

  def __post_init__(self):
    names = ["intact", *(name for name, _ in self.stages)]
    before = np.zeros((len(names), len(names)), bool)
    before[1:, 0] = True
    for name, after in self.stages:
      for other in after:
        before[names.index(name), names.index(other)] = True
    weight = np.array([0.0, *[1 / len(self.stages)] * len(self.stages)], np.float32)
    object.__setattr__(self, "_arrays", (weight, all_prerequisites(before)))
    object.__setattr__(self, "_facts", facts(self.truth, self.truth))

  def scores(self, files: Mapping[str, str]) -> dict[str, float]:
    """c_v of every stage, "intact" first."""
    wrong = differing(self._facts, facts(files, self.truth))
    touched = frozenset().union(*(defect.sites for defect in self.defects))
    given = {path for path in self.truth if not self._whole(path)}
    scores = {"intact": float(not any(fact[0] in given for fact in wrong - touched))}
    for name, _ in self.stages:
      repaired = [not self._open(defect, wrong) for defect in self.defects if defect.stage == name]
      scores[name] = sum(repaired) / len(repaired)
    return scores

  def potential(self, files: Mapping[str, str]) -> float:
    """Phi in [0, 1] of the workspace: 1 iff the strict verifier accepts it (rounded to 1e-6, for float32's sake)."""
    weight, before = self._arrays
    scores = np.array(list(self.scores(files).values()), np.float32)
    return round(min(float(contract_progress(scores, weight, before)), 1.0), 6)

  def _whole(self, path: str) -> bool:
    """The defect is that the file is missing: then every fact of the file is its site, whatever is written there."""
    return any((path,) in defect.sites for defect in self.defects)

  def _open(self, defect: Defect, wrong: frozenset[Fact]) -> bool:
    missing = {fact[0] for fact in defect.sites if len(fact) == 1}
    return bool(defect.sites & wrong) or any(fact[0] in missing for fact in wrong)
