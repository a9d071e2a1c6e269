"""Random ragged batches of one fixed shape, so that a jitted function compiles once over all examples."""

import numpy as np

N, T, S = 6, 24, 8
NAN = np.float32(np.nan)


def ragged(seed: int, *, branches: bool = True, invalid: bool = True) -> dict[str, np.ndarray]:
  """Rows of turns with context between and inside them, NaN at every masked place; some rows without an action.

  With `branches`, row 1 may go on numbering the turns of row 0's rollout. Rows of one rollout share group and reward.
  """
  rng = np.random.default_rng(seed)
  mask, turn = np.zeros((N, T), bool), np.full((N, T), -1, np.int32)
  rollout = np.arange(N)
  if branches and rng.random() < 0.5:
    rollout[1] = 0
  first = 0
  for n in range(N):
    first = first if n == 1 and rollout[1] == 0 else 0
    place = rng.integers(0, 3)
    for k in range(first, first + rng.integers(n == 0, 5)):
      for _ in range(rng.integers(1, 4)):
        mask[n, place], turn[n, place] = True, k
        place += 1 + (rng.random() < 0.2)
      place += rng.integers(0, 3)
      first = k + 1
      if place > T - 8:
        break
  group = rng.integers(0, rng.integers(1, 4), N)[rollout]
  reward = rng.choice([0.0, 1.0, 0.35, -2.5], N)[rollout].astype(np.float32)
  valid = (rng.random(N) < 0.85) if invalid else np.ones(N, bool)
  mask &= valid[:, None]
  places = np.zeros((N, S), bool)
  np.maximum.at(places, (np.nonzero(mask)[0], turn[mask]), True)
  turn_reward = np.where(places, rng.normal(size=(N, S)), 0).astype(np.float32)
  turn_reward[~valid], reward[~valid] = NAN, NAN
  value = np.where(mask, rng.normal(size=(N, T)), NAN).astype(np.float32)
  bootstrap = np.where(rng.random(N) < 0.3, rng.normal(size=N), 0).astype(np.float32)
  return dict(
    mask=mask, turn=np.where(mask, turn, rng.integers(-9, 99, (N, T))).astype(np.int32), group=group, rollout=rollout,
    valid=valid, reward=reward, turn_reward=turn_reward, value=value, bootstrap=bootstrap,
  )  # fmt: skip


def pick(batch: dict, *names: str) -> dict:
  return {name: batch[name] for name in names}


def rows(batch: dict, order) -> dict:
  """The batch with its rows in another order; ids of rollouts and groups are kept."""
  return {name: x[order] for name, x in batch.items()}


def one_row(*turns, context=0):
  """mask and turn `[1, T]` of a row whose turns have these numbers of tokens, with `context` tokens before each."""
  mask = np.concatenate([[False] * context + [True] * n for n in turns])
  turn = np.concatenate([[-1] * context + [k] * n for k, n in enumerate(turns)])
  return mask[None], turn[None].astype(np.int32)


def turn_lists(batch: dict, n: int):
  """[(turn number, places of its action tokens)] of row n, for reference loops."""
  places = np.flatnonzero(batch["mask"][n])
  numbers = list(dict.fromkeys(batch["turn"][n, places]))
  return [(k, [t for t in places if batch["turn"][n, t] == k]) for k in numbers]
