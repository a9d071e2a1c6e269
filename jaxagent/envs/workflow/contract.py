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
  """`stages`, each with those before it, have their `defects`. The last stage, after all of them, is the file `report`,
  which the inputs lack: 1 if it says what the truth says, else 0."""

  truth: Mapping[str, str]
  report: str
  stages: tuple[tuple[str, tuple[str, ...]], ...]
  defects: tuple[Defect, ...]

  def __post_init__(self):
    names = ["intact", *(name for name, _ in self.stages), "report"]
    before = np.zeros((len(names), len(names)), bool)
    before[1:, 0] = before[-1, :-1] = True
    for name, earlier in self.stages:
      before[names.index(name), [names.index(other) for other in earlier]] = True
    weight = np.array([0.0, *[1 / (len(names) - 1)] * (len(names) - 1)], np.float32)
    object.__setattr__(self, "_arrays", (weight, all_prerequisites(before)))
    object.__setattr__(self, "_facts", facts(self.truth, self.truth))

  def scores(self, files: Mapping[str, str]) -> dict[str, float]:
    """c_v of every stage, "intact" first and "report" last."""
    wrong = differing(self._facts, facts(files, self.truth))
    reported = all(path != self.report for path, *_ in wrong)
    touched = frozenset().union(*(defect.sites for defect in self.defects))
    harmed = any(path != self.report for path, *_ in wrong - touched)
    repaired = {
      name: [not defect.sites & wrong for defect in self.defects if defect.stage == name] for name, _ in self.stages
    }
    shares = {name: sum(done) / len(done) for name, done in repaired.items()}
    return {"intact": float(not harmed), **shares, "report": float(reported)}

  def potential(self, files: Mapping[str, str]) -> float:
    """Phi in [0, 1] of the workspace: 1 iff the strict verifier accepts it (rounded to 1e-6, for float32's sake)."""
    weight, before = self._arrays
    scores = np.array(list(self.scores(files).values()), np.float32)
    return round(min(float(contract_progress(scores, weight, before)), 1.0), 6)
