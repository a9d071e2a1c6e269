"""What a request may say: OpenAI's parameters that are served, those of which only the default is, and some of our own.

Anything else is a 400 that names the parameter. Accepted without an effect, since they are labels or hints that no
answer depends on: user, metadata, store, safety_identifier, prompt_cache_key, prompt_cache_retention, service_tier.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
  AfterValidator,
  BaseModel,
  BeforeValidator,
  ConfigDict,
  Field,
  ValidationError,
  ValidationInfo,
  model_validator,
)

from jaxagent.sampling.request import Sampling

CHOICES = 128  # that one request may ask for
STOPS = 16  # strings; each is looked for on the host, between the device's calls
TOOLS = 128
COMPLETION_TOKENS = 16  # of /v1/completions where max_tokens is not given: OpenAI's default


class ApiError(Exception):
  """An answer that is an error, in OpenAI's form."""

  def __init__(
    self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400,
    type: str = "invalid_request_error", headers: dict[str, str] | None = None,
  ):  # fmt: skip
    super().__init__(message)
    self.status, self.headers = status, headers
    self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


def only(*values: Any) -> Any:
  """The type of a parameter that is not offered: null, or a value that asks for nothing."""

  def check(value: Any, info: ValidationInfo):
    if value is not None and value not in values:
      allowed = ", or set it to " + " or ".join(map(json.dumps, values)) if values else ""
      message = f"{info.field_name} is not offered by this server; leave it out{allowed}"
      raise ApiError(message, param=info.field_name, code="unsupported_parameter")
    return value

  return Annotated[Any, AfterValidator(check)]


def _listed(value: Any) -> Any:
  return [value] if isinstance(value, str) else value


def _content(value: Any) -> Any:
  return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
  """A prompt, or a list of them, each a string or a list of token ids, as a list."""
  listed = value if isinstance(value, list) and value and not _is_ids(value) else [value]
  if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in listed):
    raise ValueError("it must be a string, a list of token ids, or a list of such prompts")
  return listed


def _is_ids(value: Any) -> bool:
  return isinstance(value, list) and all(type(i) is int for i in value)


def _keyed_by_id(value: dict[str, float]) -> dict[int, float]:
  if bad := [key for key in value if not (key.isascii() and key.isdecimal())]:
    raise ValueError(f"its keys must be token ids, got {bad[0]!r}")
  return {int(key): bias for key, bias in value.items()}


Nothing = only()
Label = Any
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
  model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Part(Strict):
  type: Literal["text"]
  text: str


class Function(Strict):
  name: str
  arguments: str


class Call(Strict):
  id: str | None = None
  type: Literal["function"] = "function"
  function: Function


class Message(Strict):
  """Roles as in OpenAI's API; "developer" is a system message. What an answer held can be sent back as it stands."""

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Annotated[list[Part], BeforeValidator(_content)] | None = None
  name: str | None = None
  tool_calls: list[Call] | None = None
  tool_call_id: str | None = None
  refusal: Nothing = None
  audio: Nothing = None
  function_call: Nothing = None
  annotations: only([]) = None

  @model_validator(mode="after")
  def _belongs(self):
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
      if getattr(self, field) and self.role != role:
        raise ValueError(f"{field} is for the role {role!r}, got {self.role!r}")
    if self.content is None and not self.tool_calls:
      raise ValueError("content is missing")
    return self

  def as_template_input(self) -> dict[str, Any]:
    """The message as chat templates take it: its content one string, arguments of calls a mapping."""
    role = "system" if self.role == "developer" else self.role
    message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content or ())}
    for field in ("name", "tool_call_id"):
      if getattr(self, field) is not None:
        message[field] = getattr(self, field)
    if self.tool_calls:
      message["tool_calls"] = [
        {**call.model_dump(exclude_none=True), "function": {"name": call.function.name, "arguments": _arguments(call)}}
        for call in self.tool_calls
      ]
    return message


def _arguments(call: Call) -> dict[str, Any]:
  try:
    value = json.loads(call.function.arguments or "{}")
  except (ValueError, RecursionError):
    value = None
  if not isinstance(value, dict):
    raise ApiError(
      f"the arguments of the call of {call.function.name} must be a JSON object as a string, got"
      f" {call.function.arguments[:60]!r}",
      param="messages",
    )
  return value


class ToolFunction(Strict):
  name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
  description: str | None = None
  parameters: dict[str, Any] | None = None
  strict: only(False) = None


class Tool(Strict):
  type: Literal["function"]
  function: ToolFunction


class StreamOptions(Strict):
  include_usage: bool | None = None
  include_obfuscation: only(False) = None


