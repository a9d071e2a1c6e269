"""From a model to a process that listens."""

import contextlib
import socket
from pathlib import Path

import uvicorn

from jaxagent.serve.app import Served, application, is_loopback

GRACE = 5  # seconds that answers in progress have when the server is told to stop
BACKLOG = 2048


def checked_key(host: str, key: str | None) -> str | None:
  """The API key; ValueError where `host` lets other machines in and there is none."""
  if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
    raise ValueError("the API key must be printable ASCII characters, and not empty")
  if key is None and not is_loopback(host):
    raise ValueError(
      f"--host {host} lets other machines in, which needs an API key: --api-key, or the environment's JAXAGENT_API_KEY"
    )
  return key


def bind(host: str, port: int) -> socket.socket:
  """A socket at the address, not yet listening. Errors: OSError if it is taken, ValueError for a bad port."""
  if not 0 <= port < 2**16:
    raise ValueError(f"--port must be in 0..65535 (0: any that is free), got {port}")
  with contextlib.ExitStack() as stack:
    try:
      family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      bound = stack.enter_context(socket.socket(family, kind, protocol))
      bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      bound.bind(address)
    except OSError as error:
      raise OSError(f"cannot listen at {host} port {port}: {error.strerror}") from error
    stack.pop_all()
  return bound


def model_name(source: str) -> str:
  """The name of a folder or file; a Hugging Face name stays as it is."""
  path = Path(source)
  return path.resolve().name.removesuffix(".gguf") if path.exists() else source


def url(bound: socket.socket) -> str:
  host, port = bound.getsockname()[:2]
  return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def run(served: Served, bound: socket.socket, *, api_key: str | None = None) -> None:
  """Serves until SIGINT or SIGTERM; then answers in progress have a few seconds to end."""
  app = application(served, api_key=api_key)
  config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE)
  try:
    uvicorn.Server(config).run(sockets=[bound])
  except KeyboardInterrupt:  # raised again by uvicorn once it has stopped
    pass
