"""What is refused: in OpenAI's form, with the parameter's name, before anything is sampled."""

import json
import socket

import pytest
from running import Live, Teller

from jaxagent.models.chat import Chat
from jaxagent.serve import server
from jaxagent.serve.app import MAX_BODY, Served

USER = [{"role": "user", "content": "a"}]
CHAT = {"model": "tiny", "messages": USER}
TEXT = {"model": "tiny", "prompt": "a"}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": "[1"}}

REFUSED = {  # endpoint, what is added to the body, parameter, code, words of the message
  "unknown": ("chat", {"beams": 3}, "beams", "unknown_parameter", "unknown parameter: beams"),
  "unknown, of text": ("text", {"messages": USER}, "messages", "unknown_parameter", "unknown parameter"),
  "no model": ("chat", {"model": None}, "model", "invalid_value", "model"),
  "another model": ("chat", {"model": "gpt"}, "model", "model_not_found", "there is no model 'gpt'"),
  "temperature": ("chat", {"temperature": -1}, "temperature", "invalid_value", "greater than or equal to 0"),
  "temperature past all use": ("chat", {"temperature": 1e300}, "temperature", "invalid_value", "100"),
  "temperature of text": ("text", {"temperature": "hot"}, "temperature", "invalid_value", "'hot'"),
  "top_p": ("chat", {"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
  "n": ("chat", {"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
  "n true": ("chat", {"n": True}, "n", "invalid_value", "integer"),
  "n times prompts": ("text", {"prompt": ["a"] * 65, "n": 2}, "n", "invalid_value", "at most 128"),
  "max_tokens": ("text", {"max_tokens": 0}, "max_tokens", "invalid_value", "1"),
  "two limits": ("chat", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value", "differ"),
  "seed": ("chat", {"seed": 2**63}, "seed", "invalid_value", "less than"),
  "empty stop": ("chat", {"stop": ["a", ""]}, "stop.1", "invalid_value", "at least 1 character"),
  "many stops": ("chat", {"stop": [str(i) for i in range(17)]}, "stop", "invalid_value", "at most 16"),
  "n too large": ("chat", {"n": 129}, "n", "invalid_value", "128"),
  "bias of no id": ("chat", {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "token ids"),
  "bias past the vocabulary": ("chat", {"logit_bias": {"259": 1}}, "logit_bias", "invalid_value", "[0, 259)"),
  "bias too large": ("chat", {"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value", "100"),
  "top_logprobs": ("chat", {"logprobs": True, "top_logprobs": 2}, "top_logprobs", "unsupported_parameter", "offered"),
  "top logprobs of text": ("text", {"logprobs": 2}, "logprobs", "unsupported_parameter", "not offered"),
  "penalty": ("chat", {"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter", "set it to 0"),
  "format": ("chat", {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "text"),
  "forced tool": ("chat", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "unsupported_parameter", "none"),
  "one call": ("chat", {"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter", "true"),
  "strict tool": ("chat", {"tools": [{**TOOL, "function": {"name": "a", "strict": True}}]}, "strict",
                  "unsupported_parameter", "offered"),
  "tool without a name": ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name",
                          "missing_required_parameter", "missing"),
  "echo": ("text", {"echo": True}, "echo", "unsupported_parameter", "false"),
  "stream options": ("chat", {"stream": False, "stream_options": {"include_usage": True}}, "stream_options",
                     "invalid_value", "stream"),
  "no messages": ("chat", {"messages": []}, "messages", "invalid_value", "messages or prompt_token_ids"),
  "two prompts": ("chat", {"prompt_token_ids": [1]}, "messages", "invalid_value", "messages or prompt_token_ids"),
  "role": ("chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "invalid_value", "robot"),
  "picture": ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
              "messages.0.content.0.type", "invalid_value", "image_url"),
  "no content": ("chat", {"messages": [{"role": "user"}]}, "messages.0", "invalid_value", "content is missing"),
  "arguments": ("chat", {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages", "invalid_value",
                "must be a JSON object"),
  "calls of a user": ("chat", {"messages": [{**USER[0], "tool_calls": [CALL]}]}, "messages.0", "invalid_value",
                      "for the role 'assistant'"),
  "no prompt": ("text", {"prompt": None}, "prompt", "invalid_value", "must be a string"),
  "half a prompt": ("text", {"prompt": [1, "a"]}, "prompt", "invalid_value", "must be a string"),
  "empty prompt": ("text", {"prompt": ""}, "prompt", "invalid_value", "is empty"),
  "no prompts": ("text", {"prompt": []}, "prompt", "invalid_value", "is empty"),
  "id outside": ("text", {"prompt": [1, 259]}, "prompt", "invalid_value", "outside the model's vocabulary"),
  "long prompt": ("text", {"prompt": "a" * 128}, "prompt", "context_length_exceeded", "128 tokens"),
  "long messages": ("chat", {"messages": [{"role": "user", "content": "a" * 128}]}, "messages",
                    "context_length_exceeded", "no room"),
  "long ids": ("chat", {"messages": [], "prompt_token_ids": [1] * 200}, "prompt_token_ids", "context_length_exceeded",
               "200 tokens"),
}  # fmt: skip
PATHS = {"chat": ("/chat/completions", CHAT), "text": ("/completions", TEXT)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_parameter(live, http, name, stream):
  kind, added, param, code, words = REFUSED[name]
  path, body = PATHS[kind]
  response = http.post(live.url + path, json={**body, "stream": stream, **added})
  error = response.json()["error"]
  assert response.status_code == (404 if code == "model_not_found" else 400)
  assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
  assert (error["param"], error["code"]) == (param, code) and words in error["message"]


@pytest.mark.parametrize(
  "body", [b"", b"{", b"[1]", b'{"model": NaN', b"\xff", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 5000]
)
def test_a_body_that_is_no_request(live, http, body):
  response = http.post(live.url + "/completions", content=body)
  assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_body_without_end(live, http):
  response = http.post(live.url + "/completions", content=(b" " * 2**20 for _ in range(MAX_BODY // 2**20 + 1)))
  assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


def test_what_asks_for_nothing_is_accepted(live, http):
  nothing = {
    "user": "u", "metadata": {"a": "b"}, "store": False, "frequency_penalty": 0.0, "presence_penalty": 0,
    "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True, "top_logprobs": 0,
    "stop": None, "logit_bias": None, "n": None, "seed": None, "temperature": None, "max_tokens": 2, "stream": False,
    "reasoning_effort": None, "service_tier": "auto",
  }  # fmt: skip
  assert http.post(live.url + "/chat/completions", json={**CHAT, **nothing}).status_code == 200


def test_a_template_that_does_not_show_tools(make_engine, http):
  engine = make_engine(capacity=512)
  template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
  with Live(Served(engine, Chat(engine.tokenizer, template, "hermes"), "tiny")) as live:
    error = http.post(live.url + "/chat/completions", json={**CHAT, "tools": [TOOL]}).json()["error"]
    assert error["param"] == "tools" and "ignores tools" in error["message"]


# who may call


def test_a_key_is_asked_of_every_request_but_health(http):
  engine = Teller(["hello"])
  with Live(Served(engine, Chat(engine.tokenizer), "told"), api_key="sesame") as live:
    for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}, {"Authorization": ""}):
      for path in ("/models", "/models/told", "/nothing"):
        response = http.get(live.url + path, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert "sesame" not in response.text
      assert http.post(live.url + "/chat/completions", json={}, headers=headers).status_code == 401
    assert http.get(live.url.removesuffix("/v1") + "/health").status_code == 200
    with live.client(api_key="sesame") as client:
      answer = client.chat.completions.create(model="told", messages=USER)
      assert answer.choices[0].message.content == "hello"
    elsewhere = {"Authorization": "bearer sesame", "Host": "example.com"}
    assert http.get(live.url + "/models", headers=elsewhere).status_code == 200


@pytest.mark.parametrize(
  "host, status",
  [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("example.com", 403), ("127.0.0.1.evil.com", 403),
   ("[", 403)],
)  # fmt: skip
def test_without_a_key_only_this_machine_is_served(live, http, host, status):
  assert http.get(live.url + "/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "example.com", "127.0.0.1.evil.com"])
def test_other_machines_need_a_key(host):
  with pytest.raises(ValueError, match="needs an API key"):
    server.checked_key(host, None)
  assert server.checked_key(host, "sesame") == "sesame"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_needs_none(host):
  assert server.checked_key(host, None) is None


@pytest.mark.parametrize("key", ["", "  ", "ü", "a\nb"])
def test_keys_that_no_header_can_carry(key):
  with pytest.raises(ValueError, match="printable ASCII"):
    server.checked_key("127.0.0.1", key)


def test_an_address_that_is_taken():
  with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match=r"cannot listen at 127\.0\.0\.1"):
    server.bind("127.0.0.1", taken.getsockname()[1])
  with pytest.raises(ValueError, match=r"0\.\.65535"):
    server.bind("127.0.0.1", 65536)


def test_errors_are_json(live, http):
  response = http.get(live.url + "/completions")
  assert json.loads(response.text)["error"]["type"] == "invalid_request_error"
