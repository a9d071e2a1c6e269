"""Repairing the files of small operations: latent worlds, declared defects, and a progress contract (after Tev)."""

from jaxagent.envs.workflow.tasks import DOMAINS, Workflow, WorkflowEpisode, reference_calls
from jaxagent.envs.workflow.world import SCALES

__all__ = ["DOMAINS", "SCALES", "Workflow", "WorkflowEpisode", "reference_calls"]