class Parameters(Strict):
  """What both endpoints take. `top_k`, `min_p` and `return_token_ids` are our own."""

  model: str
  n: Annotated[int, Field(ge=1, le=CHOICES)] | None = None
  seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
  temperature: Annotated[float, Field(ge=0, le=100)] | None = None
  top_p: Annotated[float, Field(gt=0, le=1)] | None = None
  top_k: Annotated[int, Field(ge=0)] | None = None
  min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
  max_tokens: Annotated[int, Field(ge=1)] | None = None
  stop: Annotated[list[StopString], Field(max_length=STOPS), BeforeValidator(_listed)] | None = None
  logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_keyed_by_id)] | None = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None
  return_token_ids: bool | None = None
  frequency_penalty: only(0) = None
  presence_penalty: only(0) = None
  user: Label = None
  metadata: Label = None
  store: Label = None
  safety_identifier: Label = None
  prompt_cache_key: Label = None
  prompt_cache_retention: Label = None
  service_tier: Label = None

  @model_validator(mode="after")
  def _options_of_a_stream(self):
    if self.stream_options is not None and not self.stream:
      raise ApiError("stream_options needs stream=true", param="stream_options")
    return self

  @property
  def usage_in_stream(self) -> bool:
    return bool(self.stream_options and self.stream_options.include_usage)

  def sampling(self, *, max_tokens: int, stop_ids: tuple[int, ...], vocab_size: int) -> Sampling:
    """The engine's request. `max_tokens` is for a request that does not say."""
    bias = tuple((self.logit_bias or {}).items())
    if strangers := [i for i, _ in bias if i >= vocab_size]:
      raise ApiError(f"id {strangers[0]} is outside the model's vocabulary [0, {vocab_size})", param="logit_bias")
    return Sampling(
      temperature=1.0 if self.temperature is None else self.temperature,
      top_k=self.top_k or 0,
      top_p=1.0 if self.top_p is None else self.top_p,
      min_p=self.min_p or 0.0,
      max_tokens=self.limit or max_tokens,
      stop_ids=stop_ids,
      stop=tuple(self.stop or ()),
      logit_bias=bias,
    )

  @property
  def limit(self) -> int | None:
    return self.max_tokens


class ChatRequest(Parameters):
  """POST /v1/chat/completions. `prompt_token_ids`, our own, is a prompt that is rendered already, without messages;
  `tools` then only say which calls are looked for in the answer."""

  messages: list[Message] | None = None
  prompt_token_ids: list[int] | None = None
  tools: Annotated[list[Tool], Field(max_length=TOOLS)] | None = None
  tool_choice: only("auto", "none") = None
  parallel_tool_calls: only(True) = None
  max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
  logprobs: bool | None = None
  top_logprobs: only(0) = None
  response_format: only({"type": "text"}) = None
  modalities: only(["text"]) = None
  reasoning_effort: Nothing = None
  verbosity: Nothing = None
  audio: Nothing = None
  prediction: Nothing = None
  web_search_options: Nothing = None
  functions: Nothing = None
  function_call: Nothing = None

  @model_validator(mode="after")
  def _one_prompt_and_one_limit(self):
    if bool(self.messages) == (self.prompt_token_ids is not None):
      raise ApiError("give messages or prompt_token_ids, and one of them only", param="messages")
    if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
      raise ApiError("max_tokens and max_completion_tokens are two names of one limit, and differ", param="max_tokens")
    return self

  @property
  def limit(self) -> int | None:
    return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

  @property
  def offered(self) -> list[dict[str, Any]]:
    """The tools, as templates take them, unless none may be called."""
    return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class CompletionRequest(Parameters):
  """POST /v1/completions. A string is encoded as plain text: nothing is added, and no special token is read in it."""

  prompt: Annotated[list[Any], BeforeValidator(_prompts)]
  logprobs: Annotated[int, Field(ge=0)] | None = None
  best_of: only(1) = None
  echo: only(False) = None
  suffix: Nothing = None

  @model_validator(mode="after")
  def _choices(self):
    if self.logprobs:
      raise ApiError(
        "log-probs of other tokens than the chosen one are not offered; use logprobs=0", param="logprobs",
        code="unsupported_parameter",
      )  # fmt: skip
    if len(self.prompt) * (self.n or 1) > CHOICES:
      asked = f"{len(self.prompt)} prompts and n={self.n or 1}"
      raise ApiError(f"at most {CHOICES} choices can be asked for at once, got {asked}", param="n")
    return self


Request = TypeVar("Request", bound=Parameters)


def read(kind: type[Request], body: bytes) -> Request:
  """The request, or an ApiError that names the first parameter at fault."""
  try:
    return kind.model_validate_json(body)
  except ValidationError as error:
    raise _described(error.errors(include_url=False, include_context=False)[0]) from None


def _described(fault: dict[str, Any]) -> ApiError:
  param = ".".join(map(str, fault["loc"])) or None
  if fault["type"] == "json_invalid":
    return ApiError(f"the body is not JSON: {fault['msg']}", code="invalid_json")
  if fault["type"] == "extra_forbidden":
    return ApiError(f"unknown parameter: {param}", param=param, code="unknown_parameter")
  if fault["type"] == "missing":
    return ApiError(f"missing parameter: {param}", param=param, code="missing_required_parameter")
  said = fault["msg"].removeprefix("Value error, ")
  if param is None:
    return ApiError(said)
  return ApiError(f"{param}: {said}; got {str(fault['input'])[:80]!r}", param=param)
