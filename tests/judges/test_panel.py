"""Votes, equal requests, the cache on disk, counts; and what happens when there is no answer."""

import asyncio
import json
import subprocess
import sys

import pytest

from jaxagent.judges import Cache, JudgeError, Panel, Question, Reply, Rules
from jaxagent.judges.panel import majority
from jaxagent.judges.replies import Unparsed, integer, numbers, read_object, share, text


def question(words="q", **facts):
  return Question("test", ({"role": "user", "content": words},), facts)


class Told:
  """Answers with the next text of a list; an exception in it is raised."""

  def __init__(self, *answers, kept=True, delay=0.0):
    self.answers, self.kept, self.delay, self.asked, self.most, self.now = list(answers), kept, delay, [], 0, 0

  def request(self, question, vote):
    return {"messages": list(question.messages), "vote": vote} if self.kept else None

  async def reply(self, question, vote):
    self.asked.append((question.messages[0]["content"], vote))
    self.now += 1
    self.most = max(self.most, self.now)
    try:
      await asyncio.sleep(self.delay)
    finally:
      self.now -= 1
    answer = self.answers.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return Reply(answer, 7)


def number(reply):
  return integer(read_object(reply, "n")["n"], 0, 9, "n")


def said(n):
  return json.dumps({"n": n})


def asked(panel, *questions, poll=False):
  async def run():
    async with panel:
      return await asyncio.gather(*((panel.poll if poll else panel.ask)(q, number) for q in questions))

  return asyncio.run(run())


def counts(panel):
  return {k.removeprefix("judge/"): v for k, v in panel.metrics().items() if v and k != "time/judge"}


def test_equal_requests_are_one_call_and_counts_begin_anew():
  judge = Told(said(1), said(2))
  panel = Panel(judge)
  assert asked(panel, question("a"), question("b"), question("a")) == [1, 2, 1]
  assert counts(panel) == {"calls": 2, "tokens": 14}
  assert counts(panel) == {}
  judge.answers = [said(3)]
  assert asked(panel, question("a")) == [3]  # another batch


def test_a_judge_whose_answers_are_not_kept_is_asked_each_time():
  judge = Told(said(1), said(2), kept=False)
  assert asked(Panel(judge), question("a"), question("a")) == [1, 2]


@pytest.mark.parametrize("failure", [JudgeError("down"), RuntimeError("down"), TimeoutError("down")])
def test_a_failure_is_no_verdict_and_does_not_raise(failure, tmp_path):
  panel = Panel(Told(failure, said(4)), cache=Cache(tmp_path))
  assert asked(panel, question("a"), question("b")) == [None, 4]
  assert panel.cause.startswith("test: ") and panel.cause.endswith("down")
  assert counts(panel) == {"calls": 2, "failed": 1, "tokens": 7}
  panel.judge.answers = [said(5)]
  assert asked(panel, question("a"), question("b")) == [5, 4]  # a failure is not kept, an answer is


@pytest.mark.parametrize("reply", ["no", "", "[1]", '{"n": true}', '{"n": 10}', '{"n": 1, "m": 2}', '{"n": 1} ok'])
def test_what_does_not_parse_is_no_verdict(reply):
  panel = Panel(Told(reply))
  assert asked(panel, question()) == [None]
  assert counts(panel) == {"calls": 1, "unparsed": 1, "tokens": 7} and "does not parse" in panel.cause


@pytest.mark.parametrize(
  "answers, want",
  [
    ([said(1), said(2), said(2)], [1, 2, 2]),
    ([said(1), "no", said(2)], [1, 2]),
    ([said(1), "no", JudgeError("down")], None),
  ],
)
def test_a_poll_needs_more_than_half_of_its_votes(answers, want):
  assert asked(Panel(Told(*answers), votes=3), question(), poll=True) == [want]


@pytest.mark.parametrize("votes, most", [([3, 1, 3], 3), ([2, 1], 2), ([1, 2, 1, 2, 5], 2), ([4], 4), ([0, 0, 9], 0)])
def test_the_most_frequent_vote(votes, most):
  assert majority(votes) == most


def test_calls_in_flight_are_bounded():
  judge = Told(*(said(1) for _ in range(9)), delay=0.001)
  asked(Panel(judge, concurrency=3), *(question(str(i)) for i in range(9)))
  assert judge.most == 3


def test_rules_are_asked_for_every_question_and_their_faults_are_failures():
  panel = Panel(Rules(lambda q: said(q.facts["n"])))
  assert asked(panel, question(n=1), question(n=2), question()) == [1, 2, None]
  assert counts(panel) == {"calls": 3, "failed": 1} and "KeyError" in panel.cause


