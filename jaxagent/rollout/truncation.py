"""Rollouts cut to what a policy with a sliding window is trained on: the prefix and the end of the stream."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxagent.checks import concrete
from jaxagent.types import PER_TOKEN, Rollouts


def truncate_backprop(
  rollouts: Rollouts,
  *,
  window: int,
  multiplier: int = 4,
  prefix: int | None = None,
  loss_on_all_if_fits: bool = False,
) -> Rollouts:
  """The prefix and the last multiplier x window tokens of each row, at their old positions; loss on the last `window`.

  Rows of T tokens become rows of min(T, prefix + multiplier x window). What is sent before the loss is context only.
  A row with at most `window` tokens after its prefix stays as it is; one that fits is sent whole, and
  `loss_on_all_if_fits` keeps the loss on all of it. With multiplier 1 the first token after a gap has no loss: the
  state that it was predicted from is not sent. Every column `[N, T, ...]` rides with its token, the method's too; in
  the others, places in the row mean those of before. For l layers of window W it is exact iff
  (multiplier - 1) W - 1 >= l (W - 1), else an approximation.

  Call it between advantages, which need whole rollouts, and what counts tokens or compares log-probs: `logp_old` and
  `logp_ref` are to be scored on its result. `prefix` is the room for prefixes, by default the longest of the batch;
  under jit it must be given, and a row whose prefix is longer becomes invalid. NumPy arrays stay on the host.

  Errors: ValueError for a prefix without room, a size below 1, and no `prefix` under jit.
  Source: Muennighoff et al. 2026, arXiv 2608.26070 (Prefix Sliding), from digests of the paper. Ours differs: nothing;
  `loss_on_all_if_fits` and the case of multiplier 1 are ours.
  """
  room = _room(rollouts, window, multiplier, prefix)
  xp = np if isinstance(rollouts.length, np.ndarray) else jnp
  n, total = rollouts.tokens.shape
  sent = multiplier * window
  width = min(total, room + sent)
  start, end = rollouts.prefix_length[:, None], rollouts.length[:, None]
  gap = xp.maximum(end - start - sent, 0)
  place = xp.arange(width)[None]
  source = xp.minimum(place + xp.where(place >= start, gap, 0), total - 1)
  length = xp.minimum(end - gap, width)
  trained = end - start if loss_on_all_if_fits else window
  trained = xp.where(gap > 0, window, trained)
  in_loss = (place < length) & (place >= length - trained) & ((gap == 0) | (place != start))
  fits = rollouts.prefix_length <= room

  def cut(x):
    return (x if xp is np else jnp.asarray(x))[xp.arange(n)[:, None], source]

  own = {k: cut(getattr(rollouts, k)) for k in PER_TOKEN if getattr(rollouts, k) is not None}
  mask = own["mask"] & in_loss & fits[:, None]
  columns = {k: cut(x) if np.shape(x)[:2] == (n, total) else x for k, x in rollouts.columns.items()}
  return dataclasses.replace(
    rollouts,
    **{**own, "mask": mask, "turn": xp.where(mask, own["turn"], -1)},
    length=length[:, 0],
    prefix_length=xp.minimum(rollouts.prefix_length, width),
    valid=rollouts.valid & fits,
    columns=columns,
  )


def _room(rollouts: Rollouts, window: int, multiplier: int, prefix: int | None) -> int:
  for name, size in (("window", window), ("multiplier", multiplier)):
    if size < 1:
      raise ValueError(f"truncate_backprop: {name} must be at least 1, got {size}")
  if not concrete(rollouts.prefix_length):
    if prefix is None:
      raise ValueError("truncate_backprop: under jit the shape must be known; give prefix, the room for prefixes")
    return prefix
  lengths = np.asarray(rollouts.prefix_length)
  longest = int(lengths.max(initial=0))
  if prefix is not None and longest > prefix:
    raise ValueError(
      f"truncate_backprop: the prefix of row {int(lengths.argmax())} has {longest} tokens, but there is room for"
      f" {prefix}; raise prefix or shorten the prompt"
    )
  return longest if prefix is None else prefix
