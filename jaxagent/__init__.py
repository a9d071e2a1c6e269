"""Functional reinforcement learning for LLM agents in JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jaxagent import optim
  from jaxagent.config import Config
  from jaxagent.config import load as load_config
  from jaxagent.rollout.collect import collect
  from jaxagent.run import train
  from jaxagent.training.step import make_train_step

__version__ = "0.1.0"
__all__ = ["Config", "collect", "load_config", "make_train_step", "optim", "train"]

_HOMES = {
  "Config": ("jaxagent.config", "Config"),
  "collect": ("jaxagent.rollout.collect", "collect"),
  "load_config": ("jaxagent.config", "load"),
  "make_train_step": ("jaxagent.training.step", "make_train_step"),
  "optim": ("jaxagent.optim", None),
  "train": ("jaxagent.run", "train"),
}


def __getattr__(name: str) -> Any:
  """The front door, opened on first use: importing a package of functions must not import a model or an engine."""
  if name not in _HOMES:
    raise AttributeError(f"module 'jaxagent' has no attribute {name!r}")
  import importlib

  module, attribute = _HOMES[name]
  found = importlib.import_module(module)
  return found if attribute is None else getattr(found, attribute)
