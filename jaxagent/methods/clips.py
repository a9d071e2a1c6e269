"""GRPO with another surrogate: what happens where the policy has moved away from the sampler's."""

from dataclasses import replace
from functools import partial

from jaxagent.losses import cispo as weight_clip
from jaxagent.losses import cispo_capped as weight_cap
from jaxagent.losses import divergence_clip_tv, sequence_sum, token_mean, two_sided_clip
from jaxagent.losses import gmpo as geometric_clip
from jaxagent.losses import gspo as sequence_clip
from jaxagent.losses import sapo as soft_gate
from jaxagent.losses import vespo as sequence_gate
from jaxagent.methods.group import grpo, gspo
from jaxagent.methods.objective import Method, Slot


def _with(surrogate: Slot, aggregate: Slot = grpo.objective.aggregate, parent: Method = grpo) -> Method:
  return replace(parent, objective=replace(parent.objective, surrogate=surrogate, aggregate=aggregate))


def cispo(high: float = 0.28) -> Method:
  """arXiv 2506.13585 (MiniMax-M1): REINFORCE weighted by the ratio, clipped above only; token mean.

  `high` is relative to 1; 0.28 is DAPO's, the paper's own value was not available.
  """
  return _with(partial(weight_clip, low=1.0, high=high), token_mean)


def cispo_capped(cap: float = 5.0) -> Method:
  """CISPO with an absolute cap of the ratio, as in ScaleRL, arXiv 2510.13786, whose batch scale is not here."""
  return _with(partial(weight_cap, cap=cap), token_mean)


def sapo(positive: float = 1.0, negative: float = 1.05) -> Method:
  """arXiv 2511.20347: a soft gate of the token's ratio, sharper for negative advantages."""
  return _with(partial(soft_gate, positive=positive, negative=negative))


def gmpo(clip: float = 0.4) -> Method:
  """arXiv 2507.20673: the geometric mean of the ratios, each log ratio clipped on one side."""
  return _with(partial(geometric_clip, clip=clip))


def vespo(positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)) -> Method:
  """arXiv 2602.10693: the product of the sequence's ratios through a gate that fades at both ends; token mean."""
  ends = {"positive": (positive[0], positive[1]), "negative": (negative[0], negative[1])}  # a config gives lists
  return _with(partial(sequence_gate, **ends), token_mean)


def luspo(low: float = 2e-3, high: float = 2.5e-3) -> Method:
  """arXiv 2602.05261: GSPO with each sequence's loss times its length."""
  return _with(partial(sequence_clip, low=low, high=high), sequence_sum, gspo)


def intellect2(cap: float = 4.0) -> Method:
  """arXiv 2505.07291: the ratio capped for negative advantages too. Only the clip, of all that INTELLECT-2 does."""
  return _with(partial(two_sided_clip, cap=cap))


def dppo(threshold: float = 0.15) -> Method:
  """Qi et al. 2026, arXiv 2602.04879: a mask by divergence in place of the clip. The threshold is ours.

  Measured against `logp_old`; the paper measures against the sampler's policy.
  """
  return _with(partial(divergence_clip_tv, threshold=threshold))
