"""Rewards to advantages: pure functions of arrays."""

from jaxagent.advantages.group import group_centered, group_relative, leave_one_out

__all__ = ["group_centered", "group_relative", "leave_one_out"]
