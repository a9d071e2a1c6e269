import asyncio
import sys

import pytest

from jaxagent.envs.base import Action
from jaxagent.envs.reasoning_gym import EXTRACT, Question, ReasoningGym

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize(
  "how, text, answer",
  [
    ("tags", "so <answer> 12 </answer>.", "12"), ("tags", "<answer>1</answer> no, <answer>2</answer>", "2"),
    ("tags", "12", None), ("tags", "<answer>12", None), ("last_number", "12 + 30 = 42.", "42"),
    ("last_number", "it is -3", "-3"), ("last_number", "5-3", "3"), ("last_number", "1,234.5 !", "1234.5"),
    ("last_number", "none", None), ("text", " a b ", "a b"), ("text", "  ", None),
  ],
)  # fmt: skip
def test_extraction(how, text, answer):
  assert EXTRACT[how](text) == answer


def test_a_scorer_that_fails_on_the_right_answer_too_is_no_reward_of_0():
  class Broken:
    def score_answer(self, answer, entry):
      raise KeyError("broken")

  question = Question(Broken(), {"question": "1 + 1?", "answer": "2"}, "", EXTRACT["text"], "broken")
  with pytest.raises(KeyError, match="broken"):
    asyncio.run(question.step({0: Action("2")}))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ValueError, match=r"pip install 'jaxagent\[envs\]'"):
    ReasoningGym()


@pytest.mark.parametrize(
  "option",
  [
    {"answer": "x"}, {"size_per_split": 0}, {"held_out": 1.0}, {"options": {"seed": 1}}, {"dataset": {}},
    {"dataset": {"chain_sum": 0}}, {"dataset": {"chain_sum": 1}, "options": {"gcd": {}}},
    {"dataset": {"chain_sum": 1}, "options": {"chain_sum": 3}},
    {"dataset": {"chain_sum": 1}, "options": {"chain_sum": {"size": 1}}},
  ],
)
def test_wrong_options(option):
  with pytest.raises(ValueError, match="reasoning_gym: "):
    ReasoningGym(**option)


class TestWithPackage:
  @pytest.fixture(autouse=True)
  def package(self):
    pytest.importorskip("reasoning_gym")

  def outcome(self, text, **options):
    async def run():
      environment, seed = ReasoningGym(**options).environment("train", 3)
      await environment.reset(seed)
      first = await environment.step({0: Action("")})
      return await environment.step({0: Action(text.replace("RIGHT", str(first.info["expected"])))})

    return asyncio.run(run())

  @pytest.mark.parametrize(
    "text, outcome",
    [("<answer>RIGHT</answer>", 1), ("x <answer>RIGHT</answer> y", 1), ("RIGHT", 0), ("<answer>RIGHT1</answer>", 0)],
  )
  def test_outcome_is_binary_and_of_the_extracted_answer(self, text, outcome):
    step = self.outcome(text, options=SMALL)
    assert step.status == "done" and step.outcome == outcome

  def test_partial_marks_are_no_success(self):
    step = self.outcome("<answer>RIGHT and more</answer>", dataset="letter_counting")
    assert 0 < step.info["score"] < 1 and step.outcome == 0

  def test_splits_share_neither_questions_nor_seeds(self):
    tasks = ReasoningGym(options=SMALL)

    def draw(split, n):
      found = {}
      for i in range(n):
        environment, seed = tasks.environment(split, i)
        found[seed] = asyncio.run(environment.reset(seed))[0].messages[-1]["content"]
      return found

    train, held = draw("train", 400), draw("eval", 100)
    assert not set(train) & set(held) and not set(train.values()) & set(held.values())
    assert len(set(held.values())) > 15 and tasks.size("eval") == 10_000
    assert draw("eval", 100) == held

  def test_a_generator_with_too_few_questions_says_so(self):
    tasks = ReasoningGym(options=SMALL, size_per_split=1)
    with pytest.raises(ValueError, match="too few different"):
      for split in ("train", "eval"):
        tasks.environment(split, 0)

  def test_an_answer_that_the_scorer_cannot_read_is_wrong(self):
    assert self.outcome("<answer>none</answer>", dataset="prime_factorization").outcome == 0

  def test_a_scorer_that_takes_everything_is_refused(self):
    with pytest.raises(ValueError, match="takes every answer"):
      ReasoningGym("game_of_life_halting")

  def test_an_unknown_generator_names_the_nearest(self):
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
      ReasoningGym(dataset="chain_sums")

  def test_an_unknown_option_lists_the_known_ones(self):
    with pytest.raises(ValueError, match="min_terms"):
      ReasoningGym(options={"terms": 2})

  def test_a_mixture_draws_by_its_weights(self):
    tasks = ReasoningGym({"chain_sum": 3, "gcd": 1}, {"chain_sum": SMALL}, size_per_split=400)
    names = [tasks.kind("train", i) for i in range(400)]
    assert 0.68 < names.count("chain_sum") / 400 < 0.82  # 3 standard deviations
    for index in (names.index("chain_sum"), names.index("gcd")):
      environment, seed = tasks.environment("train", index)
      asyncio.run(environment.reset(seed))
      info = asyncio.run(environment.step({0: Action("")})).info
      assert info["generator"] == names[index]
    assert [ReasoningGym({"gcd": 1}).kind("eval", i) for i in range(3)] == ["gcd"] * 3

  @pytest.mark.slow
  def test_every_generator_by_its_name(self):
    from reasoning_gym.factory import DATASETS

    failed = []
    for name in DATASETS:
      try:
        tasks = ReasoningGym(name, size_per_split=50)
        environment, seed = tasks.environment("train", 1)
        (observation,) = asyncio.run(environment.reset(seed)).values()
        step = asyncio.run(environment.step({0: Action("<answer>no such answer</answer>")}))
        assert observation.messages[-1]["content"] and step.status == "done" and step.outcome == 0
      except Exception as error:
        failed.append((name, type(error).__name__, str(error)[:100]))
    assert {name for name, *_ in failed} == {"composite", "game_of_life_halting"}, failed  # composite needs options
