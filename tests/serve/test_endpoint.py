"""The endpoint over a real engine, driven by the real client of OpenAI."""

import asyncio
import time

import httpx
import numpy as np
import openai
import pytest
from running import Live

from jaxagent.models.chat import Chat
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.sampling import Sampling
from jaxagent.serve.app import Served

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say Ω."}]
ASK = {"model": "tiny", "messages": TALK}


def chat(client, **named):
  return client.chat.completions.create(**{**ASK, **named})


def ids_of(answer):
  return [choice.token_ids for choice in answer.choices]


def test_greedy_text_and_log_probs_are_those_of_the_engine(client, live, make_engine):
  prompt = live.chat.render(TALK)
  rules = Sampling(temperature=0, max_tokens=12, stop_ids=(live.chat.eot,))
  want = make_engine().generate([prompt], sampling=rules)[0][0]
  answer = chat(client, temperature=0, max_tokens=12, logprobs=True, extra_body={"return_token_ids": True})
  assert answer.prompt_token_ids == prompt and answer.choices[0].token_ids == want.ids.tolist()
  said = answer.choices[0].logprobs.content
  np.testing.assert_allclose([token.logprob for token in said], want.logp_rollout, atol=1e-5)
  assert [token.token for token in said] == [live.chat.tokenizer.decode([i]) for i in want.ids]
  assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
  used = (len(prompt), len(want.ids), len(prompt) + len(want.ids))
  assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == used
  text = live.chat.tokenizer.decode(want.ids[:-1] if want.finish == "stop" else want.ids)
  assert answer.choices[0].message.content == text
  assert answer.choices[0].finish_reason == {"stop": "stop"}.get(want.finish, "length")


def test_seeds(client):
  given = {"max_tokens": 10, "n": 3, "extra_body": {"return_token_ids": True}}
  one, again, other = (ids_of(chat(client, seed=seed, **given)) for seed in (7, 7, 7 + 2**32))
  assert one == again != other
  assert len({tuple(ids) for ids in one}) == 3
  assert ids_of(chat(client, **given)) != ids_of(chat(client, **given))
  assert ids_of(chat(client, seed=-1, **given)) == ids_of(chat(client, seed=-1, **given))
  alone = ids_of(chat(client, seed=7, max_tokens=10, extra_body={"return_token_ids": True}))
  assert alone == one[:1]


def test_a_stream_is_the_same_answer_in_parts(client):
  given = {
    "seed": 3, "n": 2, "max_tokens": 24, "logprobs": True, "extra_body": {"return_token_ids": True}, "stop": ["e", "~"]
  }  # fmt: skip
  whole = chat(client, **given)
  chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **given))
  assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
    (chunks[0].id, "chat.completion.chunk", "tiny")
  }
  assert chunks[-1].usage == whole.usage and not chunks[-1].choices
  assert all(chunk.usage is None for chunk in chunks[:-1])
  assert chunks[0].prompt_token_ids == whole.prompt_token_ids
  for choice in whole.choices:
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert [i for part in parts[:-1] for i in part.token_ids] == choice.token_ids
    logprobs = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert logprobs == choice.logprobs.content
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
  assert not any("usage" in c.model_dump(exclude_unset=True) for c in chat(client, stream=True, max_tokens=2))


def test_a_rendered_prompt_is_the_same_prompt(client, live):
  given = {"seed": 5, "max_tokens": 8}
  rendered = {"prompt_token_ids": live.chat.render(TALK), "return_token_ids": True}
  by_ids = client.chat.completions.create(model="tiny", messages=[], extra_body=rendered, **given)
  by_text = chat(client, extra_body={"return_token_ids": True}, **given)
  assert ids_of(by_ids) == ids_of(by_text) and by_ids.prompt_token_ids == by_text.prompt_token_ids
  as_parts = [{**TALK[0], "role": "developer"}, {"role": "user", "content": [{"type": "text", "text": "Say Ω."}]}]
  assert ids_of(chat(client, messages=as_parts, extra_body={"return_token_ids": True}, **given)) == ids_of(by_text)


def test_completions_of_texts_and_of_ids(client):
  def complete(prompt, **named):
    body = {"return_token_ids": True}
    return client.completions.create(model="tiny", prompt=prompt, seed=1, max_tokens=6, extra_body=body, **named)

  ids = byte_tokenizer().encode("Say Ω.")
  text = complete("Say Ω.", logprobs=0)
  assert text.object == "text_completion" and text.choices[0].prompt_token_ids == ids
  assert text.choices[0].logprobs.tokens == [byte_tokenizer().decode([i]) for i in text.choices[0].token_ids]
  assert len(text.choices[0].logprobs.token_logprobs) == len(text.choices[0].token_ids)
  assert ids_of(complete(ids)) == ids_of(text)
  several = complete(["a", "Say Ω."], n=2)
  assert [c.index for c in several.choices] == [0, 1, 2, 3]
  assert [c.prompt_token_ids for c in several.choices] == [[97], [97], ids, ids]
  assert several.choices[2].token_ids == text.choices[0].token_ids
  assert ids_of(complete([[97], ids], n=2)) == ids_of(several)
  assert several.usage.prompt_tokens == 1 + len(ids)
  parts = list(complete(["a", "Say Ω."], n=2, stream=True))
  for choice in several.choices:
    mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
    assert "".join(part.text for part in mine) == choice.text and mine[-1].finish_reason == choice.finish_reason
    assert mine[0].prompt_token_ids == choice.prompt_token_ids
  assert client.completions.create(model="tiny", prompt="a", seed=1).usage.completion_tokens <= 16


