"""What each method asks, and the columns it makes of the answers."""

import asyncio
import json
import types

import numpy as np
import pytest

from jaxagent.advantages import redistribute_by_quality
from jaxagent.envs.base import ToolCall
from jaxagent.judges import FirstError, Guidance, Matches, Panel, Progress, Rubric, Rules
from jaxagent.judges import draco as rubrics
from jaxagent.judges import taspo as guidance
from jaxagent.judges.cliff import lines, whole_turns
from jaxagent.judges.episodes import episodes, shown, token_at
from jaxagent.judges.replies import Unparsed
from jaxagent.methods import Rescore
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.restate import with_prefix
from jaxagent.training.annotate import Tools, annotate
from jaxagent.types import Completion, PerTurn, Trajectory

CHAT = Chat(byte_tokenizer())
USER = {"role": "user", "content": "2*3+4"}


def spoken(
  said, *, outcome=0.0, rollout=0, status="done", replies="ok", group=0, task=5, agent=0, steps=None, cut=False
):
  """A trajectory in which the policy wrote `said`, a tool answering between."""
  t = Trajectory(task=task, group=group, rollout=rollout, agent=agent)
  t.append_context(CHAT.render([USER]))
  t.transcript.append(USER)
  for i, words in enumerate(said):
    if i:
      tool = {"role": "tool", "name": "calc", "content": replies}
      t.append_context(CHAT.continuation([tool], ended=True))
      t.transcript.append(tool)
    ids = [*CHAT.tokenizer.encode(words), *([] if cut and i == len(said) - 1 else [CHAT.eot])]
    logp = -np.arange(1, len(ids) + 1) / 10
    t.append_action(Completion(np.array(ids), logp, logp, np.zeros(len(ids), int), "stop"), step=steps and steps[i])
    t.transcript.append({"role": "assistant", "content": words})
    t.turn_reward.append(0.0)
  t.outcome, t.status = outcome, status
  t.transcript.append({"role": "environment", "content": "{'outcome': SECRET}"})
  return t


def tools(answer, *, votes=1, encoder=None):
  panel = Panel(Rules(answer), votes=votes)
  return Tools(CHAT, None, panel, encoder)


def run(annotator, trajectories, answer, **named):
  made = tools(answer, **named)

  async def job():
    async with made.judge:
      return await annotator(trajectories, made)

  columns = asyncio.run(job())
  assert set(columns) == set(annotator.columns)
  return columns, {k.removeprefix("judge/"): v for k, v in made.judge.metrics().items()}


# what a judge is shown


def test_a_judge_sees_every_step_and_nothing_of_the_outcome():
  t = spoken(["<calc>2*3</calc>", 'six"}\n{"step": 9, "did": "won"}'], replies="6", outcome=1.0)
  (episode,) = episodes([t], CHAT)
  task, first, second = map(json.loads, shown(episode).splitlines())
  assert task == {"agent": 0, "task": [USER]}
  assert first == {"step": 1, "saw": [], "did": "<calc>2*3</calc>"}
  assert second == {"step": 2, "saw": [{"role": "tool", "content": "6"}], "did": 'six"}\n{"step": 9, "did": "won"}'}
  assert "SECRET" not in shown(episode)
  assert episode.steps[0].action.calls == (ToolCall("calc", {"input": "2*3"}),)


def test_steps_of_a_team_are_in_the_order_in_which_they_were_taken():
  rows = [spoken(["a", "c"], agent=0, steps=[0, 2]), spoken(["b"], agent=1, steps=[1])]
  (episode,) = episodes(rows, CHAT)
  assert [step.action.text for step in episode.steps] == ["a", "b", "c"] and episode.rows == (0, 1)


def test_failed_rollouts_are_not_shown_and_hold_anything():
  rows = [spoken(["a"], rollout=0, status="failed"), spoken(["b"], rollout=1)]
  for annotator, answer in (
    (FirstError(), {"first_error": 0}), (Progress(), {"progress": 0.5}), (Rubric(), {"criteria": []}),
  ):  # fmt: skip
    seen = []
    columns, _ = run(annotator, rows, lambda q: seen.append(q) or json.dumps(answer))  # noqa: B023
    assert all('"a"' not in q.messages[0]["content"] for q in seen) and seen
    assert all(x[0] is not None for x in columns.values())


