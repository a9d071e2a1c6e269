import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxagent.advantages import group_relative
from jaxagent.losses import ppo_clip, sequence_mean, token_mean
from jaxagent.rewards.answers import (
  exact_match,
  extract_answer,
  extract_query,
  f1_with_floor,
  math_match,
  normalize_answer,
  retrieved_tokens,
  search_reward,
  token_f1,
  valid_format,
)

words = st.text("ab .,'", max_size=12)

SQUAD = [
  ("the Barack H. Obama", "Barack Obama", "barack h obama", 0.8, 0),
  ("Moscow, Russia", "Moscow", "moscow russia", 2 / 3, 0),
  ("New New York", "New York", "new new york", 0.8, 0),
  ("U.S.A.", "USA", "usa", 1, 1),
  ("well-known man", "well known man", "wellknown man", 0.4, 0),
  ("1,000", "1000", "1000", 1, 1),
  ("the", "a", "", 1, 1),
  ("", "x", "", 0, 0),
]


@pytest.mark.parametrize("answer, gold, normalized, f1, exact", SQUAD)
def test_golden_squad(answer, gold, normalized, f1, exact):
  assert normalize_answer(answer) == normalized
  assert token_f1(answer, [gold]) == pytest.approx(f1)
  assert exact_match(answer, [gold]) == exact


@settings(max_examples=50, deadline=None)
@given(words, st.lists(words, min_size=1, max_size=3))
def test_laws_of_f1(answer, golds):
  f1 = token_f1(answer, golds)
  assert 0 <= f1 <= 1
  assert f1 == max(token_f1(answer, [gold]) for gold in golds)
  assert token_f1(golds[0], [answer]) == token_f1(answer, golds[:1])
  assert exact_match(answer, golds) <= f1
  assert normalize_answer(normalize_answer(answer)) == normalize_answer(answer)


def test_no_answer_is_zero_and_golds_are_a_list():
  assert token_f1(None, ["x"]) == exact_match(None, ["x"]) == 0
  for golds in ("Moscow", []):
    with pytest.raises(ValueError, match="golds must be a list"):
      token_f1("x", golds)


CALL = "<tool_call>\n<function=search>\n<parameter=query>\nwho\n</parameter>\n</function>\n</tool_call>"
GOOD = f"so</think>{CALL}\n<think>then</think><answer>Moscow</answer>\n"


@pytest.mark.parametrize(
  "text, valid",
  [
    (GOOD, True),
    ("<think>so</think><answer>x</answer>", True),
    ("so</think><answer>x</answer> <answer>y</answer>", True),
    (GOOD.replace("</function>\n", "<parameter=top_k>\n3\n</parameter>\n</function>\n"), True),
    ("<answer>x</answer>", False),  # no thinking
    ("<think><think>a</think><answer>x</answer>", False),  # more opened than closed
    (GOOD.replace("</tool_call>", ""), False),
    (GOOD.replace("<parameter=query>\nwho\n</parameter>\n", ""), False),  # a call without a parameter
    ("a</think><tool_call></tool_call><answer>x</answer>", False),
    ('a</think><tool_call>{"name": "search"}</tool_call><answer>x</answer>', False),
    ("a</think></tool_call><tool_call><answer>x</answer>", False),
    (GOOD + "bye", False),
    ("a</think> no answer", False),
    ("a</think><answer>x", False),
    ("", False),
  ],
)
def test_formats(text, valid):
  assert valid_format(text) is valid


def test_a_hostile_tool_call_is_judged_in_time():
  text = "a</think><tool_call><function=f>" + "<parameter=q>x</parameter>" * 3000 + "</tool_call><answer>x</answer>"
  assert not valid_format(text)  # a backtracking pattern would not return


def test_extraction():
  assert extract_answer("<answer>a</answer> or <answer>\n b </answer>") == "b"
  assert extract_answer("nothing") is None
  assert extract_query(GOOD) == "who"
  assert extract_query("<tool_call><parameter=query> </parameter></tool_call>") is None
  assert extract_query("<tool_call></tool_call>") is None


def relative(rewards):
  return group_relative(np.array(rewards), np.zeros(len(rewards), int))


