"""Which rollouts an update sees, and the packed rows they become."""

from collections.abc import Iterator

import jax
from jaxtyping import Array, Bool

from jaxagent.config import Config
from jaxagent.methods import Prepared, minibatches
from jaxagent.rollout.packing import PackPlan, pack
from jaxagent.types import Rollouts, TokenBatch


def subsets(rollouts: Rollouts, *, epochs: int, count: int, key: Array) -> Iterator[Bool[Array, "N"] | None]:
  """Logical rollouts of each update: `count` disjoint parts in each of `epochs` passes; None is all of them."""
  for epoch in range(epochs):
    yield from [None] if count == 1 else minibatches(rollouts, count, key=jax.random.fold_in(key, epoch))


def packed(config: Config, prepared: Prepared) -> tuple[TokenBatch, PackPlan]:
  t = config.training
  return pack(prepared, row_tokens=t.row_tokens or config.rollout.max_tokens, rows=t.microbatch_rows)