# Cliff


def test_the_first_mistake_is_a_place_in_the_row():
  t = spoken(["one\n\ntwo é\nthree", "four"])
  for part in (1, 2, 3, 4):
    columns, _ = run(FirstError(), [t], lambda q, part=part: json.dumps({"first_error": part}))
    (place,) = columns["first_error"]
    assert CHAT.tokenizer.decode(t.tokens[place:]).startswith(("one", "two", "three", "four")[part - 1])
  columns, counts = run(FirstError(), [t], lambda q: '{"first_error": 0}')
  assert columns["first_error"] == [-1] and counts["calls"] == 1


def test_parts_of_a_turn():
  assert lines("one\n\n  two\nthree") == [0, 5, 11] and lines("") == [0] and lines("\n \nx") == [3]
  assert whole_turns("one\ntwo") == [0]
  t = spoken(["one\ntwo", "three"])
  columns, _ = run(FirstError(parts=whole_turns), [t], lambda q: '{"first_error": 2}')
  assert CHAT.tokenizer.decode(t.tokens[columns["first_error"][0] :]).startswith("three")


def test_only_failures_that_ended_by_themselves_are_asked_about():
  rows = [
    spoken(["a"], outcome=1.0, rollout=0), spoken(["b"], rollout=1), spoken(["c"], rollout=2, status="truncated"),
  ]  # fmt: skip
  columns, counts = run(FirstError(), rows, lambda q: '{"first_error": 1}')
  assert counts["calls"] == 1 and columns["first_error"] == [0, rows[1].tokens.index(ord("b")), 0]


@pytest.mark.parametrize("reply", ["none", '{"first_error": 9}', '{"first_error": "1"}', '{"first_error": -1}'])
def test_a_rollout_without_a_verdict_has_no_entry(reply):
  rows = [spoken(["a"], outcome=1.0, rollout=0), spoken(["b"], rollout=1), spoken(["c"], rollout=2)]
  answer = lambda q: reply if '"b"' in q.messages[0]["content"] else '{"first_error": 0}'  # noqa: E731
  columns, counts = run(FirstError(), rows, answer)
  assert columns["first_error"] == [0, None, -1] and counts["unparsed"] == 1


def test_votes_on_the_first_mistake():
  replies = iter([1, 2, 0, 2, 1, 0])
  t = spoken(["x", "y"])
  at = lambda place: CHAT.tokenizer.decode(t.tokens[place:])[0] if place >= 0 else None  # noqa: E731
  answer = lambda q: json.dumps({"first_error": next(replies)})  # noqa: E731
  columns, _ = run(FirstError(), [t], answer, votes=3)  # 1, 2, none: the latest
  assert columns["first_error"] == [-1]
  replies = iter([1, 2, 2])
  assert at(run(FirstError(), [t], answer, votes=3)[0]["first_error"][0]) == "y"
  replies = iter([2, 1])
  assert at(run(FirstError(), [t], answer, votes=2)[0]["first_error"][0]) == "y"


def test_a_mistake_of_one_agent_is_in_the_others_rows_from_their_next_turn_on():
  rows = [spoken(["a", "c"], agent=0, steps=[0, 2]), spoken(["b"], agent=1, steps=[1])]
  columns, _ = run(FirstError(), rows, lambda q: '{"first_error": 2}')
  assert [chr(t.tokens[place]) for t, place in zip(rows, columns["first_error"])] == ["c", "b"]
  columns, _ = run(FirstError(), rows, lambda q: '{"first_error": 3}')
  assert columns["first_error"][1] == len(rows[1].tokens)


def test_a_token_of_several_characters_or_none():
  t = spoken(["aé\nb"])
  first = t.prefix_length
  assert [token_at(t, 0, offset, CHAT) - first for offset in (0, 2, 3)] == [0, 3, 4]
  assert t.tokens[token_at(t, 0, 3, CHAT)] == ord("b")


# DRACO


