"""Any endpoint that speaks OpenAI's chat completions, `jaxagent serve` among them."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.checks import check_options
from jaxagent.judges.base import JudgeError, Question, Reply, digest

RETRIED = (408, 409, 425, 429)  # and every 5xx
LONGEST_WAIT = 60.0  # seconds before a retry


@dataclasses.dataclass
class Endpoint:
  """`POST base_url/chat/completions` with `model`, `messages`, `temperature`, `max_tokens` and what `body` adds.

  `body` may replace those (None takes a key out). A request that times out after `timeout` seconds, does not connect,
  or is answered 408, 409, 425, 429 or 5xx is sent again up to `retries` times, after
  `backoff * 2^attempt * u` seconds, u uniform in [1/2, 1] by `seed` and the request, or what Retry-After says, at most
  60. Vote v of several sends `"seed": seed + v`. `api_key` is sent and kept nowhere else.
  ValueError: without httpx (`pip install 'jaxagent[judge]'`), a `base_url` that is none or has a key in it, a `timeout`
  that is not above 0, `retries` below 0.
  """

  base_url: str
  model: str
  api_key: str | None = dataclasses.field(default=None, repr=False)
  temperature: float = 0.1
  max_tokens: int = 2048
  timeout: float = 120.0
  retries: int = 4
  backoff: float = 1.0
  seed: int = 0
  votes: int = 1
  body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  sleep: Callable[[float], Any] = dataclasses.field(default=asyncio.sleep, repr=False)

  def __post_init__(self):
    check_options(
      "the judge's ",
      (self.timeout > 0, "timeout", self.timeout, "above 0 seconds"),
      (self.retries >= 0, "retries", self.retries, "at least 0"),
    )
    self._http = _httpx()
    try:
      url = self._http.URL(self.base_url)
    except (self._http.InvalidURL, TypeError) as error:
      raise ValueError(f"the judge's base_url {self.base_url!r} is no URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
      raise ValueError(f"the judge's base_url must begin with http:// or https://, got {self.base_url!r}")
    if url.userinfo or url.query:
      raise ValueError("the judge's base_url must hold no key; name the environment variable that does")
    self._client: Any = None

  async def __aenter__(self) -> "Endpoint":
    self._client = self._http.AsyncClient(timeout=self.timeout)
    return self

  async def __aexit__(self, *error) -> None:
    client, self._client = self._client, None
    await client.aclose()

  def request(self, question: Question, vote: int) -> dict[str, Any]:
    return {"url": self._url, "vote": vote, "body": self._body(question, vote)}

  async def reply(self, question: Question, vote: int) -> Reply:
    request = self.request(question, vote)
    name, attempt = digest(request), 0
    own = self._http.AsyncClient(timeout=self.timeout) if self._client is None else None
    async with own or contextlib.nullcontext():
      while True:
        try:
          return await self._sent(own or self._client, request["body"])
        except _Again as again:
          if attempt == self.retries:
            raise JudgeError(f"{again} ({attempt + 1} attempts)") from None
          await self.sleep(self._wait(name, attempt, again.after))
          attempt += 1

  @property
  def _url(self) -> str:
    return f"{self.base_url.rstrip('/')}/chat/completions"

  def _body(self, question: Question, vote: int) -> dict[str, Any]:
    made = {
      "model": self.model, "messages": list(question.messages), "temperature": self.temperature,
      "max_tokens": self.max_tokens, **({"seed": self.seed + vote} if self.votes > 1 else {}), **self.body,
    }  # fmt: skip
    return {key: value for key, value in made.items() if value is not None}

  def _wait(self, name: str, attempt: int, after: float) -> float:
    u = random.Random(f"{self.seed} {name} {attempt}").uniform(0.5, 1.0)
    return min(max(self.backoff * 2**attempt * u, after), LONGEST_WAIT)

  async def _sent(self, client: Any, body: Mapping[str, Any]) -> Reply:
    headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
    try:
      async with asyncio.timeout(self.timeout):  # httpx bounds each wait, not their sum
        answer = await client.post(self._url, json=body, headers=headers)
    except (TimeoutError, self._http.TimeoutException):
      raise _Again(f"no answer within {self.timeout:g} s") from None
    except self._http.TransportError as error:
      raise _Again(f"{type(error).__name__}: {error}") from None
    if answer.status_code in RETRIED or answer.status_code >= 500:
      raise _Again(self._said(answer), after=_seconds(answer.headers.get("Retry-After")))
    if answer.status_code != 200:
      raise JudgeError(self._said(answer))
    return _read(answer)

  def _said(self, answer: Any) -> str:
    words = " ".join(answer.text[:200].split())
    words = words if self.api_key is None else words.replace(self.api_key, "***")
    return f"{answer.status_code} {answer.reason_phrase}: {words}"


class _Again(Exception):
  """A failure that may pass; `after`: seconds that the server asks for."""

  def __init__(self, words: str, after: float = 0.0):
    super().__init__(words)
    self.after = after


def _read(answer: Any) -> Reply:
  try:
    value = answer.json()
    text = value["choices"][0]["message"]["content"]
    finish = value["choices"][0].get("finish_reason")
  except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
    raise JudgeError(f"the answer is no chat completion: {type(error).__name__}: {error}") from None
  if not isinstance(text, str):
    raise JudgeError(f"the answer has no text (finish_reason {finish!r})")
  usage = value.get("usage")
  tokens = usage.get("total_tokens", 0) if isinstance(usage, dict) else 0
  return Reply(text, tokens if type(tokens) is int else 0)


def _seconds(header: str | None) -> float:
  """Retry-After in seconds; a date is as good as none."""
  try:
    return max(float(header or 0), 0.0)
  except ValueError:
    return 0.0


def _httpx() -> Any:
  try:
    import httpx
  except ModuleNotFoundError:
    raise ValueError("a judge behind an endpoint needs an extra: pip install 'jaxagent[judge]'") from None
  return httpx
