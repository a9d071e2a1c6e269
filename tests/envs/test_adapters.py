"""textarena, verifiers and text_gym: what they take, what they refuse, and at least three kinds of tasks of each."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from jaxagent.envs.base import Action
from jaxagent.envs.text_gym import TextGym
from jaxagent.envs.textarena import Chance, TextArena
from jaxagent.envs.verifiers import Verifiers


@pytest.fixture(autouse=True)
def fixtures(monkeypatch):
  monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fixtures")


def play(tasks, write, *, split="train", index=0, turns=100):
  """(texts read, last step) of an episode in which `write(everything read so far)` is written."""

  async def run():
    environment, seed = tasks.environment(split, index)
    observation = (await environment.reset(seed))[0]
    read = [m["content"] for m in observation.messages]
    for _ in range(turns):
      step = await environment.step({0: Action(write(read))})
      if step.status != "running":
        break
      read += [m["content"] for m in step.observations[0].messages]
    await environment.close()
    return read, step

  return asyncio.run(run())


@pytest.mark.parametrize(
  "make, package",
  [(TextArena, "textarena"), (lambda: Verifiers("adapted_tasks:sums"), "verifiers.v1")],
)
def test_without_the_package_the_error_says_what_to_install(make, package, monkeypatch):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ValueError, match=r"pip install 'jaxagent\[" + package.split(".")[0]):
    make()


class TestTextGym:
  @pytest.mark.parametrize("words, outcome", [("east", 1), (" east\n", 1), ("west", 0)])
  def test_a_corridor(self, words, outcome):
    read, end = play(TextGym("adapted_tasks:Corridor", {"size": 4}, max_turns=5), lambda read: words)
    assert read[0].startswith("Room 0 of 4") and end.outcome == outcome
    assert end.status == ("done" if outcome else "truncated")

  def test_four_values_positional_seeds_and_mappings(self):
    tasks = TextGym("adapted_tasks:Older", observation="text", full_reward=2.0, turn_rewards=True)
    _, seed = tasks.environment("train", 2)
    read, end = play(tasks, lambda read: str(seed % 3), index=2)
    assert read == ["0, 1 or 2?"] and end.outcome == 1 and end.turn_rewards == {0: 1.0} and end.status == "done"

  def test_three_values_and_rewards_that_add_up(self):
    tasks = TextGym("adapted_tasks:Three", full_reward=3.0)
    assert play(tasks, lambda read: "it")[1].outcome == 1
    assert play(tasks, lambda read: "it" if len(read) == 1 else "")[1].outcome == pytest.approx(1 / 3)

  @pytest.mark.parametrize(
    "action, text, sent", [("text", " a\nb ", "a\nb"), ("first_line", "\n a\nb", "a"), ("last_line", "a\n b\n", "b")]
  )
  def test_what_is_sent(self, action, text, sent):
    from jaxagent.envs.text_gym import ACTIONS

    assert ACTIONS[action](text) == sent and ACTIONS[action]("") == ""

  def test_in_a_thread_it_plays_the_same(self):
    assert play(TextGym("adapted_tasks:Corridor"), lambda read: "east") == play(
      TextGym("adapted_tasks:Corridor", in_thread=True), lambda read: "east"
    )

  @pytest.mark.parametrize(
    "options, message",
    [
      ({"make": "adapted_tasks:not_an_environment"}, "must give an object with reset and step"),
      ({"make": "adapted_tasks:nothing"}, "no attribute"),
      ({"make": "adapted_tasks:Corridor", "action": "x"}, "action"),
      ({"make": "adapted_tasks:Corridor", "options": {"height": 3}}, "height"),
      ({"make": "adapted_tasks:Corridor", "full_reward": 0.0}, "full_reward"),
    ],
  )  # fmt: skip
  def test_wrong_options(self, options, message):
    with pytest.raises(ValueError, match=message):
      TextGym(**options)

  def test_observations_that_are_no_text_are_refused(self):
    with pytest.raises(ValueError, match="name its key"):
      play(TextGym("adapted_tasks:Older"), lambda read: "0")

  @pytest.mark.slow
  @pytest.mark.parametrize("name", ["Corridor", "gymnasium", "textworld"])
  def test_real_ones(self, name, tmp_path, monkeypatch):
    if name != "Corridor":
      pytest.importorskip(name)
    (tmp_path / "real_gyms.py").write_text(REAL_GYMS)
    monkeypatch.syspath_prepend(tmp_path)
    make = "adapted_tasks:Corridor" if name == "Corridor" else f"real_gyms:{name}"
    tasks = TextGym(make, max_turns=40)
    first = play(tasks, lambda read: "look", turns=2)
    assert first == play(tasks, lambda read: "look", turns=2) and first[0][0]


REAL_GYMS = """
import os, tempfile