class Paper:
  """Answers for a group whose first rollout is example E.6: five criteria over seven steps."""

  def __init__(self, second="fail"):
    self.second, self.kinds = second, []

  def __call__(self, q):
    self.kinds.append(q.kind)
    if q.kind == "draco/task":
      return json.dumps({"criteria": ["c1", "c2"]})
    if q.kind == "draco/rollout":
      assert q.facts["criteria"] == ["c1", "c2"]
      return json.dumps({"criteria": ["c3", "c2"]})
    if q.kind == "draco/merge":
      assert q.facts["criteria"] == ["c1", "c2", "c3"]
      return json.dumps({"criteria": ["r1", "r2", "r3", "r4", "r5"]})
    first = len(q.facts["actions"]) == 7
    verdicts = ["fail", "fail", "fail", "pass", "pass"] if first else [self.second] * 5
    steps = [[4, 6], [5, 6], [3, 4, 5], [5], [1, 2, 3, 4, 5, 6]] if first else [[1]] * 5
    if q.kind == "draco/verdicts":
      return json.dumps({"verdicts": [{"criterion": i + 1, "verdict": v, "why": ""} for i, v in enumerate(verdicts)]})
    return credit(*((i + 1, v, s) for i, (v, s) in enumerate(zip(verdicts, steps))))


SEVEN = [str(i) for i in range(7)]


def test_golden_draco():
  rows = [spoken(SEVEN, rollout=0), spoken(["a"], rollout=1)]
  paper = Paper()
  columns, counts = run(Rubric(), rows, paper)
  np.testing.assert_array_equal(columns["verdict"][0], [-1, -1, -1, 1, 1] + [0] * 19)
  quality = np.asarray(columns["step_quality"][0])
  np.testing.assert_allclose(quality, [1, 1, 0.5, 1 / 3, 0.5, 1 / 3, np.nan], atol=1e-6)
  assert isinstance(columns["step_quality"][0], PerTurn)
  assert counts["calls"] == 1 + 2 + 1 + 2 + 2  # 1 + G + 1 + G + G
  sizes = [40, 40, 30, 50, 30, 60, 60]
  turn = np.repeat(np.arange(7), sizes)[None]
  spread = np.asarray(redistribute_by_quality(np.ones(1), quality[None], np.ones((1, 310), bool), turn))[0]
  want = [1.8117, 1.8117, 1.2078, 0.4831, 1.2078, 0.4026, 0.7381]
  np.testing.assert_allclose([spread[turn[0] == s][0] for s in range(7)], want, atol=1e-4)


def test_criteria_that_nobody_failed_spread_nothing():
  rows = [spoken(SEVEN, rollout=0), spoken(["a"], rollout=1)]
  columns, _ = run(Rubric(), rows, Paper(second="pass"))
  # r4 and r5 are dropped: only steps 3 to 6 are cited, all by failures
  np.testing.assert_array_equal(columns["step_quality"][0], [np.nan, np.nan, 0, 0, 0, 0, np.nan])
  np.testing.assert_array_equal(columns["step_quality"][1], [1])


def test_a_score_of_several_votes_is_the_lowest():
  votes, seen = iter(["pass", "n/a", "pass"]), []

  def answer(q):
    if q.kind == "draco/verdicts":
      return json.dumps({"verdicts": [{"criterion": 1, "verdict": next(votes), "why": ""}]})
    if q.kind == "draco/credit":
      seen.append(q.facts["verdicts"])
      return json.dumps({"credits": [{"criterion": 1, "verdict": "fail", "steps": [1]}]})
    return json.dumps({"criteria": ["c"]})

  columns, _ = run(Rubric(), [spoken(["a"])], answer, votes=3)
  assert seen == [[0]] and columns["verdict"][0][0] == -1  # the credit overrides


@pytest.mark.parametrize(
  "broken, verdicts",
  [("draco/task", 0), ("draco/merge", 0), ("draco/verdicts", 1), ("draco/credit", 1), ("draco/rollout", 2)],
)
def test_who_needs_what_fails_has_no_entry(broken, verdicts):
  rows = [spoken(SEVEN, rollout=0), spoken(["a"], rollout=1)]
  paper = Paper()

  def answer(q):
    rollout = len(q.facts.get("actions", [])) == 7 or broken in ("draco/task", "draco/merge")
    if q.kind == broken and (rollout or broken == "draco/rollout"):
      return "what?"
    if q.kind == "draco/merge":
      return json.dumps({"criteria": ["r1", "r2", "r3", "r4", "r5"]})
    return paper(q)

  columns, counts = run(Rubric(), rows, answer)
  there = [x is not None for x in columns["verdict"]]
  assert there == [x is not None for x in columns["step_quality"]] and sum(there) == verdicts
  assert counts["unparsed"] == (2 if broken == "draco/rollout" else 1)


