"""How to sample one turn."""

import dataclasses
import math

from jaxagent.checks import check_options


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Temperature first, then top-k, top-p and min-p on what is left; `temperature=0` is greedy.

  `top_k=0`, `top_p=1`, `min_p=0` switch those rules off. `logit_bias`, (id, bias) pairs, is added to the logits first,
  and `allowed` ids are all that can be drawn (None: every id). `stop_ids` end the turn and belong to it, `stop` strings
  end it on the token that completes them. `max_tokens` bounds the turn.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_tokens: int = 256
  stop_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()
  logit_bias: tuple[tuple[int, float], ...] = ()
  allowed: tuple[int, ...] | None = None

  def __post_init__(self):
    check_options(
      "Sampling.",
      (self.temperature >= 0, "temperature", self.temperature, "at least 0 (0 is greedy)"),
      (self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)"),
      (0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1] (1 keeps all)"),
      (0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1) (0 keeps all)"),
      (self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1"),
      (all(self.stop), "stop", self.stop, "without empty strings"),
      (all(map(_is_bias, self.logit_bias)), "logit_bias", self.logit_bias, "pairs of an id and a bias"),
      (self.allowed is None or len(self.allowed) > 0, "allowed", self.allowed, "None or at least one id"),
    )

  @property
  def truncates(self) -> bool:
    """Whether tokens are drawn from another distribution than the policy's: logp_sampled differs from logp_rollout."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.biased

  @property
  def biased(self) -> bool:
    return bool(self.logit_bias) or self.allowed is not None


def _is_bias(pair) -> bool:
  return len(pair) == 2 and not math.isnan(pair[1]) and pair[1] < math.inf
