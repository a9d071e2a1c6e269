"""The ASGI application: routes, who may call, and answers that end when the client leaves."""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxagent.models.chat import Chat
from jaxagent.sampling.engine import Engine
from jaxagent.serve import turns
from jaxagent.serve.answers import ChatForm, Form, TextForm, chunks, envelope, whole
from jaxagent.serve.reading import Rules
from jaxagent.serve.schemas import COMPLETION_TOKENS, ApiError, ChatRequest, CompletionRequest, Parameters, read

MAX_BODY = 8 * 2**20
CLIENT_LEFT = 499  # never read by anyone

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Served:
  """The model behind the endpoint. The engine is not in lockstep, and has the chat's tokenizer."""

  engine: Engine
  chat: Chat
  name: str
  created: int = dataclasses.field(default_factory=lambda: int(time.time()))

  @property
  def stop_ids(self) -> tuple[int, ...]:
    ends = (self.chat.eot, self.chat.tokenizer.eos_id)
    return tuple(dict.fromkeys(i for i in ends if i is not None))

  def described(self) -> dict[str, Any]:
    return {
      "id": self.name, "object": "model", "created": self.created, "owned_by": "jaxagent",
      "max_model_len": self.engine.capacity,
    }  # fmt: skip


def application(served: Served, *, api_key: str | None = None) -> Starlette:
  """Serves /v1/chat/completions, /v1/completions, /v1/models and /health.

  With `api_key` every request below /v1 needs `Authorization: Bearer <key>`. Without it a request must name this
  machine as its host, so that a web page cannot reach the server under a name of its own.
  """

  async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})

  async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [served.described()]})

  async def model(request: Request) -> Response:
    check_name(served, request.path_params["name"])
    return JSONResponse(served.described())

  v1 = [
    Route("/chat/completions", _endpoint(served, ChatForm, ChatRequest, chat_job), methods=["POST"]),
    Route("/completions", _endpoint(served, TextForm, CompletionRequest, text_job), methods=["POST"]),
    Route("/models", models),
    Route("/models/{name:path}", model),
  ]
  return Starlette(
    routes=[Route("/health", health), Mount("/v1", routes=v1, middleware=[Middleware(Gate, key=api_key)])],
    exception_handlers={ApiError: _failed, HTTPException: _refused, ClientDisconnect: _left, Exception: _broke},
  )


async def _failed(request: Request, error: ApiError) -> Response:
  return JSONResponse(error.body, error.status, error.headers)


async def _refused(request: Request, error: HTTPException) -> Response:
  code = "not_found" if error.status_code == 404 else "invalid_request"
  return await _failed(request, ApiError(error.detail, code=code, status=error.status_code, headers=error.headers))


async def _left(request: Request, error: ClientDisconnect) -> Response:
  return Response(status_code=CLIENT_LEFT)


async def _broke(request: Request, error: Exception) -> Response:
  return await _failed(request, internal_error())


