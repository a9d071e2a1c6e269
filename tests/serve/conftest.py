"""Endpoints on a random port of the loopback: over a tiny random decoder, and over an engine that is told its words."""

import contextlib

import httpx
import jax
import pytest
from running import Live, Teller

from jaxagent.models.chat import Chat
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.sampling import Engine
from jaxagent.serve.app import Served

CAPACITY, MAX_PENDING = 128, 64


@pytest.fixture(scope="session")
def model():
  policy = decoder_policy(DecoderConfig(vocab_size=259, width=32, layers=1, heads=2, mlp_width=32, init_scale=0.5))
  return policy, jax.jit(policy.init)(jax.random.key(0))


@pytest.fixture(scope="session")
def make_engine(model):
  def make(**named):
    sizes = {"slots": 8, "capacity": CAPACITY, "max_pending": MAX_PENDING, "lockstep": False, **named}
    return Engine(*model, tokenizer=byte_tokenizer(), **sizes)

  return make


@pytest.fixture(scope="session")
def live(make_engine):
  with Live(Served(make_engine(), Chat(byte_tokenizer()), "tiny")) as running:
    yield running


@pytest.fixture(scope="session")
def http():
  with httpx.Client(timeout=60) as made:
    yield made


@pytest.fixture
def client(live):
  with live.client() as made:
    yield made


@pytest.fixture
def tell():
  """tell(texts, tool_format) -> a running server."""
  with contextlib.ExitStack() as stack:

    def start(*texts, tool_format="hermes", **named):
      engine = Teller(texts, **named)
      return stack.enter_context(Live(Served(engine, Chat(engine.tokenizer, tool_format=tool_format), "told")))

    yield start
