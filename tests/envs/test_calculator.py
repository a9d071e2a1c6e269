import asyncio

import pytest

from jaxagent.envs.base import Action, Malformed, ToolCall
from jaxagent.envs.calculator import Calculator, evaluate, reply
from jaxagent.envs.splits import digest, split_of, task_seed


@pytest.mark.parametrize(
  "expression, value",
  [("12*34", 408), ("7*48+15", 351), ("3-45", -42), ("-(2+3)*4", -20), ("17//5", 3), ("17%5", 2), (" 1 + 2 ", 3)],
)
def test_evaluates(expression, value):
  assert evaluate(expression) == value


@pytest.mark.parametrize(
  "expression, error",
  [
    ("", "bad"), ("12*", "bad"), ("2**9", "bad"), ("__import__('os')", "bad"), ("007", "bad"), ("(1)(2)", "bad"),
    ("()", "bad"), ("1.5", "bad"), ("٣+1", "bad"), ("1/2", "bad"), ("1//0", "zero"), ("1%0", "zero"),
    ("9" * 16, "large"), ("999999*999999*999999", "large"), ("1+" * 40 + "1", "longer"), ("(" * 64, "bad"),
  ],
)  # fmt: skip
def test_says_what_is_wrong_with_an_expression(expression, error):
  with pytest.raises(ValueError, match=error):
    evaluate(expression)


def problems(tasks, split, n):
  return [tasks.problem(split, task_seed(split, i)) for i in range(n)]


@pytest.mark.parametrize("options", [{}, {"digits": 1}, {"operations": 2, "operators": "*+"}])
def test_no_problem_is_in_both_splits(options):
  tasks = Calculator(**options)
  train, held = set(problems(tasks, "train", 2000)), set(problems(tasks, "eval", 300))
  assert train and held and not train & held
  assert len({task_seed(s, i) for s in ("train", "eval") for i in range(100)}) == 200


def test_a_split_is_a_property_of_the_text():
  share = sum(split_of(f"{a}*{b}", held_out=0.1) == "eval" for a in range(100) for b in range(100)) / 1e4
  assert abs(share - 0.1) < 0.01
  assert digest("12*34") == 0.5117988627262235  # the same on every machine, or the splits would move


def test_a_split_without_problems_says_so(monkeypatch):
  monkeypatch.setattr(Calculator, "_draw", lambda self, rng: "1+1")
  with pytest.raises(ValueError, match="no problem of the eval split"):
    Calculator().problem("eval", 1)


@pytest.mark.parametrize(
  "option", [{"digits": 0}, {"operations": 9}, {"operators": "^"}, {"operators": ""}, {"max_turns": 1}]
)
def test_wrong_options(option):
  with pytest.raises(ValueError, match=next(iter(option))):
    Calculator(**option)


def play(texts, **options):
  """Steps of an episode of problem 0; a text in <> is a call."""

  async def run():
    environment, seed = Calculator(**options).environment("train", 0)
    observation = (await environment.reset(seed))[0]
    problem = observation.messages[-1]["content"]
    steps = []
    for text in texts:
      text = text.replace("PROBLEM", problem).replace("ANSWER", str(evaluate(problem)))
      calls = (ToolCall("calc", {"input": text[1:-1]}),) if text.startswith("<") else ()
      steps.append(await environment.step({0: Action(text, calls)}))
    await environment.close()
    return problem, steps

  return asyncio.run(run())


def test_a_call_gets_its_result_and_the_answer_is_scored():
  problem, (first, last) = play(["<PROBLEM>", "ANSWER"])
  assert first.status == "running" and first.outcome == 0.0
  assert first.observations[0].messages == ({"role": "tool", "name": "calc", "content": str(evaluate(problem))},)
  assert last.status == "done" and last.outcome == 1.0


@pytest.mark.parametrize("text, outcome", [("ANSWER", 1), (" ANSWER\n", 1), ("ANSWER.", 0), ("0ANSWER", 0), ("", 0)])
def test_the_answer_must_be_exact(text, outcome):
  _, (step,) = play([text])
  assert (step.status, step.outcome) == ("done", outcome)


def test_too_many_calls_truncate():
  _, steps = play(["<1+>"] * 3, max_turns=3)
  assert [s.status for s in steps] == ["running", "running", "truncated"] and steps[-1].outcome == 0


@pytest.mark.parametrize(
  "call, text",
  [
    (ToolCall("calc", {"input": "2*3"}), "6"),
    (ToolCall("calc", {"input": "2*"}), "error: bad expression"),
    (ToolCall("calk", {"input": "2"}), "error: no tool 'calk', only calc"),
    (ToolCall("calc", {"x": "2"}), "error: calc takes one text, input"),
    (ToolCall("calc", {"input": 2}), "error: calc takes one text, input"),
    (Malformed("not JSON"), "error: not JSON"),
  ],
)
def test_what_is_wrong_with_a_call_goes_back_to_the_model(call, text):
  assert reply(call) == text


def test_a_cut_answer_is_not_right_by_luck():
  async def run():
    environment, seed = Calculator().environment("train", 0)
    problem = (await environment.reset(seed))[0].messages[-1]["content"]
    return await environment.step({0: Action(str(evaluate(problem)), truncated=True)})

  step = asyncio.run(run())
  assert (step.status, step.outcome) == ("truncated", 0.0)


def test_demonstrations_are_of_the_training_split_and_right():
  tasks = Calculator()
  for index in range(50):
    messages, tools = tasks.demonstration(index)
    problem = tasks.problem("train", task_seed("train", index))
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0]["content"] == problem == messages[1]["tool_calls"][0]["function"]["arguments"]["input"]
    assert messages[2]["content"] == messages[3]["content"] == str(evaluate(problem))
    assert tools[0]["function"]["name"] == "calc"

def test_a_share_of_the_sums_is_demonstrated_without_a_call():
  tasks = Calculator(in_head=0.6)
  shown = [tasks.demonstration(i)[0] for i in range(600)]
  called = [any("tool_calls" in m for m in messages) for messages in shown]
  product = ["*" in messages[0]["content"] for messages in shown]
  assert all(c for c, p in zip(called, product) if p)
  assert abs(sum(c for c, p in zip(called, product) if not p) / product.count(False) - 0.4) < 0.07
  assert all(messages[-1]["content"] == str(evaluate(messages[0]["content"])) for messages in shown)
  with pytest.raises(ValueError, match=r"in_head must be in \[0, 1\], got 1.5"):
    Calculator(in_head=1.5)