class Gate:
  """Lets a request pass that has the key or, where there is none, that names this machine as its host."""

  def __init__(self, app: ASGIApp, key: str | None):
    self._app, self._key = app, None if key is None else key.encode()

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    if self._key is not None:
      scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
      if not (hmac.compare_digest(given.strip(), self._key) and scheme.lower() == b"bearer"):
        raise ApiError(
          "the API key is missing or wrong; send the header Authorization: Bearer <key>", code="invalid_api_key",
          status=401, type="authentication_error", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    elif not is_loopback(host_name(headers.get(b"host", b"").decode("latin-1"))):
      raise ApiError("without an API key this server answers requests for localhost only", code="host", status=403)
    await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def host_name(header: str) -> str:
  try:
    return urllib.parse.urlsplit(f"//{header}").hostname or ""
  except ValueError:
    return ""


def internal_error() -> ApiError:
  message = "the server failed on this request; its log says how"
  return ApiError(message, code="internal_error", type="server_error", status=500)


def check_name(served: Served, name: str) -> None:
  if name != served.name:
    message = f"there is no model {name!r}; this server has {served.name!r}"
    raise ApiError(message, param="model", code="model_not_found", status=404)


# a request


def chat_job(served: Served, request: ChatRequest) -> turns.Job:
  tools = request.offered
  if request.prompt_token_ids is not None:
    prompt, source = request.prompt_token_ids, "prompt_token_ids"
  else:
    prompt, source = _rendered(served.chat, request, tools), "messages"
  job = _job(served, request, [prompt], max_tokens=served.engine.capacity)
  rules = dataclasses.replace(job.rules, tools=tuple(tool["function"]["name"] for tool in tools))
  return dataclasses.replace(job, rules=rules, source=source, logprobs=bool(request.logprobs))


def _rendered(chat: Chat, request: ChatRequest, tools: list[dict[str, Any]]) -> list[int]:
  messages = [message.as_template_input() for message in request.messages or ()]
  try:
    return chat.render(messages, tools)
  except ValueError as error:
    raise ApiError(str(error), param="tools" if "ignores tools" in str(error) else "messages") from error


def text_job(served: Served, request: CompletionRequest) -> turns.Job:
  prompts = [served.chat.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompt]
  job = _job(served, request, prompts, max_tokens=COMPLETION_TOKENS)
  return dataclasses.replace(job, source="prompt", logprobs=request.logprobs is not None)


def _job(served: Served, request: Parameters, prompts: list[list[int]], *, max_tokens: int) -> turns.Job:
  vocab_size = served.engine.policy.vocab_size
  return turns.Job(
    prompts=prompts,
    n=request.n or 1,
    seed=request.seed,
    sampling=request.sampling(max_tokens=max_tokens, stop_ids=served.stop_ids, vocab_size=vocab_size),
    rules=Rules(served.chat, served.stop_ids, tuple(request.stop or ())),
    token_ids=bool(request.return_token_ids),
    stream=bool(request.stream),
    usage=request.usage_in_stream,
  )


def _endpoint(served: Served, form: Form, kind: type[Parameters], make_job: Callable[[Served, Any], turns.Job]):
  async def endpoint(request: Request) -> Any:
    asked = read(kind, await _body(request))
    check_name(served, asked.model)
    job = await asyncio.to_thread(make_job, served, asked)  # long texts are encoded beside the others' turns
    common = envelope(form, stream=job.stream, model=served.name, version=served.engine.version)
    if job.stream:
      return Stream(chunks(form, common, job, turns.deltas(served.engine, job)))
    completions = await while_connected(request.receive, turns.completions(served.engine, job))
    return await asyncio.to_thread(lambda: JSONResponse(whole(form, common, job, completions)))

  return endpoint


async def _body(request: Request) -> bytes:
  parts, size = [], 0
  async for part in request.stream():
    size += len(part)
    if size > MAX_BODY:
      raise ApiError(f"the body is larger than {MAX_BODY} bytes", code="request_too_large", status=413)
    parts.append(part)
  return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
  """What `work` returns; it is cancelled, and ClientDisconnect raised, if the client leaves first."""
  working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
  try:
    await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
      raise ClientDisconnect
    return working.result()
  except asyncio.CancelledError:  # only a server that stops cancels a request
    raise ApiError("the server is stopping", code="stopping", type="server_error", status=503) from None
  finally:
    working.cancel()
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


class Stream(Response):
  """Server-sent events of the chunks, then [DONE]. What fails before the first chunk still has its status."""

  def __init__(self, chunks: AsyncGenerator[dict[str, Any], None]):
    super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    del self.headers["content-length"]
    self._chunks, self._begun = chunks, False

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await while_connected(receive, self._run(send))
    except ClientDisconnect:
      pass
    except Exception as error:
      if not self._begun:
        raise
      known = isinstance(error, ApiError)
      await _send_part(send, _event((error if known else internal_error()).body), last=True)
      if not known:
        raise

  async def _run(self, send: Send) -> None:
    async with contextlib.aclosing(self._chunks) as chunks:
      async for chunk in chunks:
        if not self._begun:
          await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
          self._begun = True
        await _send_part(send, _event(chunk))
    await _send_part(send, b"data: [DONE]\n\n", last=True)


async def _send_part(send: Send, part: bytes, *, last: bool = False) -> None:
  await send({"type": "http.response.body", "body": part, "more_body": not last})


def _event(value: dict[str, Any]) -> bytes:
  """In ASCII, since clients disagree about which characters of Unicode end a line."""
  return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"
