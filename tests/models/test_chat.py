import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.envs.base import Malformed, ToolCall
from jaxagent.models.chat import TOOL_FORMATS, Chat, chatml, parse, read_template, write_calls
from jaxagent.models.tokenizer import Tokenizer, byte_tokenizer

BYTES = byte_tokenizer()
END, START = 258, 257
USER = {"role": "user", "content": "12+7?"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}

# groups neighbouring tool results in one user turn, and drops the reasoning of earlier turns
GROUPING = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{%- set words = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + words + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def assistant(content, *calls):
  written = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
  return {"role": "assistant", "content": content} | ({"tool_calls": written} if calls else {})


def tool(content):
  return {"role": "tool", "content": content}


CALL = ToolCall("calc", {"input": "12+7"})
CONVERSATION = [USER, assistant("", CALL), tool("19"), assistant("It is 19."), USER, assistant("19")]


def test_render_golden():
  chat = Chat(BYTES)
  assert chat.eot == END
  assert chat.render([USER]) == [START, *b"user\n12+7?", END, 10, START, *b"assistant\n"]
  assert chat.continuation([tool("19")], ended=True) == [10, START, *b"tool\n19", END, 10, START, *b"assistant\n"]
  assert chat.continuation([tool("19")], ended=False) == [END, *chat.continuation([tool("19")], ended=True)]
  assert chat.continuation([], ended=True) == [10, START, *b"assistant\n"]


def test_demonstration_golden():
  ids, action = Chat(BYTES).demonstration([USER, assistant("", CALL), tool("19"), assistant("19")])
  trained = [i for i, a in zip(ids, action) if a]
  assert trained == [*b"<calc>12+7</calc>", END, *b"19", END]
  assert bytes(i for i in ids if i < 256) == b"user\n12+7?\nassistant\n<calc>12+7</calc>\ntool\n19\nassistant\n19"


@pytest.mark.parametrize("template", [None, GROUPING], ids=["chatml", "grouping"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_demonstration_is_what_an_episode_records(template, tool_format):
  chat = Chat(BYTES, template, tool_format)
  ids, action = chat.render(CONVERSATION[:1], [TOOL]), []
  action = [False] * len(ids)
  said = [write_calls([CALL], tool_format), "It is 19.", "19"]
  replies = [[tool("19")], [USER], None]
  for words, reply in zip(said, replies):
    sampled = [*BYTES.encode(words), chat.eot]
    context = [] if reply is None else chat.continuation(reply, ended=True)
    ids, action = ids + sampled + context, action + [True] * len(sampled) + [False] * len(context)
  assert chat.demonstration(CONVERSATION, [TOOL]) == (ids, action)


@pytest.mark.parametrize("template", [None, GROUPING], ids=["chatml", "grouping"])
@pytest.mark.parametrize("results", [["19"], ["19", "20"], ["1", "2", "3"]])
def test_appending_equals_rendering_the_whole_list(template, results):
  """Parallel tool results are one continuation: their ids are those of the whole conversation."""
  chat = Chat(BYTES, template, "hermes")
  messages = [USER, assistant("I call."), *map(tool, results)]
  appended = [*chat.render([USER]), *BYTES.encode("I call."), chat.eot, *chat.continuation(messages[2:], ended=True)]
  assert appended == chat.render(messages)
  cut = [*chat.render([USER]), *BYTES.encode("I call."), *chat.continuation(messages[2:], ended=False)]
  assert cut == appended


def test_what_was_sampled_is_never_rendered_again():
  """The template drops earlier reasoning; the ids keep it."""
  chat = Chat(BYTES, GROUPING)
  messages = [USER, assistant("<think>hm</think>19"), USER, assistant("again 19")]
  ids, _ = chat.demonstration(messages)
  assert b"<think>hm</think>19" in bytes(i for i in ids if i < 256)
  assert b"<think>" not in bytes(i for i in chat.render(messages) if i < 256)


hostile = st.lists(
  st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "|im_end|>", "<", ">", "\n", "a", "\U000f0000"])
).map("".join)


@given(first=hostile, second=hostile, ended=st.booleans())
@settings(max_examples=150, deadline=None)
def test_content_never_becomes_a_special_token(first, second, ended):
  chat = Chat(BYTES)
  messages = [{"role": "user", "content": first}, {"role": "user", "content": second}]
  want = []
  for text in (first, second):
    want += [START, *b"user\n", *text.encode(), END, 10]
  want += [START, *b"assistant\n"]
  assert chat.render(messages) == want
  assert chat.continuation(messages, ended=ended) == [*([] if ended else [END]), 10, *want]
  ids, _ = chat.demonstration([*messages, assistant(second)])
  assert ids == [*want, *second.encode(), END]


def test_parts_of_one_message_cannot_spell_a_special_token_together():
  template = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"""
  message = {"role": "user", "content": [{"text": "<|im_"}, {"text": "end|>"}, {"text": "<"}, {"text": "|im_end|>"}]}
  ids = Chat(BYTES, template).render([message])
  assert ids == [START, *b"user\n<|im_end|><|im_end|>", END]


@pytest.mark.parametrize("content", ["|im_end|>", "a<", "<", "|im_end|>a<"])
def test_content_and_template_cannot_spell_a_special_token_together(content):
  chat = Chat(BYTES, "{% for m in messages %}{{ '<' + m.content + '|im_end|>' + '<|im_end|>' }}{% endfor %}")
  assert chat.render([{"role": "user", "content": content}]) == [*f"<{content}|im_end|>".encode(), END]


def test_special_text_in_tool_schemas_and_arguments_is_text():
  chat = Chat(BYTES, None, "hermes")
  ids = chat.render([USER, assistant("", ToolCall("calc", {"<|im_end|>": "<|im_end|>"}))], [{"name": "<|im_start|>"}])
  assert ids.count(END) == 3 and ids.count(START) == 4


def test_tokenisation_is_that_of_the_whole_text():
  """Ids equal encoding the rendered text at once, where merges reach over the border of markup and content."""
  vocab = json.loads(BYTES.inner.to_str())["model"]["vocab"] | {"ĊĊ": 256, "<|": 257}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("<", "|")]))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  messages = [{"role": "user", "content": "\nhi <| there\n"}]
  text = "<|im_start|>user\n\nhi <| there\n<|im_end|>\n<|im_start|>assistant\n"
  ids = Chat(Tokenizer(inner)).render(messages)
  assert ids == inner.encode(text, add_special_tokens=False).ids
  assert 256 in ids and 257 in ids


def test_huggingface_conventions():
  template = """\
  {% set found = namespace(n=0) %}
  {% for m in messages %}
    {% if m.role == 'skip' %}
      {% continue %}
    {% endif %}
    {% set found.n = found.n + 1 %}
{{ m.role }}:{{ {'b': '<é>', 'a': 1} | tojson }}:{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}
  {% endfor %}
{{ found.n }}{{ eos_token }}{{ strftime_now('%%') }}{% if tools is none %}none{% endif %}{{ missing }}"""
  ids = Chat(BYTES, template).render([{"role": "skip", "content": "x"}, USER])
  assert BYTES.decode(ids) == 'user:{"b": "<é>", "a": 1}:12+7?<|im_end|>1<|im_end|>%none'


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% for %}", "not valid Jinja: line 1"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ ''.__class__.__mro__ }}{{ messages[1].content }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ("hello<|im_end|>", "does not write the content"),
    ("{% for m in messages %}{{ m.role + m.content }}\n{% endfor %}", "must end an assistant turn"),
  ],
)
def test_templates_that_cannot_be_used(template, message):
  with pytest.raises(ValueError, match=message):
    Chat(BYTES, template)


def test_errors():
  with pytest.raises(ValueError, match="tool_format must be one of hermes"):
    Chat(BYTES, None, "json")
  with pytest.raises(ValueError, match="tool_format must be one of hermes"):
    parse("", "json")
  with pytest.raises(ValueError, match=r"eot=65"):
    Chat(BYTES, eot=65)
  ignores_tools = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
  with pytest.raises(ValueError, match="template ignores tools"):
    Chat(BYTES, ignores_tools, "hermes").render([USER], [TOOL])
  assert Chat(BYTES, ignores_tools, "plain").render([USER], [TOOL]) == Chat(BYTES, ignores_tools).render([USER])
  for messages in ([USER], [assistant("x")], [USER, assistant("x"), USER], []):
    with pytest.raises(ValueError, match="ends with an assistant message"):
      Chat(BYTES).demonstration(messages)
  with pytest.raises(ValueError, match="one argument, input"):
    write_calls([ToolCall("calc", {"x": "1", "y": "2"})], "plain")


@pytest.mark.parametrize(
  ("tool_format", "text", "calls"),
  [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [null]}}</tool_call>', [ToolCall("f", {"x": [None]})]),
    ("hermes", 'hm <tool_call>\n{"name": "f"}\n</tool_call> and', [ToolCall("f", {})]),
    ("hermes", "no call, 1 < 2", []),
    (
      "qwen_xml",
      "<tool_call>\n<function=f>\n<parameter=x>\n 1\n2\n</parameter>\n</function>\n</tool_call>",
      [ToolCall("f", {"x": " 1\n2"})],
    ),
    ("qwen_xml", "<tool_call><function=f></function></tool_call>", [ToolCall("f", {})]),
    ("plain", "<calc>12+7</calc>", [ToolCall("calc", {"input": "12+7"})]),
    ("plain", "I <a></a> then\n<b>x<y</b>", [ToolCall("a", {"input": ""}), ToolCall("b", {"input": "x<y"})]),
    ("plain", "1 < 2 > 1, a<b", []),
  ],
)
def test_parse_golden(tool_format, text, calls):
  assert parse(text, tool_format) == calls


@pytest.mark.parametrize(
  ("tool_format", "text", "words"),
  [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f"}', "</tool_call> is missing"),
    ("hermes", '{"name": "f"}</tool_call>', "without <tool_call>"),
    ("hermes", "<tool_call>[]</tool_call>", "JSON object with a string"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "JSON object with a string"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "must be a JSON object, got str"),
    ("hermes", '<tool_call>{"name": "f", "args": {}}</tool_call>', "got also args"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>', "twice"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "not valid JSON"),
    ("hermes", f"<tool_call>{'[' * 100000}</tool_call>", "nested too deeply"),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": {"1" * 5000}}}}}</tool_call>', "not valid JSON"),
    ("qwen_xml", "<tool_call>f(1)</tool_call>", "<function=name>"),
    ("qwen_xml", "<tool_call><function=f>1</function></tool_call>", "expected <parameter=name>"),
    (
      "qwen_xml",
      "<tool_call><function=f><parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>",
      "given twice",
    ),
    ("plain", "<calc>12+7", "write <calc>input</calc>"),
    ("plain", "12+7</calc>", "write <calc>input</calc>"),
  ],
)
def test_what_does_not_parse_is_said_in_words(tool_format, text, words):
  calls = parse(text, tool_format)
  assert len(calls) == 1 and isinstance(calls[0], Malformed)
  assert words in calls[0].error


def test_good_and_bad_calls_keep_their_order():
  text = write_calls([CALL], "hermes") + "<tool_call>{</tool_call>" + write_calls([CALL], "hermes")
  assert [type(call) for call in parse(text, "hermes")] == [ToolCall, Malformed, ToolCall]


@given(
  st.lists(
    st.builds(
      ToolCall,
      st.sampled_from(["calc", "f_2"]),
      st.fixed_dictionaries({"input": st.text("ab1\"'\\{}()+ é", max_size=12)}),
    ),
    max_size=3,
  ),
  st.sampled_from(TOOL_FORMATS),
)
@settings(max_examples=150, deadline=None)
def test_parse_reads_what_write_writes(calls, tool_format):
  assert parse(write_calls(calls, tool_format), tool_format) == calls


@given(st.text('<>/=tool_calfunction{}":[]\\1 \n', max_size=60), st.sampled_from(TOOL_FORMATS))
@settings(max_examples=300, deadline=None)
def test_parse_never_raises(text, tool_format):
  parse(text, tool_format)
  parse(f"<tool_call>{text}</tool_call>", tool_format)


def test_default_template_writes_calls_and_tools_in_the_format_it_asks_for():
  for tool_format in TOOL_FORMATS:
    chat = Chat(BYTES, None, tool_format)
    text = BYTES.decode(chat.render([USER, assistant("I call.", CALL, CALL)]))
    said = text.split("assistant\n")[1].split("<|im_end|>")[0]
    assert said == "I call.\n" + write_calls([CALL, CALL], tool_format)
  shown = BYTES.decode(Chat(BYTES, None, "qwen_xml").render([{"role": "system", "content": "S"}, USER], [TOOL]))
  assert shown.startswith("<|im_start|>system\nS\n\n") and json.dumps(TOOL) in shown and "<function=name>" in shown
  assert chatml("plain") != chatml("hermes")


@pytest.mark.parametrize(
  ("files", "want"),
  [
    ({}, None),
    ({"chat_template.jinja": "J"}, "J"),
    ({"tokenizer_config.json": json.dumps({"chat_template": "C"})}, "C"),
    ({"tokenizer_config.json": json.dumps({"chat_template": "C"}), "chat_template.jinja": "J"}, "J"),
    (
      {
        "tokenizer_config.json": json.dumps(
          {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
        )
      },
      "D",
    ),
  ],
)
def test_read_template(files, want, tmp_path):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  assert read_template(tmp_path) == want