def test_who_is_cancelled_leaves_the_call_to_the_others():
  judge = Told(said(1), delay=0.01)
  panel = Panel(judge)

  async def run():
    async with panel:
      first, second = (asyncio.ensure_future(panel.ask(question(), number)) for _ in range(2))
      await asyncio.sleep(0.001)
      first.cancel()
      return await second, first.cancelled()

  assert asyncio.run(run()) == (1, True)


def test_leaving_cancels_what_nobody_waits_for():
  judge = Told(delay=60)
  panel = Panel(judge)

  async def run():
    async with panel:
      waiting = asyncio.ensure_future(panel.ask(question(), number))
      await asyncio.sleep(0.001)
      waiting.cancel()
    assert judge.now == 0

  asyncio.run(asyncio.wait_for(run(), 10))


# the cache


def test_another_process_reads_what_one_was_told(tmp_path):
  code = (
    "import sys; from jaxagent.judges import Cache, Reply\n"
    "Cache(sys.argv[1]).put({'vote': 0, 'messages': [{'content': 'q', 'role': 'user'}]}, Reply('{\"n\": 6}', 3))"
  )
  subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
  judge = Told()
  panel = Panel(judge, cache=Cache(tmp_path))
  assert asked(panel, question()) == [6] and judge.asked == []
  assert counts(panel) == {"cached": 1}


def test_a_vote_and_any_other_change_of_the_request_is_another_entry(tmp_path):
  cache = Cache(tmp_path)
  cache.put({"messages": ["a"], "vote": 0}, Reply("one", 1))
  assert cache.get({"vote": 0, "messages": ["a"]}) == Reply("one", 1)
  assert cache.get({"messages": ["a"], "vote": 1}) is None and cache.get({"messages": ["b"], "vote": 0}) is None


@pytest.mark.parametrize(
  "damage",
  [
    lambda raw: b"",
    lambda raw: raw[:-9],
    lambda raw: raw.replace(b"hello", b"hellp"),
    lambda raw: raw.replace(b'"tokens": 5', b'"tokens": 6'),
    lambda raw: raw.replace(b'"vote": 0', b'"vote": 3'),
    lambda raw: b"\xff\xfe" + raw,
    lambda raw: b"[1, 2]",
    lambda raw: json.dumps({**json.loads(raw), "text": 3}).encode(),
  ],
)
def test_a_damaged_entry_is_a_miss_and_is_written_anew(tmp_path, damage):
  cache, request = Cache(tmp_path), {"messages": [], "vote": 0}
  cache.put(request, Reply("hello", 5))
  (file,) = tmp_path.rglob("*.json")
  assert damage(file.read_bytes()) != file.read_bytes()
  file.write_bytes(damage(file.read_bytes()))
  assert cache.get(request) is None
  cache.put(request, Reply("hello", 5))
  assert cache.get(request) == Reply("hello", 5) and not list(tmp_path.rglob("*.new"))


def test_texts_of_any_kind_come_back(tmp_path):
  cache = Cache(tmp_path)
  for words in ("", "\ud800 lone", "é\u2028\n\0", "a" * 10_000):
    cache.put({"words": words}, Reply(words, 0))
    assert cache.get({"words": words}) == Reply(words, 0)


# reading


def test_thoughts_and_a_fence_are_no_part_of_the_reply():
  assert read_object('<think>{"n": 2}</think>\n```json\n{"n": 1}\n```', "n") == {"n": 1}


@pytest.mark.parametrize(
  "read, message",
  [
    (lambda: read_object('{"n": NaN}', "n"), "NaN"),
    (lambda: read_object('{"n": 1, "n": 2}', "n"), "twice"),
    (lambda: read_object("[" * 100_000, "n"), "not JSON"),
    (lambda: read_object('{"m": 1}', "n"), r"got \['m'\]"),
    (lambda: share(1.01, "p"), "p must be a number in"),
    (lambda: share(True, "p"), "p must be a number in"),
    (lambda: share("1", "p"), "p must be a number in"),
    (lambda: integer(1.0, 0, 2, "n"), "n must be a whole number"),
    (lambda: numbers([1, 1], 3, "steps"), "twice"),
    (lambda: numbers([0], 3, "steps"), r"in 1\.\.3"),
    (lambda: text("  ", "c"), "c must be a text"),
    (lambda: text("a" * 1001, "c"), "c must be a text"),
  ],
)
def test_a_reply_that_is_not_what_was_asked_for(read, message):
  with pytest.raises(Unparsed, match=message):
    read()


def test_a_panel_of_nobody():
  with pytest.raises(ValueError, match="votes must be at least 1, got 0"):
    Panel(Told(), votes=0)
