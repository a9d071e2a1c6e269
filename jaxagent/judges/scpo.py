"""SCPO: steps of a failed rollout that say what a successful sibling's say. Xu et al. 2026, arXiv 2606.25852."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxagent.advantages import anchor_groups, longest_success, match_steps, matched_credit
from jaxagent.judges.episodes import Episode, each_row
from jaxagent.types import PerTurn, Trajectory

LONGEST = 2000  # characters of a step's text; an encoder reads fewer


@dataclasses.dataclass(frozen=True)
class Matches:
  """The columns `anchor [N, S]` and `step_credit [N, S]`: equal states of the group, and matched steps by the encoder.

  A step's text is what was seen and done; the similarity is the cosine of two embeddings, at least 0. Failed rows are
  matched with the same agent's row in the longest success. Ours differs: an encoder of single texts in place of the
  paper's cross-encoder, which reads both at once; `match` holds the threshold, which depends on the encoder.
  """

  match: Callable[[np.ndarray], np.ndarray] = match_steps
  columns: ClassVar[tuple[str, ...]] = ("anchor", "step_credit")
  uses: ClassVar[tuple[str, ...]] = ("encoder",)

  async def __call__(self, trajectories: list[Trajectory], tools: Any) -> dict[str, list[Any]]:
    rows = each_row(trajectories, tools.chat)
    anchor: list[Any] = [PerTurn([-1] * t.turns) for t in trajectories]
    credit: list[Any] = [PerTurn([0.0] * t.turns) for t in trajectories]
    for row, states in zip(rows, self.anchors(rows)):
      anchor[row.rows[0]] = PerTurn(states[: len(row.steps)])
    reference = longest_success([r.outcome for r in rows], [len(r.steps) for r in rows], [_agent(r) for r in rows])
    pairs = [(row, rows[best]) for row, best in zip(rows, reference) if best >= 0 and row.outcome < 1]
    if pairs:
      vectors = _embedded(pairs, tools.encoder)
      for failed, won in pairs:
        similarity = np.clip(vectors[failed.rows[0]] @ vectors[won.rows[0]].T, 0.0, 1.0)
        credit[failed.rows[0]] = PerTurn(matched_credit(similarity, self.match(similarity)))
    return {"anchor": anchor, "step_credit": credit}

  def anchors(self, rows: Sequence[Episode]) -> np.ndarray:
    """Numbers of the states in which each row acted: what its agent had seen last."""
    seen = [[_seen(row, step) for step in range(len(row.steps))] for row in rows]
    turns = max((len(row.steps) for row in rows), default=0)
    return anchor_groups(seen, [0] * len(rows), turns=turns)


def _agent(row: Episode) -> int:
  return row.openings[0][0]


def _seen(row: Episode, step: int) -> str:
  messages = row.steps[step].saw if step else row.openings[0][1]
  return "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in messages)


def step_texts(row: Episode) -> list[str]:
  return [f"{_seen(row, i)[-LONGEST:]}\n{step.action.text[:LONGEST]}" for i, step in enumerate(row.steps)]


def _embedded(pairs: Sequence[tuple[Episode, Episode]], encode: Callable[[list[str]], np.ndarray]) -> dict[int, Any]:
  """Unit vectors [steps, D] of the rows that take part."""
  rows = {row.rows[0]: row for pair in pairs for row in pair}
  texts = {row: step_texts(episode) for row, episode in rows.items()}
  distinct = list(dict.fromkeys(t for own in texts.values() for t in own))
  place = {t: i for i, t in enumerate(distinct)}
  vectors = np.asarray(encode(distinct))
  return {row: vectors[[place[t] for t in own]] for row, own in texts.items()}
