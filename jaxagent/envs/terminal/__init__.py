"""Tasks in a sandboxed shell: `Terminal`."""

from jaxagent.envs.terminal.environment import Terminal, TerminalEpisode
from jaxagent.envs.terminal.sandbox import Result, Sandbox, SandboxGone, SandboxLimits

__all__ = ["Result", "Sandbox", "SandboxGone", "SandboxLimits", "Terminal", "TerminalEpisode"]
