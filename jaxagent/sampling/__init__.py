"""The sampling engine: continuous batching over a fixed number of slots, with exact log-probs."""

from jaxagent.sampling.engine import Engine, Session
from jaxagent.sampling.request import Sampling

__all__ = ["Engine", "Sampling", "Session"]
