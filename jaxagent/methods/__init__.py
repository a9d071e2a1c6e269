"""Algorithms as values: an `Objective` and what it needs, and the presets by name for the command line."""

from collections.abc import Callable, Mapping

from jaxagent.methods.group import dapo, dapo_within, dr_grpo, dr_grpo_within, grpo, grpo_kl, gspo, rloo
from jaxagent.methods.objective import Method, Objective
from jaxagent.methods.prepare import Prepared, minibatches, plain, prepare
from jaxagent.methods.supervised import sft

PRESETS: Mapping[str, Method | Callable[..., Method]] = {
  "dapo": dapo,
  "dapo_within": dapo_within,
  "dr_grpo": dr_grpo,
  "dr_grpo_within": dr_grpo_within,
  "grpo": grpo,
  "grpo_kl": grpo_kl,
  "gspo": gspo,
  "rloo": rloo,
  "sft": sft,
}

__all__ = [
  "PRESETS",
  "Method",
  "Objective",
  "Prepared",
  "dapo",
  "dapo_within",
  "dr_grpo",
  "dr_grpo_within",
  "grpo",
  "grpo_kl",
  "gspo",
  "minibatches",
  "plain",
  "prepare",
  "rloo",
  "sft",
]
