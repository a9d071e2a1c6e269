"""Functional reinforcement learning for LLM agents in JAX."""

__version__ = "0.1.0"
