"""Methods in which length and tool calls cost something, and an agent for search."""

from dataclasses import replace
from functools import partial

from jaxagent.losses import mode_token_clip
from jaxagent.methods.annotators import Given
from jaxagent.methods.batch import bws
from jaxagent.methods.group import grpo, grpo_kl
from jaxagent.methods.objective import Annotator, Method
from jaxagent.metrics import reward_change
from jaxagent.rewards import difficulty_bonus, gated_efficiency, least_tool_calls, solved_tasks_pay_for_tools

REFERENCE = Given(("reference_accuracy", "reference_tokens"))
MODES = Given(("reference_accuracy", "reference_tokens", "forced"))
TOOL_COST = Given(("tool_cost",))


def think_only(beta: float = 0.5, annotator: Annotator = REFERENCE) -> Method:
  """When2Think without its two modes: a bonus for short answers where the task is easy, standardised over the batch.

  `reference_accuracy [N]` and `reference_tokens [N]` of each row's task, sampled once from a reference policy.
  Shim et al. 2026, arXiv 2609.19671. Reconstruction: the paper's equation was not available.
  """
  return replace(
    bws(), reward=(partial(difficulty_bonus, beta=beta),), annotators=(annotator,), metrics=(("reward", reward_change),)
  )


def when2think(beta: float = 0.5, annotator: Annotator = MODES) -> Method:
  """Shim et al. 2026, arXiv 2609.19671: `think_only`, with a first token drawn from a fair coin: think, or not.

  `forced [N, T]`: that token. Reconstruction: the paper's equation was not available.
  """
  parent = think_only(beta, annotator)
  return replace(parent, objective=replace(parent.objective, surrogate=mode_token_clip))


def slimsearcher(annotator: Annotator = TOOL_COST) -> Method:
  """Xie et al. 2026, arXiv 2606.07074: GRPO on correctness times two gates, tools (`rewards.tool_cost`) and length."""
  return replace(
    grpo, reward=(gated_efficiency,), annotators=(annotator,), metrics=(("reward", reward_change),)
  )


def otc(alpha: float = 1.0, annotator: Annotator = TOOL_COST) -> Method:
  """Wang et al. 2025, arXiv 2504.14870 (OTC-GRPO): `tool_cost [N]` is the number of calls."""
  return replace(grpo, reward=(partial(least_tool_calls, alpha=alpha),), annotators=(annotator,))


def eapo(beta: float = 0.5, annotator: Annotator = TOOL_COST) -> Method:
  """arXiv 2606.02132: tool calls cost much where the group solves the task, little where it does not.

  The paper samples 16 rollouts, at least 2 of them without tools: a matter of the sampler.
  """
  return replace(grpo, reward=(partial(solved_tasks_pay_for_tools, beta=beta),), annotators=(annotator,))


def search_agent(coefficient: float = 0.001) -> Method:
  """The small search agent of Leiden University: GRPO in groups of 5 with a weak k3; its rewards are host functions.

  The environment pays by `rewards.exact_match`, `rewards.token_f1` or `rewards.f1_with_floor`.
  """
  return grpo_kl(coefficient)
