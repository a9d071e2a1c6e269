"""The endpoint over an engine that is told its words: tool calls, stop strings, characters, failures, leaving."""

import json
import time

import httpx
import openai
import pytest
from running import Live, Teller

from jaxagent.models.chat import Chat
from jaxagent.serve.app import Served

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HERMES = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": "€"}}\n</tool_call>'
USER = [{"role": "user", "content": "1+2"}]
BODY = {"model": "told", "messages": USER}


def ask(live, **named):
  with live.client() as client:
    answer = client.chat.completions.create(**{**BODY, **named})
    return list(answer) if named.get("stream") else answer


def joined(chunks):
  """(content, tool calls, finish reason) of a stream."""
  deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
  calls = [call for delta in deltas for call in delta.tool_calls or ()]
  return "".join(delta.content or "" for delta in deltas), calls, chunks[-1].choices[0].finish_reason


def test_a_tool_call_there_and_back(tell):
  live = tell(HERMES, HERMES, "It is 3.")
  answer = ask(live, tools=TOOLS, tool_choice="auto").choices[0]
  (call,) = answer.message.tool_calls
  assert answer.finish_reason == "tool_calls" and answer.message.content == "I add."
  assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": "€"}
  content, (streamed,), finish = joined(ask(live, tools=TOOLS, stream=True))
  assert (content, finish) == ("I add.", "tool_calls") and streamed.index == 0
  assert streamed.id.startswith("call_") and streamed.function.model_dump() == call.function.model_dump()
  result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
  messages = [*USER, answer.message.model_dump(), result]
  assert ask(live, tools=TOOLS, messages=messages).choices[0].message.content == "It is 3."
  assert '{"name": "add", "arguments": {"a": "€"}}' in live.engine.prompts[2]
  assert "<|im_start|>tool\n3<|im_end|>" in live.engine.prompts[2]
  assert live.engine.prompts[0] == live.engine.prompts[1] and '"name": "add"' in live.engine.prompts[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
  "text, named", [('<tool_call>{"name": </tool_call>', {}), (HERMES, {"tool_choice": "none"}), (HERMES, {"tools": []})]
)
def test_what_is_no_call_is_text(tell, stream, text, named):
  answer = ask(tell(text), **{"tools": TOOLS, "stream": stream, **named})
  if stream:
    assert joined(answer) == (text, [], "stop")
  else:
    assert answer.choices[0].message.content == text and answer.choices[0].message.tool_calls is None


def test_calls_of_a_byte_level_model(tell):
  answer = ask(tell("<add>1+2</add>", tool_format="plain"), tools=TOOLS).choices[0].message
  assert answer.content is None and json.loads(answer.tool_calls[0].function.arguments) == {"input": "1+2"}


def test_tools_with_a_rendered_prompt_are_looked_for(tell):
  answer = ask(tell(HERMES), messages=[], tools=TOOLS, extra_body={"prompt_token_ids": [1, 2]})
  assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("seed", range(5))
def test_streamed_text_is_whole_characters_up_to_the_stop(tell, seed):
  chunks = ask(tell("Ω😀 is ü END of it", seed=seed), stream=True, stop="END", logprobs=True)
  content, _, finish = joined(chunks)
  assert (content, finish) == ("Ω😀 is ü ", "stop")
  assert all("\ufffd" not in (choice.delta.content or "") for chunk in chunks for choice in chunk.choices)
  logprobs = [t.logprob for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
  assert logprobs == [-i for i in range(1, len("Ω😀 is ü END".encode()) + 1)]


def test_events_are_lines_for_every_client(tell, http):
  text = "a\u2028b\x85c\nd\x1ee"
  with http.stream("POST", tell(text).url + "/chat/completions", json={**BODY, "stream": True}) as response:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
  assert events[-1] == "[DONE]"
  deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
  assert "".join(delta.get("content", "") for delta in deltas) == text


def test_a_failure_is_told_and_harms_nobody_else(tell):
  live = tell("bad", "fine", "bad")
  with pytest.raises(openai.InternalServerError, match="the server failed"):
    ask(live)
  assert ask(live).choices[0].message.content == "fine"
  with pytest.raises(openai.APIError, match="the server failed"):  # after its first words
    ask(live, stream=True)
  assert all(session.closed for session in live.sessions)


def test_a_server_that_stops_says_so():
  engine = Teller(["abc"], waits=True)
  with Live(Served(engine, Chat(engine.tokenizer), "told"), grace=1) as live, live.client() as client:
    chunks = client.chat.completions.create(**BODY, stream=True)
    assert next(chunks).choices[0].delta.role == "assistant"
    live.stop()
    with pytest.raises(openai.APIError, match="the server is stopping"):
      list(chunks)
  assert live.sessions[0].closed


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_its_session(tell, stream):
  live = tell("abc", waits=True)
  body = {**BODY, "stream": stream}
  with pytest.raises(httpx.ReadTimeout):
    httpx.post(live.url + "/chat/completions", json=body, timeout=0.5)
  until = time.monotonic() + 30
  while not live.sessions[0].closed:
    assert time.monotonic() < until
    time.sleep(0.01)
