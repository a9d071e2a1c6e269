"""Conversations as ids: the first prompt is rendered once, later messages are appended, nothing is rendered twice.

    chat = Chat(tokenizer, template, "hermes")
    ids = chat.render(messages, tools)                  # ends with the generation prompt
    ids += sampled                                      # ends with chat.eot, unless the turn was cut
    ids += chat.continuation(new_messages, ended=True)  # the rest of the markup, the messages, the generation prompt

Text in messages is text: `<|im_end|>` written by a user never becomes the token.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from jaxagent.envs.base import Malformed, Message, ToolCall
from jaxagent.models.tokenizer import Tokenizer, read_json

TOOL_FORMATS = ("hermes", "qwen_xml", "plain")

_CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'To call a tool, write\\nEXAMPLE\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for item in message.tool_calls or [] %}
{%- set call = item.function or item %}
{{- '\\n' if message.content or not loop.first }}
{{- CALL }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_CALL_IN_JINJA = {
  "hermes": """'<tool_call>\\n' + {'name': call.name, 'arguments': call.arguments} | tojson + '\\n</tool_call>'""",
  "qwen_xml": """'<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments.items() %}
{{- '<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>'""",
  "plain": "'<' + call.name + '>' + call.arguments.input + '</' + call.name + '>'",
}


def chatml(tool_format: str) -> str:
  """The default template: `<|im_start|>role`, line break, content, `<|im_end|>`; shows tools and writes calls."""
  example = write_calls([ToolCall("name", {"input" if tool_format == "plain" else "argument": "value"})], tool_format)
  return _CHATML.replace("EXAMPLE", example.replace("\n", "\\n")).replace("CALL", _CALL_IN_JINJA[tool_format])


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
  """A chat template with its tokenizer. `template` is Jinja as Hugging Face writes it; None is `chatml`.

  `eot` is the token that ends an assistant turn; by default the first special token that the template writes after an
  assistant's words. With `tool_format="plain"` the template is not given the tools: a small model knows them from
  demonstrations, a large one from a system message. With the other formats a template that ignores tools is an error.
  """

  tokenizer: Tokenizer
  template: str | None = None
  tool_format: str = "plain"
  eot: int | None = None

  def __post_init__(self):
    if self.tool_format not in TOOL_FORMATS:
      raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, got {self.tool_format!r}")
    if self.template is None:
      object.__setattr__(self, "template", chatml(self.tool_format))
    tail = self._tail((), "")
    match = self.tokenizer.special_pattern().search(tail)
    eot = self.eot if self.eot is not None else match and self.tokenizer.special[match["token"]]
    if eot is None or self.tokenizer.token(eot) not in self.tokenizer.special or self.tokenizer.token(eot) not in tail:
      special = ", ".join(self.tokenizer.special) or "none"
      raise ValueError(
        f"the chat template must end an assistant turn with a special token of the tokenizer (eot={self.eot}); after"
        f" the assistant's words it writes {tail[:60]!r}; special tokens: {special}"
      )
    object.__setattr__(self, "eot", eot)

  def render(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> list[int]:
    """Ids of the messages, followed by the generation prompt."""
    guard = _fresh(messages, tools, self.template)
    text = self._text(self._guarded(messages, guard), self._guarded(tools, guard))
    if tools and self.tool_format != "plain" and text == self._text(self._guarded(messages, guard), []):
      raise ValueError(
        f"the chat template ignores tools, so the model would not know of its {len(tools)} tools;"
        " use a template that shows them, or describe them in a message and set tool_format to 'plain'"
      )
    return self.tokenizer.encode_markup(text, guard)

  def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
    """Ids to append to a sampled assistant turn: the rest of its end, the new messages, the generation prompt.

    `ended`: the turn's last id is `eot`, which is then not repeated. The words of the turn itself play no part.
    """
    guard = _fresh(messages, self.template)
    tail = self._tail(self._guarded(messages, guard), guard)
    mark = self.tokenizer.token(self.eot)
    cut = self.tokenizer.special_pattern(guard).finditer(tail)
    end = next(m.end("token") for m in cut if m["token"] == mark)
    return self.tokenizer.encode_markup(tail[end:] if ended else tail, guard)

  def demonstration(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> tuple[list[int], list[bool]]:
    """(ids, action) of a whole conversation, as the episode that says the same words would record it.

    `action` is True exactly on the assistant's words and the `eot` after them. An assistant's `tool_calls` are written
    after its content in `tool_format`. The conversation ends with an assistant turn.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1 or turns[0] == 0:
      raise ValueError(
        "a demonstration begins with a prompt and ends with an assistant message, got roles"
        f" {[message['role'] for message in messages]}"
      )
    ids = self.render(messages[: turns[0]], tools)
    action = [False] * len(ids)
    for turn, following in zip(turns, [*turns[1:], None]):
      words = [*self.tokenizer.encode(self._words(messages[turn])), self.eot]
      context = [] if following is None else self.continuation(messages[turn + 1 : following], ended=True)
      ids += words + context
      action += [True] * len(words) + [False] * len(context)
    return ids, action

  def _words(self, message: Message) -> str:
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    parts = (message.get("content") or "", write_calls(calls, self.tool_format))
    return "\n".join(part for part in parts if part)

  def _tail(self, messages: Sequence[Message], guard: str) -> str:
    """What the template writes after the words of an assistant turn that `messages` follow."""
    probe = _fresh(messages, guard, self.template)
    before = ({"role": "user", "content": "-"}, {"role": "assistant", "content": probe})
    _, found, tail = self._text([*before, *messages], []).rpartition(probe)
    if not found:
      raise ValueError("the chat template does not write the content of an assistant message")
    return tail

  def _text(self, messages: Sequence[Message], tools: Sequence[dict]) -> str:
    token = self.tokenizer.token
    names = {"eos_token": self.tokenizer.eos_id, "bos_token": self.tokenizer.bos_id, "pad_token": self.tokenizer.pad_id}
    given = {name: token(i) for name, i in names.items() if i is not None}
    shown = list(tools) if tools and self.tool_format != "plain" else None
    try:
      return _compile(self.template).render(messages=list(messages), tools=shown, add_generation_prompt=True, **given)
    except (jinja2.TemplateError, TypeError) as error:
      roles = [message["role"] for message in messages]
      raise ValueError(f"the chat template does not take messages with roles {roles}: {error}") from error

  def _guarded(self, value: Any, guard: str, key: str = "") -> Any:
    """`value` with `guard` before every special token that its strings spell, and at ends that could help spell one."""
    if isinstance(value, str):
      return value if key == "role" else _guard_text(self.tokenizer, value, guard)
    if isinstance(value, dict):
      return {self._guarded(k, guard): self._guarded(v, guard, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [self._guarded(v, guard) for v in value]
    return value


def _guard_text(tokenizer: Tokenizer, text: str, guard: str) -> str:
  pattern, before = tokenizer.special_pattern(guard), None
  while before != text:
    before, text = text, pattern.sub(lambda m: m[0].replace(m["token"], guard + m["token"], 1), text)
  heads = (n for special in tokenizer.special for n in range(1, len(special)) if text.endswith(special[:n]))
  if n := max(heads, default=0):
    text = text[:-n] + guard + text[-n:]
  if any(text.startswith(special[n:]) for special in tokenizer.special for n in range(1, len(special))):
    text = guard + text
  return text


def _fresh(*values: Any) -> str:
  """A private-use character that occurs in no string of `values`, the same for the same values."""
  used = set("".join(_strings(values)))
  return next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)


def _strings(value: Any) -> Iterable[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    for item in value.items():
      yield from _strings(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from _strings(item)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
  )
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  try:
    return environment.from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error


class _Generation(jinja2.ext.Extension):
  """`{% generation %}…{% endgeneration %}` marks an assistant's words in some templates; here it has no effect."""

  tags = frozenset({"generation"})

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def read_template(folder: str | Path) -> str | None:
  """The chat template of a Hugging Face folder: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
  folder = Path(folder)
  if (folder / "chat_template.jinja").is_file():
    return (folder / "chat_template.jinja").read_text(encoding="utf-8")
  template = read_json(folder / "tokenizer_config.json", default={}).get("chat_template")
  if isinstance(template, list):
    template = {entry["name"]: entry["template"] for entry in template}.get("default")
  return template


def parse(text: str, tool_format: str) -> list[ToolCall | Malformed]:
  """Tool calls in the order they are written. What does not parse is a `Malformed` that tells the model why.

  - "hermes": `<tool_call>{"name": "calculator", "arguments": {"expression": "12+7"}}</tool_call>`
  - "qwen_xml": `<tool_call><function=calculator><parameter=expression>12+7</parameter></function></tool_call>`; every
    argument is a string, without the line breaks next to its tags
  - "plain": `<calculator>12+7</calculator>`, for small byte-level models; the arguments are `{"input": "12+7"}`
  """
  if tool_format not in TOOL_FORMATS:
    raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, got {tool_format!r}")
  if tool_format == "plain":
    return _parse_plain(text)
  body = _parse_hermes if tool_format == "hermes" else _parse_qwen_xml
  return [body(m["body"]) if m["body"] is not None else Malformed(_unpaired(m[0])) for m in _TOOL_CALL.finditer(text)]


def write_calls(calls: Iterable[ToolCall], tool_format: str) -> str:
  """Calls as a model writes them, a line break between two; `parse` gives them back."""
  return "\n".join(_WRITERS[tool_format](call) for call in calls)


_TOOL_CALL = re.compile(r"<tool_call>(?P<body>.*?)</tool_call>|<tool_call>|</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\s]+)>(?P<body>.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^<>\s]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)
_PLAIN = re.compile(r"<(?P<name>[A-Za-z_]\w*)>(?P<body>.*?)</(?P=name)>|</?(?P<stray>[A-Za-z_]\w*)>", re.DOTALL)


def _unpaired(tag: str) -> str:
  if tag == "<tool_call>":
    return "a tool call begins with <tool_call> but </tool_call> is missing"
  return "</tool_call> was written without <tool_call> before it"


def _parse_hermes(body: str) -> ToolCall | Malformed:
  try:
    value = json.loads(body, object_pairs_hook=_object)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # NaN and lone surrogates are not JSON values
  except RecursionError:
    return Malformed("the tool call is nested too deeply")
  except ValueError as error:
    return Malformed(f"the tool call is not valid JSON: {error}")
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    return Malformed('a tool call must be a JSON object with a string "name" and an object "arguments"')
  arguments = value.get("arguments", {})
  if not isinstance(arguments, dict):
    return Malformed(f'"arguments" of {value["name"]} must be a JSON object, got {type(arguments).__name__}')
  if extra := sorted(set(value) - {"name", "arguments", "id"}):
    return Malformed(f'a tool call has only "name" and "arguments", got also {", ".join(extra)}')
  return ToolCall(value["name"], arguments)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    raise ValueError("a key is given twice")
  return value


def _parse_qwen_xml(body: str) -> ToolCall | Malformed:
  function = _FUNCTION.fullmatch(body)
  if function is None:
    return Malformed("a tool call must be <function=name>, parameters, </function>")
  arguments, rest = {}, function["body"]
  while parameter := _PARAMETER.match(rest):
    if parameter["name"] in arguments:
      return Malformed(f"parameter {parameter['name']} of {function['name']} is given twice")
    arguments[parameter["name"]] = parameter["value"]
    rest = rest[parameter.end() :]
  if rest.strip():
    return Malformed(f"in {function['name']}, expected <parameter=name>value</parameter>, got {rest.strip()[:40]!r}")
  return ToolCall(function["name"], arguments)


def _parse_plain(text: str) -> list[ToolCall | Malformed]:
  return [
    ToolCall(m["name"], {"input": m["body"]})
    if m["name"]
    else Malformed(f"{m[0]} has no partner; write <{m['stray']}>input</{m['stray']}>")
    for m in _PLAIN.finditer(text)
  ]


def _call(call: ToolCall | dict[str, Any]) -> ToolCall:
  if isinstance(call, ToolCall):
    return call
  call = call.get("function", call)
  arguments = call["arguments"]
  return ToolCall(call["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)


def _write_hermes(call: ToolCall) -> str:
  return f"<tool_call>\n{_tojson({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def _write_qwen_xml(call: ToolCall) -> str:
  parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call.arguments.items())
  return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _write_plain(call: ToolCall) -> str:
  if set(call.arguments) != {"input"}:
    raise ValueError(f"the plain format has one argument, input; {call.name} has {', '.join(call.arguments) or 'none'}")
  return f"<{call.name}>{call.arguments['input']}</{call.name}>"


_WRITERS = {"hermes": _write_hermes, "qwen_xml": _write_qwen_xml, "plain": _write_plain}
