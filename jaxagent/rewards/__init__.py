"""Outcomes to rewards: pure functions of arrays."""

from jaxagent.rewards.efficiency import soft_overlong

__all__ = ["soft_overlong"]
