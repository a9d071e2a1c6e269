"""The sampling engine: continuous batching over a fixed number of slots, with exact log-probs."""

from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.sampling.session import Busy, Piece, Session

__all__ = ["Busy", "Engine", "Piece", "Sampling", "Session"]
