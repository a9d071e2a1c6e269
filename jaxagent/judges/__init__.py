"""Judges, and what methods ask them."""

from jaxagent.judges.base import Judge, JudgeError, Question, Reply, Rules
from jaxagent.judges.cache import Cache
from jaxagent.judges.cliff import FirstError
from jaxagent.judges.draco import Rubric
from jaxagent.judges.endpoint import Endpoint
from jaxagent.judges.panel import Panel
from jaxagent.judges.policy import PolicyJudge
from jaxagent.judges.progress import Progress
from jaxagent.judges.scpo import Matches
from jaxagent.judges.taspo import Guidance

__all__ = [
  "Cache",
  "Endpoint",
  "FirstError",
  "Guidance",
  "Judge",
  "JudgeError",
  "Matches",
  "Panel",
  "PolicyJudge",
  "Progress",
  "Question",
  "Reply",
  "Rubric",
  "Rules",
]