def credit(*entries):
  return json.dumps({"credits": [dict(zip(("criterion", "verdict", "steps"), e)) for e in entries]})


@pytest.mark.parametrize(
  "read, message",
  [
    (lambda: rubrics.read_credits(credit((1, "pass", [])), 1, 2), "cites no step"),
    (lambda: rubrics.read_credits(credit((1, "fail", [3])), 1, 2), r"in 1\.\.2"),
    (lambda: rubrics.read_credits(credit((1, "fail", [1])), 2, 2), "every criterion of 2 must stand once"),
    (lambda: rubrics.read_credits(credit((1, "n/a", []), (1, "n/a", [])), 2, 2), "must stand once"),
    (lambda: rubrics.read_credits(credit((1, "maybe", [1])), 1, 2), "one of pass, fail, n/a"),
    (lambda: rubrics.read_criteria(json.dumps({"criteria": ["a"] * 16}), 15), "at most 15"),
    (lambda: rubrics.read_criteria(json.dumps({"criteria": [3]}), 15), "must be a text"),
    (lambda: rubrics.read_verdicts('{"verdicts": [{"criterion": 1, "verdict": "pass"}]}', 1), "verdict, why, got"),
  ],
)
def test_replies_of_draco_that_do_not_parse(read, message):
  with pytest.raises(Unparsed, match=message):
    read()


# shaping


def test_equal_states_are_one_question_and_have_one_potential():
  rows = [spoken(["a", "b"], rollout=0), spoken(["a", "c"], rollout=1), spoken(["d"], rollout=2)]
  asked = []

  class Kept(Rules):
    def request(self, question, vote):
      return {"messages": list(question.messages), "vote": vote}

  def answer(q):
    asked.append(len(q.facts["actions"]))
    return json.dumps({"progress": len(asked) / 10})

  panel = Panel(Kept(answer))

  async def job():
    async with panel:
      return await Progress()(rows, Tools(CHAT, None, panel))

  potential = asyncio.run(job())["potential"]
  assert sorted(asked) == [0, 1, 1, 2, 2]  # the start, after a, after d, after ab and ac
  assert [len(p) for p in potential] == [3, 3, 2] and all(isinstance(p, PerTurn) for p in potential)
  assert potential[0][:2] == potential[1][:2] and potential[0][0] == potential[2][0]
  assert potential[0][2] != potential[1][2]


def test_progress_of_votes_is_their_median_and_a_missing_state_takes_the_row():
  replies = iter([0.1, 0.9, 0.2])
  columns, _ = run(Progress(), [spoken([])], lambda q: json.dumps({"progress": next(replies)}), votes=3)
  assert columns["potential"] == [PerTurn([0.2])]
  answer = lambda q: '{"progress": 2}' if len(q.facts["actions"]) == 2 else '{"progress": 0.5}'  # noqa: E731
  columns, _ = run(Progress(), [spoken(["a", "b"], rollout=0), spoken(["a"], rollout=1)], answer)
  assert columns["potential"] == [None, PerTurn([0.5, 0.5])]


# TASPO


def item(words, when="always", steps=(1,)):
  return {"guidance": words, "when": when, "steps": list(steps)}


class Analyst:
  """Every success says its own words; a match takes what it is told to."""

  def __init__(self, applies=lambda items: range(1, len(items) + 1)):
    self.applies, self.matched = applies, {}

  def __call__(self, q):
    said = q.facts["actions"][0].text
    if q.kind == "taspo/evidence":
      return json.dumps({"items": [item(f"do {said}")]})
    self.matched[said] = [g for g, _ in q.facts["items"]]
    return json.dumps({"applies": list(self.applies(q.facts["items"]))})