class gymnasium:
  def __init__(self):
    import gymnasium
    self.inner = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
  def reset(self, seed=None):
    self.inner.reset(seed=seed)
    return self.inner.render(), {}
  def step(self, action):
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}
    _, reward, ended, cut, info = self.inner.step(moves.get(action, 0))
    return self.inner.render(), reward, ended, cut, info
  def close(self):
    self.inner.close()

class textworld:
  def reset(self, seed):
    import textworld
    options = textworld.GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects, options.quest_length = 2, 3, 2
    options.path = os.path.join(tempfile.mkdtemp(), "game.z8")
    file, _ = textworld.make(options)
    self.inner = textworld.start(file)
    return self.inner.reset().feedback
  def step(self, action):
    state, score, done = self.inner.step(action)
    return state.feedback, score, done
  def close(self):
    self.inner.close()
"""


class TestTextArena:
  @pytest.fixture(autouse=True)
  def package(self):
    pytest.importorskip("textarena")

  def test_guess_the_number_by_halving(self):
    def halve(read):
      low, high = 1, 20
      guess = 0
      for text in ["", *read[1:]]:
        if "higher" in text:
          low = guess + 1
        elif "lower" in text:
          high = guess - 1
        guess = (low + high) // 2
      return f"I say [{guess}]"

    ends = [play(TextArena(), halve, index=i)[1] for i in range(8)]
    assert [end.outcome for end in ends] == [1.0] * 8 and {end.status for end in ends} == {"done"}

  def test_frozen_lake_and_wrong_moves(self):
    read, end = play(TextArena("FrozenLake-v0"), lambda read: "nonsense")
    assert end.status == "done" and end.outcome == 0 and "Invalid" in end.info["reason"] and len(read) == 2

  def test_tower_of_hanoi_is_solved(self):
    def moves(n, a, b, c):
      return [] if n == 0 else [*moves(n - 1, a, c, b), f"[{a} {c}]", *moves(n - 1, b, a, c)]

    plan = iter(moves(3, "A", "B", "C"))
    assert play(TextArena("TowerOfHanoi-v0"), lambda read: next(plan))[1].outcome == 1

  def test_a_reward_that_is_no_number_is_a_loss(self):
    assert play(TextArena("Countdown-v0"), lambda read: "x")[1].outcome == 0

  @pytest.mark.parametrize("opponent, outcome", [("adapted_tasks:refuse", 1), ("adapted_tasks:first_free", None)])
  def test_tic_tac_toe_against_somebody(self, opponent, outcome):
    cells = iter([4, 0, 8, 2, 6, 1, 3, 5, 7])
    tasks = TextArena("TicTacToe-v0", opponent=opponent)
    read, end = play(tasks, lambda read: f"[{next(cells)}]")
    assert end.status == "done" and "Tic Tac Toe" in read[0]
    assert end.outcome == outcome or (outcome is None and end.outcome in (0, 0.5, 1))

  def test_episodes_side_by_side_do_not_share_their_chance(self):
    tasks = TextArena("2048-v0")

    async def both():
      made = [tasks.environment("train", i)[0] for i in (1, 2)]
      read = [[(await e.reset(i))[0].messages[0]["content"]] for i, e in enumerate(made)]
      for move in ("[left]", "[down]", "[right]"):
        for e, texts in zip(made, read):
          step = await e.step({0: Action(move)})
          texts += [m["content"] for o in step.observations.values() for m in o.messages]
      return read

    async def alone(seed):
      environment, _ = tasks.environment("train", 0)
      texts = [(await environment.reset(seed))[0].messages[0]["content"]]
      for move in ("[left]", "[down]", "[right]"):
        step = await environment.step({0: Action(move)})
        texts += [m["content"] for o in step.observations.values() for m in o.messages]
      return texts

    assert asyncio.run(both()) == [asyncio.run(alone(seed)) for seed in (0, 1)]

  @pytest.mark.parametrize(
    "options, message",
    [
      ({"game": "GuessTheNumbr-v0"}, "did you mean 'GuessTheNumber-v0'"), ({"game": "TicTacToe-v0"}, "two need"),
      ({"game": "Debate-v0"}, "cannot be played"), ({"options": {"sides": 3}}, "cannot be played"),
      ({"max_turns": 0}, "max_turns"),
    ],
  )  # fmt: skip
  def test_what_cannot_be_played(self, options, message):
    with pytest.raises(ValueError, match=message):
      TextArena(**options)

  @pytest.mark.slow
  def test_all_games_of_the_list(self):
    import jaxagent.envs.textarena as module

    listed = re.search(r"Of one player \(22\): (.*?)\. Of two", module.__doc__, re.DOTALL)[1]
    games = [name.strip() for name in listed.replace("\n", " ").split(",")]
    assert len(games) == 22
    for game in games:
      tasks = TextArena(f"{game}-v0")
      first = play(tasks, lambda read: "[0]", index=1)
      assert first == play(tasks, lambda read: "[0]", index=1), game
      assert first[1].status in ("done", "truncated") and 0 <= first[1].outcome <= 1, game


def test_the_modules_chance_is_left_as_it_was():
  import random

  random.seed(5)
  expected = [random.random() for _ in range(2)]
  random.seed(5)
  chance = Chance(1)
  got = [random.random()]
  with chance:
    inside = random.random()
  got.append(random.random())
  assert got == expected
  with Chance(1):
    assert random.random() == inside


class TestVerifiers:
  @pytest.fixture(autouse=True)
  def package(self):
    pytest.importorskip("verifiers.v1")

  def test_sums(self):
    tasks = Verifiers("adapted_tasks:sums")
    assert tasks.size("train") + tasks.size("eval") == 40 and tasks.size("eval") > 0
    for index in range(3):
      read, end = play(tasks, lambda read: str(eval(read[0])), index=index)
      assert end.status == "done" and end.outcome == 1 and end.info["rewards"] == {"right": 0.75, "short": 0.25}
      assert end.info["metrics"]["letters"] == len(str(eval(read[0])))
      assert play(tasks, lambda read: "a long answer", index=index)[1].outcome == 0
    train, held = (
      {play(tasks, str, split=split, index=i)[0][0] for i in range(tasks.size(split))} for split in ("train", "eval")
    )
    assert not train & held

  def test_endless_ones_with_messages_and_a_system_prompt(self):
    with pytest.raises(ValueError, match="endless"):
      Verifiers("adapted_tasks:endless")
    tasks = Verifiers("adapted_tasks:endless", limit=30)
    read, end = play(tasks, lambda read: str(eval(read[1])), index=5)
    assert read[0] == "Add." and end.outcome == 1 and tasks.size("train") + tasks.size("eval") == 30

  def test_words(self):
    tasks = Verifiers("adapted_tasks:words", system="Only the word.")
    read, end = play(tasks, lambda read: read[1].split()[1][::-1])
    assert read[0] == "Only the word." and end.outcome == 1
    assert play(tasks, lambda read: "?")[1].outcome == 0

  @pytest.mark.parametrize(
    "options, message",
    [
      ({"taskset": "adapted_tasks:needs_runtime"}, "need a runtime"),
      ({"taskset": "adapted_tasks:unrewarded"}, "need a @reward"),
      ({"taskset": "adapted_tasks:not_an_environment"}, "must be or return"),
      ({"taskset": "no_such_taskset"}, "not found"),
      ({"taskset": "adapted_tasks:sums", "config": {"x": 1}}, "x"),
      ({"taskset": "adapted_tasks:sums", "limit": 0}, "limit"),
    ],
  )  # fmt: skip
  def test_what_is_not_taken(self, options, message):
    with pytest.raises(ValueError, match=message):
      Verifiers(**options)
