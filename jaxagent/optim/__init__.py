"""Muon for hidden matrices, beside any Optax transform for the rest, on any mesh."""

from jaxagent.optim.iterations import JORDAN, POLAR_EXPRESS, Quintic, gram_newton_schulz, newton_schulz
from jaxagent.optim.labels import MatrixSpec, hidden_matrices
from jaxagent.optim.metrics import MuonState, muon_metrics
from jaxagent.optim.transform import muon, rms_scale, scale_by_muon, width_scale

__all__ = [
  "JORDAN",
  "POLAR_EXPRESS",
  "MatrixSpec",
  "MuonState",
  "Quintic",
  "gram_newton_schulz",
  "hidden_matrices",
  "muon",
  "muon_metrics",
  "newton_schulz",
  "rms_scale",
  "scale_by_muon",
  "width_scale",
]