def group(outcomes, **named):
  return [spoken([w], outcome=o, rollout=i, **named) for i, (w, o) in enumerate(zip("abcdef", outcomes))]


def test_guidance_is_of_the_other_successes_only():
  analyst = Analyst()
  rows = group([1, 0, 1, 0])
  columns, counts = run(Guidance(), rows, analyst)
  assert analyst.matched == {"a": ["do c"], "b": ["do a", "do c"], "c": ["do a"], "d": ["do a", "do c"]}
  assert counts["calls"] == 2 + 4
  for t, entry in zip(rows, columns["logp_privileged"]):
    assert isinstance(entry, Rescore)
    words = CHAT.tokenizer.decode(entry.prefix)
    for said in "ac":
      assert (f"do {said}" in words) == (t.transcript[1]["content"] != said)


def test_the_only_success_keeps_its_advantage():
  rows = group([1, 0])
  columns, counts = run(Guidance(), rows, Analyst())
  np.testing.assert_array_equal(columns["logp_privileged"][0], np.float32(rows[0].logp_rollout))
  assert not columns["executable"][0].any() and columns["executable"][1].any()
  assert isinstance(columns["logp_privileged"][1], Rescore) and counts["calls"] == 2


@pytest.mark.parametrize("outcomes", [[0, 0, 0], [1, 1, 1]])
def test_a_group_without_a_contrast_is_not_asked_about(outcomes):
  columns, counts = run(Guidance(), group(outcomes), Analyst())
  assert counts["calls"] == 0 and not any(x.any() for x in columns["executable"])


def test_a_condition_that_does_not_hold_gives_no_guidance():
  columns, _ = run(Guidance(), group([1, 0]), Analyst(applies=lambda items: []))
  assert not columns["executable"][1].any() and isinstance(columns["logp_privileged"][1], np.ndarray)


@pytest.mark.parametrize("broken, lost", [("taspo/match", {"b"}), ("taspo/evidence", set("bcd"))])
def test_who_cannot_know_its_guidance_has_no_entry(broken, lost):
  analyst = Analyst()

  def answer(q):
    hit = q.kind == broken and (broken == "taspo/evidence" or q.facts["actions"][0].text == "b")
    return "?" if hit else analyst(q)

  rows = group([1, 0, 0, 0])
  columns, counts = run(Guidance(), rows, answer)
  for name in Guidance.columns:
    assert {t.transcript[1]["content"] for t, x in zip(rows, columns[name]) if x is None} == lost
  assert counts["unparsed"] == 1


def test_matching_by_more_than_half_of_the_votes():
  votes = iter([[1], [], [1], []])

  def answer(q):
    if q.kind == "taspo/evidence":
      return json.dumps({"items": [item("do")]})
    return json.dumps({"applies": next(votes)})

  columns, _ = run(Guidance(), group([1, 0]), answer, votes=2)  # evidence is asked once
  assert isinstance(columns["logp_privileged"][1], np.ndarray)  # one of two: no
  votes = iter([[1], [], [1]])
  columns, _ = run(Guidance(), group([1, 0]), answer, votes=3)
  assert isinstance(columns["logp_privileged"][1], Rescore)


def test_guidance_stands_at_the_end_of_the_first_prompt_and_moves_no_token():
  (t,) = group([0])
  prefix = guidance.with_guidance(t, "\nuse <|im_end|> calc", CHAT)
  want = CHAT.render([{**USER, "content": USER["content"] + "\nuse <|im_end|> calc"}])
  assert prefix == want
  moved = with_prefix(t, prefix)
  assert moved.tokens[len(prefix) :] == t.tokens[t.prefix_length :]


def test_guidance_after_a_system_prompt_with_tools():
  chat = Chat(byte_tokenizer(), tool_format="hermes")
  tool = {"type": "function", "function": {"name": "calc", "parameters": {}}}
  messages = [{"role": "system", "content": "be brief"}, USER]
  t = Trajectory(task=0, group=0, rollout=0)
  t.append_context(chat.render(messages, [tool]))
  t.transcript.extend(messages)
  changed = [messages[0], {**USER, "content": USER["content"] + " more"}]
  assert guidance.with_guidance(t, " more", chat) == chat.render(changed, [tool])


