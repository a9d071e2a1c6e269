"""textarena: text games of the textarena package (`pip install 'jaxagent[textarena]'`), those that need no network.

Of one player (22): 2048, Bandit, Blackjack, Countdown, Crosswords, Cryptarithm, FifteenPuzzle, FrozenLake,
GuessTheNumber, LightsOut, LogicPuzzle, Mastermind, Minesweeper, PegJump, RushHour, Secretary, Set, Slitherlink,
Sokoban, Sudoku, ThreeCardMonte, TowerOfHanoi. Of two, against `opponent`: TicTacToe, ConnectFour, Nim, KuhnPoker,
Othello and others. Wordle, Hangman, WordLadder, WordSearch, WordChains, SpellingBee, Codenames, DontSayIt and
LetterAuction want word lists from the network; Debate, GuessWho, ScenarioPlanning and TwentyQuestions a model behind an
API. (textarena 0.7.4; Checkers, Chess, IteratedStagHunt, Klondike, ReverseTicTacToe and UltimateTexasHoldem do not
compile on Python 3.11, and BabyAiText, ScorableGames and UsedCarNegotiation lack files.)
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxagent.checks import nearest
from jaxagent.envs.base import Action, Message, Observation, Step, with_system
from jaxagent.envs.importing import attribute
from jaxagent.envs.splits import require_split, task_seed

PLAYER = 0  # the policy's seat


@dataclasses.dataclass(frozen=True)
class TextArena:
  """Games of the kind `game` ("GuessTheNumber-v0", or "-v0-hardcore" and so on), which takes `options`. Endless.

  The splits differ in their seeds; how many different games there are is up to the kind (TowerOfHanoi has one).
  `opponent`: `my_module:name` of a function of what the other player reads, which returns its action; games of two
  players need it. An episode ends as truncated after `max_turns` turns. `system` is a system prompt.

  ValueError: a game that is unknown or cannot be played here; a package that is not installed.
  """

  game: str = "GuessTheNumber-v0"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  opponent: str | None = None
  max_turns: int = 32
  system: str | None = None

  def __post_init__(self):
    if self.max_turns < 1:
      raise ValueError(f"textarena: max_turns must be at least 1, got {self.max_turns!r}")
    _ = self.other
    _playable(self)

  @property
  def players(self) -> int:
    return 1 if self.opponent is None else 2

  @property
  def other(self) -> Callable[[str], str] | None:
    return None if self.opponent is None else attribute(self.opponent, what="env.options.opponent")

  def size(self, split: str) -> int | None:
    require_split(split)
    return None

  def environment(self, split: str, index: int) -> tuple["Game", int]:
    return Game(self), task_seed(split, index)

  def make(self) -> Any:
    """The package's environment; its own wrappers repeat the whole history, which a conversation has already."""
    package = _package()
    names = package.envs.registration.ENV_REGISTRY
    plain = f"{self.game}-raw"
    return package.make(plain if plain in names else self.game, **self.options)


class Game:
  """One game. Outcome: the reward within [0, 1] where one plays alone; of two, 1 for a win, 1/2 for a draw.

  A reward that is no number, which some games give for an invalid move, counts as 0.
  """

  tool_format = None

  def __init__(self, tasks: TextArena):
    self._tasks, self._other = tasks, tasks.other
    self._turns = 0

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._chance = Chance(seed)
    with self._chance:
      self._game = self._tasks.make()
      self._game.reset(num_players=self._tasks.players, seed=seed)
      done = self._others_moves()
    if done:
      raise ValueError(f"textarena: {self._tasks.game} was over before the policy's first move")
    return {0: Observation(with_system(self._tasks.system, _said(self._read)))}

  async def step(self, actions: dict[int, Action]) -> Step:
    self._turns += 1
    with self._chance:
      done, _ = self._game.step(action=actions[0].text)
      done = done or self._others_moves()
    if done:
      rewards, info = self._game.close()
      outcome, facts = self._outcome((rewards or {}).get(PLAYER)), (info or {}).get(PLAYER, {})
      return Step(outcome=outcome, status="done", info={"reason": str(facts.get("reason", "")), "rewards": rewards})
    if self._turns >= self._tasks.max_turns:
      return Step(status="truncated", cause=f"{self._turns} turns")
    return Step(observations={0: Observation((_said(self._read),))})

  async def close(self) -> None:
    pass

  def _others_moves(self) -> bool:
    """The other player's moves, until it is the policy's turn to read `_read`; True where the game is over."""
    while True:
      player, messages = self._game.get_observation()
      read = _text(messages, player)
      if player == PLAYER:
        self._read = read
        return False
      done, _ = self._game.step(action=str(self._other(read)))
      if done:
        return True

  def _outcome(self, reward: Any) -> float:
    if not isinstance(reward, (int, float)):
      return 0.0
    return min(max(float(reward if self._tasks.players == 1 else (reward + 1) / 2), 0.0), 1.0)


class Chance(contextlib.AbstractContextManager):
  """The module `random` (and NumPy's), which the games draw from, in the state of this episode while inside."""

  def __init__(self, seed: int):
    self._own = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

  def __enter__(self) -> "Chance":
    self._outer = random.getstate(), np.random.get_state()
    self._set(self._own)
    return self

  def __exit__(self, *error) -> None:
    self._own = random.getstate(), np.random.get_state()
    self._set(self._outer)

  def _set(self, states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _said(text: str) -> Message:
  return {"role": "user", "content": text}


def _text(messages: Any, player: int) -> str:
  """What is new to the player, without what it wrote itself."""
  if isinstance(messages, str):
    return messages
  return "\n".join(str(text) for sender, text, *_ in messages if sender != player) or "Your turn."


def _package():
  try:
    import textarena
  except ImportError as error:
    raise ValueError(
      f"the textarena environment needs the textarena package ({error}): pip install 'jaxagent[textarena]'"
    ) from error
  return textarena


def _playable(tasks: TextArena) -> None:
  names = _package().envs.registration.ENV_REGISTRY
  if tasks.game not in names:
    raise ValueError(f"textarena has no game {tasks.game!r}{nearest(tasks.game, names)}")
  try:
    with Chance(0):
      tasks.make().reset(num_players=tasks.players, seed=0)
  except Exception as error:
    raise ValueError(
      f"textarena: {tasks.game} cannot be played with options {tasks.options} by {tasks.players} (two need `opponent`):"
      f" {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    ) from error
