"""A judge behind HTTP: what is sent, what is tried again, what is a failure; against a small server, and our own."""

import asyncio
import contextlib
import http.server
import json
import threading
import time

import pytest

from jaxagent.judges import Cache, Endpoint, JudgeError, Panel, Question, Reply
from jaxagent.judges.replies import read_object

KEY = "sk-very-secret"
QUESTION = Question("test", ({"role": "user", "content": "how many?"},))


def completion(words, **more):
  return 200, {"choices": [{"message": {"role": "assistant", "content": words}, "finish_reason": "stop"}], **more}


class Server:
  """Answers with the next (status, body[, headers]) of a list, or with what a function of the request gives."""

  def __init__(self, *answers):
    self.answers, self.seen, outer = list(answers), [], self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        outer.seen.append((self.path, dict(self.headers), body))
        answer = outer.answers.pop(0) if isinstance(outer.answers, list) else outer.answers(body)
        if answer == "hang up":
          self.close_connection = True
          return
        if isinstance(answer, float):
          time.sleep(answer)
          answer = completion("late")
        status, value, headers = (*answer, {})[:3]
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        with contextlib.suppress(OSError):
          self.send_response(status)
          for name, text in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, text)
          self.end_headers()
          self.wfile.write(raw)

      def log_message(self, *_):
        pass

    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.server.daemon_threads = True
    self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

  def __enter__(self):
    threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return self

  def __exit__(self, *_):
    self.server.shutdown()
    self.server.server_close()


def endpoint(server, **named):
  slept = []

  async def sleep(seconds):
    slept.append(seconds)

  made = Endpoint(server.url, "judge-1", **{"api_key": KEY, "timeout": 5.0, "sleep": sleep, **named})
  made.slept = slept
  return made


def ask(judge, question=QUESTION, vote=0):
  async def run():
    async with judge:
      return await judge.reply(question, vote)

  return asyncio.run(run())


def test_what_is_sent_and_what_comes_back():
  with Server(completion("two", usage={"total_tokens": 31})) as server:
    judge = endpoint(server, body={"max_tokens": None, "max_completion_tokens": 9}, votes=2, seed=5)
    assert ask(judge, vote=1) == Reply("two", 31)
    ((path, headers, body),) = server.seen
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
      "model": "judge-1", "messages": [{"role": "user", "content": "how many?"}], "temperature": 0.1,
      "max_completion_tokens": 9, "seed": 6,
    }  # fmt: skip
    assert KEY not in repr(judge) and KEY not in json.dumps(judge.request(QUESTION, 0))


def test_without_the_context_and_without_a_key():
  with Server(completion("one")) as server:
    assert asyncio.run(endpoint(server, api_key=None).reply(QUESTION, 0)) == Reply("one", 0)
    assert "Authorization" not in server.seen[0][1]


@pytest.mark.parametrize("first", [(500, {}), (503, b"busy"), (429, {}), (408, {}), (409, {}), "hang up"])
def test_what_may_pass_is_tried_again(first):
  with Server(first, first, completion("two")) as server:
    judge = endpoint(server)
    assert ask(judge).text == "two" and len(server.seen) == 3
    assert [0.5 <= judge.slept[0] <= 1, 1 <= judge.slept[1] <= 2] == [True, True]
    server.answers = [first, first, completion("two")]
    again = endpoint(server)
    assert ask(again).text == "two" and again.slept == judge.slept  # by the seed
    server.answers = [first, first, completion("two")]
    other = endpoint(server, seed=1)
    assert ask(other).text == "two" and other.slept != judge.slept


def test_the_server_may_ask_to_wait():
  with Server((429, {}, {"Retry-After": "7"}), (503, {}, {"Retry-After": "1e9"}), completion("ok")) as server:
    judge = endpoint(server)
    assert ask(judge).text == "ok" and judge.slept == [7.0, 60.0]


def test_retries_end():
  with Server(*[(500, {"error": "broken"})] * 3) as server:
    with pytest.raises(JudgeError, match=r"500 .*broken.* \(3 attempts\)"):
      ask(endpoint(server, retries=2))
    assert len(server.seen) == 3


@pytest.mark.parametrize(
  "answer, message",
  [
    ((401, {"error": f"bad key {KEY}"}), r"401 .*bad key \*\*\*"),
    ((404, b"no such model"), "404 .*no such model"),
    ((200, b"<html>"), "no chat completion"),
    ((200, {"choices": []}), "no chat completion"),
    ((200, [1]), "no chat completion"),
    ((200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}), "no text .*length"),
  ],
)
def test_what_will_not_pass_is_not_tried_again(answer, message):
  with Server(answer) as server:
    with pytest.raises(JudgeError, match=message) as caught:
      ask(endpoint(server))
    assert len(server.seen) == 1 and KEY not in str(caught.value)


def test_a_call_that_takes_too_long_is_tried_again_and_then_a_failure():
  with Server(2.0, completion("two")) as server:
    assert ask(endpoint(server, timeout=0.3)).text == "two"
  with Server(2.0) as server, pytest.raises(JudgeError, match=r"no answer within 0\.3 s"):
    ask(endpoint(server, timeout=0.3, retries=0))


def test_nobody_listening_is_a_failure():
  with Server() as server:
    url = server.url
  judge = Endpoint(url, "m", retries=1, backoff=0.001, timeout=5.0)
  with pytest.raises(JudgeError, match=r"ConnectError.*2 attempts"):
    ask(judge)


def test_a_cancelled_call_ends_at_once():
  released, answered = threading.Event(), []

  def late(body):
    released.wait(30)
    answered.append(body)
    return completion("late")

  with Server() as server:
    server.answers = late

    async def run():
      async with endpoint(server, timeout=60.0) as judge:
        waiting = asyncio.ensure_future(judge.reply(QUESTION, 0))
        while not server.seen:
          await asyncio.sleep(0.01)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
          await waiting
        return waiting.cancelled()

    try:
      assert asyncio.run(run()) and not answered
    finally:
      released.set()


@pytest.mark.parametrize(
  "url, message",
  [
    ("ftp://x/v1", "begin with http"), ("localhost:8000", "begin with http"), ("https://me:key@x/v1", "hold no key"),
    ("https://x/v1?key=a", "hold no key"),
  ],
)  # fmt: skip
def test_a_url_that_is_none(url, message):
  with pytest.raises(ValueError, match=message) as caught:
    Endpoint(url, "m")
  assert "me:key" not in str(caught.value)


@pytest.mark.parametrize("named", [{"retries": -1}, {"timeout": 0.0}])
def test_wrong_options(named):
  with pytest.raises(ValueError, match=f"the judge's {next(iter(named))} must be"):
    Endpoint("http://x/v1", "m", **named)


def test_a_second_run_is_told_the_same_without_a_call(tmp_path):
  def replies():
    panel = Panel(endpoint(server, votes=3), votes=3, cache=Cache(tmp_path))

    async def run():
      async with panel:
        return await panel.poll(QUESTION, lambda text: read_object(text, "n")["n"])

    return asyncio.run(run()), panel.metrics()

  with Server(*(completion(json.dumps({"n": n}), usage={"total_tokens": 10}) for n in range(3))) as server:
    first, counts = replies()
    assert counts["judge/calls"] == 3 and counts["judge/tokens"] == 30
    again, counts = replies()
    assert again == first and sorted(first) == [0, 1, 2]
    assert counts["judge/calls"] == 0 and counts["judge/cached"] == 3 and len(server.seen) == 3
  assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.rglob("*.json"))
