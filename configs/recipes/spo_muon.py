"""The penalties of `configs/recipes/spo_muon.yaml`: of tool calls that failed, and of length."""

from jaxagent.methods import Given, Method, spo_muon
from jaxagent.types import Trajectory

FREE = 128  # tokens that an episode may write before they cost anything


def penalised(tasks: int) -> Method:
  """`spo_muon` with `penalties [N, 2]` from the transcripts."""
  return spo_muon(tasks, annotator=Given(("penalties",), penalties))


def penalties(trajectory: Trajectory) -> dict[str, list[float]]:
  """The formulas of `rewards.tool_error_penalty` and `rewards.length_penalty`, for one trajectory."""
  replies = [m["content"] for m in trajectory.transcript if m["role"] == "tool"]
  errors = sum(reply.startswith("error:") for reply in replies)
  over = max(0, sum(map(bool, trajectory.action)) - FREE)
  return {"penalties": [-0.25 * errors / max(len(replies), 1), -0.25 * over / FREE]}
