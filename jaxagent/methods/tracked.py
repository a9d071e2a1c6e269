"""Methods with a memory across steps."""

from dataclasses import replace
from functools import partial

from jaxagent.advantages import (
  PromptRates,
  add_clipped_penalty,
  attenuate_by_entropy,
  attenuated_shares,
  minus_baseline,
  standardize_tokens,
)
from jaxagent.losses import dual_clip, token_mean, truncated_importance
from jaxagent.methods.annotators import Given
from jaxagent.methods.group import grpo
from jaxagent.methods.objective import Annotator, Method
from jaxagent.methods.trackers import EntropyTracker, RateTracker
from jaxagent.metrics import advantage_shape, penalised_gap

PENALTIES = Given(("penalties",))


def gepo(base: Method = grpo, alpha_low: float = 0.5, alpha_high: float = 0.2) -> Method:
  """Cheng et al. 2026, arXiv 2607.16850: less reinforcement where a group is certain, less punishment where it is not.

  On top of any `base`; Intern-S2's is `rloo`.
  """
  attenuate = partial(attenuate_by_entropy, alpha_low=alpha_low, alpha_high=alpha_high)
  objective = replace(base.objective, advantage=(*base.objective.advantage, attenuate))
  metrics = tuple({**dict(base.metrics), "attenuated": attenuated_shares, "advantage": advantage_shape}.items())
  return replace(base, objective=objective, trackers=(*base.trackers, EntropyTracker()), metrics=metrics)


def spo_plus_plus(tasks: int, initial: PromptRates | None = None) -> Method:
  """Ruan et al. 2026, arXiv 2608.24870: one rollout per prompt against the prompt's own success rate.

  Standardised over tokens, clip (0.2, 0.28) with dual clip 2, sampler ratio truncated at 2. See `RateTracker`.
  """
  objective = replace(
    grpo.objective, advantage=(minus_baseline, partial(standardize_tokens, ddof=1)), aggregate=token_mean,
    surrogate=partial(dual_clip, high=0.28, cap=2.0), weight=(partial(truncated_importance, cap=2.0),),
  )  # fmt: skip
  return replace(grpo, objective=objective, trackers=(RateTracker(tasks, initial),))


def spo_muon(tasks: int, initial: PromptRates | None = None, annotator: Annotator = PENALTIES) -> Method:
  """Long-Horizon RL Needs Muon (2026): SPO++ with penalties within 0.25, added before the standardisation.

  The objective only; Muon is the optimizer. `penalties [N, R]`: `rewards.length_penalty`, `rewards.tool_error_penalty`.
  Reconstruction: the paper's text was not available.
  """
  parent = spo_plus_plus(tasks, initial)
  baseline, standardize = parent.objective.advantage
  advantage = (baseline, add_clipped_penalty, standardize)
  return replace(
    parent, objective=replace(parent.objective, advantage=advantage), annotators=(annotator,),
    metrics=(("penalised_gap", penalised_gap),),
  )  # fmt: skip
