"""Text that grows piece by piece: whole characters, nothing of a stop string, and in the end the text of the answer."""

import random

import pytest
from running import cuts, told

from jaxagent.envs.base import ToolCall
from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.sampling import Sampling
from jaxagent.serve.reading import Reader, Rules, certain, read_completion

BYTES = byte_tokenizer()
EOT = BYTES.eos_id
HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "add", }</tool_call>'


def rules(stop=(), tools=(), tool_format="hermes"):
  return Rules(Chat(BYTES, tool_format=tool_format), (EOT,), stop, tools)


def read_in_parts(how, completion, seed, held=0):
  """The parts of the text, read from pieces cut at random; the last `held` tokens come with the completion."""
  reader = Reader(how)
  ids = completion.ids[: len(completion.ids) - held]
  parts = [reader.read(ids[start:end]) for start, end in cuts(random.Random(seed), len(ids))]
  answer = read_completion(how, completion)
  return [*parts, reader.rest(answer)], answer


TEXTS = ["plain words", "añb€c😀d", "😀", "", "ends with an open bracket <", "two  \n", "\ufffd is a character too"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tools", [(), ("add",)])
def test_the_parts_are_the_text(text, tools):
  for seed in range(20):
    parts, answer = read_in_parts(rules(tools=tools), told(BYTES, text, Sampling(stop_ids=(EOT,))), seed)
    assert "".join(parts) == answer.content == text and answer.finish == "stop" and not answer.calls


def test_a_character_is_shown_when_all_of_its_bytes_are_there():
  reader, ids = Reader(rules()), BYTES.encode("a😀b")
  assert [reader.read([i]) for i in ids] == ["a", "", "", "", "😀", "b"]


def test_any_bytes_at_all():
  """Bytes that are no UTF-8 read the same whole and in parts, special tokens and ids without a token among them."""
  rng = random.Random(0)
  for seed in range(300):
    ids = [rng.choice([rng.randrange(256), 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 257, 400]) for _ in range(rng.randint(1, 40))]
    stop = tuple(BYTES.decode([b]) for b in rng.sample(range(97, 123), 2)) if seed % 2 else ()
    completion = told(BYTES, ids, Sampling(stop=stop, stop_ids=(EOT,)))
    parts, answer = read_in_parts(rules(stop), completion, seed)
    assert "".join(parts) == answer.content
    assert not any(s in answer.content for s in stop)


@pytest.mark.parametrize(
  "text, stop, want",
  [
    ("one STOP two", ("STOP",), "one "),
    ("one STO two", ("STOP",), "one STO two"),
    ("aab", ("ab",), "a"),
    ("xyz", ("yz", "y"), "x"),
    ("über", ("b",), "ü"),
    ("STOP", ("STOP",), ""),
  ],
)
def test_text_ends_before_a_stop_string(text, stop, want):
  for seed in range(10):
    completion = told(BYTES, text, Sampling(stop=stop, stop_ids=(EOT,)))
    parts, answer = read_in_parts(rules(stop), completion, seed, held=min(seed % 4, len(completion.ids)))
    assert "".join(parts) == answer.content == want and answer.finish == "stop"


CALLS = {
  "call alone": (HERMES, "hermes", None, [ToolCall("add", {"a": 1})]),
  "words before": (f"I add.\n{HERMES}", "hermes", "I add.", [ToolCall("add", {"a": 1})]),
  "two calls": (f"{HERMES}\n{HERMES} ok", "hermes", "\n ok", [ToolCall("add", {"a": 1})] * 2),
  "malformed": (f"so: {BROKEN}", "hermes", f"so: {BROKEN}", []),
  "one of two malformed": (f"{HERMES}{BROKEN}", "hermes", f"{HERMES}{BROKEN}", []),
  "never closed": ("<tool_call>{", "hermes", "<tool_call>{", []),
  "plain": ("So <add>1+2</add>", "plain", "So", [ToolCall("add", {"input": "1+2"})]),
  "plain, of no tool": ("So <b>1</b> x", "plain", "So <b>1</b> x", []),
  "xml": (
    "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "qwen_xml", None,
    [ToolCall("add", {"a": "1"})],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_taken_out_of_the_text(name):
  text, tool_format, content, calls = CALLS[name]
  how = rules(tools=("add",), tool_format=tool_format)
  for seed in range(20):
    parts, answer = read_in_parts(how, told(BYTES, text, Sampling(stop_ids=(EOT,))), seed)
    assert answer.content == content and list(answer.calls) == calls
    assert "".join(parts) == (content or "")
    assert answer.finish == ("tool_calls" if calls else "stop")


def test_without_tools_nothing_is_a_call():
  answer = read_completion(rules(), told(BYTES, HERMES, Sampling(stop_ids=(EOT,))))
  assert answer.content == HERMES and not answer.calls


def test_a_turn_that_was_cut_says_length():
  answer = read_completion(rules(), told(BYTES, "abcdef", Sampling(max_tokens=3, stop_ids=(EOT,))))
  assert (answer.content, answer.finish) == ("abc", "length")


@pytest.mark.parametrize(
  "text, end", [("abc", 3), ("ab<", 2), ("a<to", 1), ("a<ox", 4), ("<tool_call>x", 0), ("xEN", 1), ("xENDz", 1)]
)
def test_what_is_certain(text, end):
  assert certain(text, ["END"], ["<tool_call>"]) == end