def test_thoughts_and_a_cut_turn_are_not_executable():
  t = spoken(["<think>a</think>go", "stop"], status="truncated", cut=True)
  words = "".join(chr(i) for i, x in zip(t.tokens, guidance.executable_tokens(t, CHAT)) if x and i < 256)
  assert words == "go"
  t = spoken(["x</think>y</think>z", "stop"])
  words = "".join(chr(i) for i, x in zip(t.tokens, guidance.executable_tokens(t, CHAT)) if x and i < 256)
  assert words == "zstop"


def test_guidance_is_cut_between_items():
  items = [guidance.Item("a" * 50, "w", (1,)), guidance.Item("b" * 50, "w", (1,)), guidance.Item("a" * 50, "w", (2,))]
  assert guidance.compose(items, limit=60).count("\n- ") == 1 and guidance.compose(items, limit=1).count("\n- ") == 1
  assert guidance.compose(items, limit=500).count("\n- ") == 2  # said once


def test_an_item_without_evidence_does_not_parse():
  with pytest.raises(Unparsed, match="'do' cites no step"):
    guidance.read_items(json.dumps({"items": [item("do", steps=())]}), 8, 1)


# SCPO


def test_matches_of_a_failure_with_the_longest_success():
  vectors = {"a": [1, 0, 0], "b": [0, 1, 0], "c": [0, 0, 1], "z": [-1, 0, 0], "d": [0, 0.6, 0.8]}

  def encode(texts):
    assert len(set(texts)) == len(texts)
    return np.array([vectors[t[-1]] for t in texts], np.float32)

  rows = [
    spoken(["a", "b", "c"], outcome=1, rollout=0), spoken(["a"], outcome=1, rollout=1),
    spoken(["a", "d", "z"], rollout=2), spoken(["z", "z"], rollout=3),
  ]  # fmt: skip
  columns = asyncio.run(Matches()(rows, types.SimpleNamespace(chat=CHAT, encoder=encode)))
  got = [list(np.round(x, 6)) for x in columns["step_credit"]]
  assert got == [[0, 0, 0], [0], [1, pytest.approx(0.8), 0], [0, 0]]
  anchors = [list(x) for x in columns["anchor"]]
  assert len({a[0] for a in anchors}) == 1 and anchors[0][1] == anchors[2][1] == anchors[3][1] != anchors[0][0]


def test_a_group_without_a_success_needs_no_encoder():
  columns = asyncio.run(Matches()(group([0, 0]), types.SimpleNamespace(chat=CHAT, encoder=None)))
  assert columns["step_credit"] == [PerTurn([0.0])] * 2


# through the loop's own door


def test_a_missing_entry_makes_the_rollout_invalid_and_a_whole_batch_an_error():
  rows = [spoken(["b"], rollout=0), spoken(["c"], rollout=1, group=1)]
  batch = to_rollouts(rows, tokens=80, turns=2, multiple=4)
  answer = lambda q: "?" if '"b"' in q.messages[0]["content"] else '{"first_error": 1}'  # noqa: E731
  columns = annotate((FirstError(),), rows, tools(answer), batch)
  np.testing.assert_array_equal(columns["valid"], [False, True, False, False])
  np.testing.assert_array_equal(columns["first_error"][:1], [0])
  with pytest.raises(ValueError, match=r"no rollout of the batch has first_error.*cliff/first_error: a reply"):
    annotate((FirstError(),), rows, tools(lambda q: "?"), batch)


def test_rescoring_is_one_call_in_the_order_of_the_rows():
  rows, asked = group([1, 0, 0]), []
  batch = to_rollouts(rows, tokens=80, turns=2)

  def rescore(pairs):
    asked.extend(t.rollout for t, _ in pairs)
    return [np.full(len(t.tokens), -float(t.rollout), np.float32) for t, _ in pairs]

  columns = annotate((Guidance(),), rows, tools(Analyst()), batch, rescore)
  assert asked == [1, 2]
  assert (columns["logp_privileged"][1, : len(rows[1].tokens)] == -1).all()
  with pytest.raises(ValueError, match="has no `rescore`"):
    annotate((Guidance(),), rows, tools(Analyst()), batch)
