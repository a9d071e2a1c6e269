"""The sampling engine: continuous batching over a fixed number of slots, with exact log-probs."""

from jaxagent.sampling.engine import Engine
from jaxagent.sampling.request import Sampling
from jaxagent.sampling.session import Piece, Session

__all__ = ["Engine", "Piece", "Sampling", "Session"]
