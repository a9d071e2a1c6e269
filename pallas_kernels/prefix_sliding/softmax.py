"""What the blockwise softmaxes share: options that are static in a call, and the constants of masked scores."""

import math
from typing import NamedTuple


class Options(NamedTuple):
  window: int | None
  scale: float
  soft_cap: float | None


LOG2E = math.log2(math.e)  # scores are to the base 2, for exp2
MASKED, FLOOR = -1e30, -1e20  # a running maximum starts at FLOOR, so that exp2 of a masked score is 0
TINY = 1e-30