def test_sampling_rules_reach_the_engine(client):
  given = {"max_tokens": 10, "seed": 1}
  body = {"return_token_ids": True}
  greedy = ids_of(chat(client, temperature=0, extra_body=body, **given))
  assert ids_of(chat(client, extra_body={**body, "top_k": 1}, **given)) == greedy
  assert ids_of(chat(client, top_p=1e-6, extra_body=body, **given)) == greedy
  assert ids_of(chat(client, extra_body={**body, "min_p": 0.999}, **given)) == greedy
  assert ids_of(chat(client, extra_body=body, **given)) != greedy
  assert chat(client, max_completion_tokens=3, extra_body=body).usage.completion_tokens <= 3


def test_logit_bias(client):
  given = {"max_tokens": 4, "temperature": 0, "extra_body": {"return_token_ids": True}}
  first = ids_of(chat(client, **given))[0][0]
  assert ids_of(chat(client, logit_bias={"65": 100}, **given)) == [[65] * 4]
  assert first not in ids_of(chat(client, logit_bias={str(first): -100}, **given))[0]


def test_an_answer_ends_where_the_capacity_ends(client, live):
  answer = chat(client, seed=1, logit_bias={str(live.chat.eot): -100})
  assert answer.usage.total_tokens == live.engine.capacity and answer.choices[0].finish_reason == "length"


def test_models_and_health(client, live, http):
  (model,) = client.models.list()
  assert model.id == "tiny" and client.models.retrieve("tiny").max_model_len == live.engine.capacity
  with pytest.raises(openai.NotFoundError, match="no model 'other'"):
    client.models.retrieve("other")
  assert http.get(live.url.replace("/v1", "/health")).json() == {"status": "ok"}
  assert http.get(live.url + "/nothing").json()["error"]["code"] == "not_found"
  assert http.get(live.url + "/completions").status_code == 405


def test_many_at_once_and_bad_ones_among_them(live, client):
  """Every answer is what it is alone, whatever else is in flight."""
  alone = [ids_of(chat(client, seed=s, max_tokens=9, extra_body={"return_token_ids": True})) for s in range(4)]

  async def all_at_once():
    async with live.client(openai.AsyncOpenAI) as many:

      async def one(number):
        body = {"return_token_ids": True}
        if number % 8 == 7:
          body["top_k"] = -5
        asked = many.chat.completions.create(**ASK, seed=number % 4, max_tokens=9, extra_body=body)
        return ids_of(await asked)

      return await asyncio.gather(*map(one, range(32)), return_exceptions=True)

  for number, answer in enumerate(asyncio.run(all_at_once())):
    if number % 8 == 7:
      assert isinstance(answer, openai.BadRequestError) and answer.param == "top_k"
    else:
      assert answer == alone[number % 4]
  assert all(session.closed for session in live.sessions)


def test_busy(live, client):
  with pytest.raises(openai.RateLimitError, match="busy") as error:
    chat(client, n=100, max_tokens=2)
  assert error.value.response.headers["retry-after"] == "1" and error.value.code == "rate_limit_exceeded"
  with pytest.raises(openai.RateLimitError, match="busy"):
    chat(client, n=100, max_tokens=2, stream=True)
  assert all(session.closed for session in live.sessions)
  assert len(chat(client, n=64, max_tokens=2).choices) == 64


@pytest.fixture(scope="module")
def narrow(make_engine):
  """One row, one request at a time, and room for very long answers."""
  engine = make_engine(slots=1, capacity=20_000, max_pending=1)
  with Live(Served(engine, Chat(byte_tokenizer()), "tiny")) as live, live.client() as client:
    chat(client, max_tokens=20)  # compiles
    yield live, client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_row(narrow, http, stream):
  """The next request is served only when the first, of thousands of tokens, is gone."""
  live, client = narrow
  body = {**ASK, "stream": stream, "logit_bias": {str(live.chat.eot): -100}}
  if stream:
    with http.stream("POST", live.url + "/chat/completions", json=body) as response:
      assert next(response.iter_lines()).startswith("data: ")
  else:
    with pytest.raises(httpx.ReadTimeout):
      http.post(live.url + "/chat/completions", json=body, timeout=0.5)
  until = time.monotonic() + 60
  while True:
    try:
      assert chat(client, max_tokens=2).usage.completion_tokens <= 2
      break
    except openai.RateLimitError:
      assert time.monotonic() < until
      time.sleep(0.05)
  assert all(session.closed for session in live.sessions)
  assert max(len(session.tokens) for session in live.sessions) < live.engine.capacity
