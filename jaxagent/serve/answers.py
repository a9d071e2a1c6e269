"""What is sent back, in OpenAI's shapes.

Log-probs are `logp_rollout`, of the policy at the request's temperature (at 1 where that is 0), before `logit_bias` and
truncation; one for each token that was sampled. Those are the tokens that `return_token_ids` gives, the one that ended
the turn among them, though it is not in the text.
"""

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from jaxagent.envs.base import ToolCall
from jaxagent.models.tokenizer import Tokenizer
from jaxagent.serve.reading import Answer, read_completion
from jaxagent.serve.turns import Delta, Job
from jaxagent.types import Completion

LEAST = -9999.0  # log-prob that stands for -inf, which JSON has not


class ChatForm:
  prefix, object, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

  @staticmethod
  def of_request(job: Job) -> dict[str, Any]:
    return {"prompt_token_ids": job.prompts[0]} if job.token_ids else {}

  @staticmethod
  def of_choice(job: Job, choice: int) -> dict[str, Any]:
    return {}

  @staticmethod
  def whole(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.content, "refusal": None}
    return {"message": message | ({"tool_calls": _calls(answer.calls)} if answer.calls else {})}

  @staticmethod
  def part(text: str, calls: Sequence[ToolCall], *, first: bool) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if text or first:
      delta["content"] = text
    if calls:
      delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(calls))]
    return {"delta": delta}

  @staticmethod
  def logprobs(tokenizer: Tokenizer, ids: np.ndarray, logp: np.ndarray) -> dict[str, Any]:
    content = [
      {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
      for text, value in zip(_texts(tokenizer, ids), _values(logp))
    ]
    return {"content": content, "refusal": None}


class TextForm:
  prefix, object, chunk = "cmpl-", "text_completion", "text_completion"

  @staticmethod
  def of_request(job: Job) -> dict[str, Any]:
    return {}

  @staticmethod
  def of_choice(job: Job, choice: int) -> dict[str, Any]:
    return {"prompt_token_ids": job.prompts[choice // job.n]} if job.token_ids else {}

  @staticmethod
  def whole(answer: Answer) -> dict[str, Any]:
    return {"text": answer.content}

  @staticmethod
  def part(text: str, calls: Sequence[ToolCall], *, first: bool) -> dict[str, Any]:
    return {"text": text}

  @staticmethod
  def logprobs(tokenizer: Tokenizer, ids: np.ndarray, logp: np.ndarray) -> dict[str, Any]:
    return {"tokens": _texts(tokenizer, ids), "token_logprobs": _values(logp), "top_logprobs": None}


Form = type[ChatForm] | type[TextForm]


def envelope(form: Form, *, stream: bool, model: str, version: int) -> dict[str, Any]:
  """What the answer's chunks share. `system_fingerprint` names the version of the weights."""
  return {
    "id": form.prefix + uuid.uuid4().hex,
    "object": form.chunk if stream else form.object,
    "created": int(time.time()),
    "model": model,
    "system_fingerprint": f"weights-{version}",
  }


def whole(form: Form, common: dict[str, Any], job: Job, completions: Sequence[Completion]) -> dict[str, Any]:
  answers = [read_completion(job.rules, completion) for completion in completions]
  choices = [
    {
      "index": i,
      **form.whole(answer),
      "finish_reason": answer.finish,
      **_tokens(form, job, answer.completion.ids, answer.completion.logp_rollout),
      **form.of_choice(job, i),
    }
    for i, answer in enumerate(answers)
  ]
  return {**common, "choices": choices, "usage": usage(job, answers), **form.of_request(job)}


async def chunks(
  form: Form, common: dict[str, Any], job: Job, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[dict[str, Any], None]:
  """The answer as the chunks of a stream; the last one of a choice says only how it ended."""
  common = {**common, **({"usage": None} if job.usage else {})}
  begun: set[int] = set()
  ended: list[Answer] = []
  async with contextlib.aclosing(deltas):
    async for delta in deltas:
      first = delta.choice not in begun
      if first or _says_something(job, delta):
        request = {} if begun else form.of_request(job)
        begun.add(delta.choice)
        yield {**common, "choices": [_part(form, job, delta, first=first)], **request}
      if delta.answer:
        ended.append(delta.answer)
        last = {"index": delta.choice, **form.part("", (), first=False), "finish_reason": delta.answer.finish}
        yield {**common, "choices": [{**last, "logprobs": None}]}
  if job.usage:
    yield {**common, "choices": [], "usage": usage(job, ended)}


def _says_something(job: Job, delta: Delta) -> bool:
  calls = delta.answer is not None and delta.answer.calls
  return bool(delta.text or calls or ((job.logprobs or job.token_ids) and len(delta.ids)))


def _part(form: Form, job: Job, delta: Delta, *, first: bool) -> dict[str, Any]:
  calls = delta.answer.calls if delta.answer else ()
  return {
    "index": delta.choice,
    **form.part(delta.text, calls, first=first),
    "finish_reason": None,
    **_tokens(form, job, delta.ids, delta.logp),
    **(form.of_choice(job, delta.choice) if first else {}),
  }


def usage(job: Job, answers: Sequence[Answer]) -> dict[str, int]:
  prompt, sampled = sum(map(len, job.prompts)), sum(len(answer.completion.ids) for answer in answers)
  return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _tokens(form: Form, job: Job, ids: np.ndarray, logp: np.ndarray) -> dict[str, Any]:
  tokenizer = job.rules.chat.tokenizer
  made = {"logprobs": form.logprobs(tokenizer, ids, logp) if job.logprobs else None}
  return made | ({"token_ids": [int(i) for i in ids]} if job.token_ids else {})


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
  return [
    {
      "id": f"call_{uuid.uuid4().hex[:24]}",
      "type": "function",
      "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }
    for call in calls
  ]


def _texts(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
  return [tokenizer.decode([i]) for i in ids]


def _bytes(text: str) -> list[int] | None:
  """None for a token that is a part of a character."""
  return None if "\ufffd" in text else list(text.encode())


def _values(logp: np.ndarray) -> list[float]:
  return [max(float(value), LEAST) for value in logp]