@pytest.mark.parametrize(
  "f1, em, by_f1, by_floor",
  [
    (
      [0, 0.5, 0.8, 1, None], [-0.5, -0.5, -0.5, 2, -0.5], [-1.1277, 0.0981, 0.8335, 1.3238, -1.1277],
      [-0.9825, 0.0517, 0.8273, 1.3444, -1.241],
    ),
    (
      [0, 0.4, 0, 2 / 7, None], [0, 0, 0, 0, 0], [-0.7982, 1.53, -0.7982, 0.8647, -0.7982],
      [-0.533, 1.5398, -0.533, 0.7501, -1.2239],
    ),
  ],
)  # fmt: skip
def test_golden_three_rewards(f1, em, by_f1, by_floor):
  known = {0: ("x", "g"), 0.5: ("g b c", "g"), 0.8: ("g h y", "g h"), 1: ("g", "g"), 0.4: ("g b c d", "g"),
           2 / 7: ("g b c d e f", "g")}  # fmt: skip
  pairs = [known.get(x) for x in f1]
  texts = ["a</think>" + (f"<answer>{p[0]}</answer>" if p else "") for p in pairs]
  golds = [[p[1] if p else "g"] for p in pairs]
  exact = [exact_match(extract_answer(t), g) for t, g in zip(texts, golds)]
  soft = [token_f1(extract_answer(t), g) for t, g in zip(texts, golds)]
  floor = [f1_with_floor(t, g) for t, g in zip(texts, golds)]
  assert_allclose(soft, [x or 0 for x in f1], atol=1e-6)
  assert_allclose(floor, [0 if x is None else (x or 0.1) for x in f1], atol=1e-6)
  assert_allclose(relative(exact), em, atol=1e-4)
  assert_allclose(relative(soft), by_f1, atol=1e-4)
  assert_allclose(relative(floor), by_floor, atol=2e-4)


def test_the_floor_is_for_valid_answers_that_share_nothing():
  low = "a</think><answer>" + " ".join(["g", *map(str, range(38))]) + "</answer>"
  assert f1_with_floor(low, ["g"]) == pytest.approx(0.05)  # below the floor, as in the source's code
  assert f1_with_floor("a</think><answer>x</answer>", ["g"]) == 0.1
  assert f1_with_floor("<answer>g</answer>", ["g"]) == 0


@pytest.mark.parametrize(
  "text, retrieved, want",
  [
    ("a</think><answer>g</answer>", [], 1.0),
    ("<answer>g</answer>", [], 0.8),
    ("a</think><answer>x</answer>", ["no"], 0.2),
    ("a</think><answer>x</answer>", ["some G here"], 0.3),
    ("<answer>x</answer>", ["some g here"], 0.1),
    ("nothing", ["some g here"], 0.0),
  ],
)
def test_golden_search_reward(text, retrieved, want):
  assert search_reward(text, ["g"], retrieved) == pytest.approx(want)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "math_verify", None)
  with pytest.raises(ImportError, match=r"pip install 'jaxagent\[math\]'"):
    math_match("1", "1")


@pytest.mark.parametrize(
  "answer, gold, want",
  [
    ("0.5", "1/2", 1),
    (r"\frac{1}{2}", "0.5", 1),
    ("$x + 1$", "$1 + x$", 1),
    ("2", "3", 0),
    (None, "3", 0),
    ("dunno", "3", 0),
  ],
)
def test_mathematics_by_parsing(answer, gold, want):
  pytest.importorskip("math_verify")
  assert math_match(answer, gold) == want


def test_a_gold_that_is_no_mathematics_is_an_error():
  pytest.importorskip("math_verify")
  with pytest.raises(ValueError, match="does not parse as mathematics"):
    math_match("3", "")


# --- the mask of retrieved tokens, and Search-R1's worked example under it

MASK = np.array([[False, True, True, False, True], [False, True, True, False, False]])


def test_retrieved_tokens_are_what_is_neither_prompt_nor_action_nor_filler():
  out = retrieved_tokens(MASK, np.array([5, 3]), np.array([1, 1]))
  assert_array_equal(out, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
  assert not (np.asarray(out) & MASK).any()
  with pytest.raises(ValueError, match="length must have shape"):
    retrieved_tokens(MASK, np.array([5]), np.array([1, 1]))


def test_golden_search_r1():
  ratio = np.array([[1.0, 1.1, 0.9, 3.0, 1.3], [1.0, 0.7, 1.05, 9.0, 9.0]])
  advantage = np.array([[1.0], [-1.0]]) * MASK

  def loss(logp, aggregate):
    per_token = ppo_clip(jnp.where(MASK, logp, 0.0), jnp.zeros(MASK.shape), advantage)
    return -jnp.sum(per_token * aggregate)

  rows = sequence_mean(MASK, np.arange(2))
  assert_allclose(loss(np.log(ratio), rows), 0.0708, atol=5e-5)
  assert_allclose(loss(np.log(ratio), token_mean(MASK)), 0.27, atol=1e-6)
  per_row = [loss(np.log(ratio), 2 * rows * (np.arange(2)[:, None] == i)) for i in range(2)]
  assert_allclose(per_row, [1.0667, -0.925], atol=5e-5)
  changed = np.where(MASK, ratio, 77.0)
  assert loss(np.log(changed), rows) == loss(np.log(ratio), rows)
  assert_array_equal(np.asarray(jax.grad(loss)(np.log(ratio), rows))[~MASK], 0)
