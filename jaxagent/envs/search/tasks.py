"""search: a question, a search tool over a corpus, and an answer inside <answer></answer>.

    tasks = Search(corpus="tiny", reward="token_f1")
    environment, seed = tasks.environment("train", 0)

What a search finds is a tool message per document, so it is context: in no loss and no length. The outcome is the
reward named by `reward`, of the words that the policy wrote; the same function scores training and evaluation.

Columns of an episode, at every step: `tool_cost` (calls made, the malformed among them), `exact_match`, `token_f1`,
`format_valid` and `retrieved` (1 once an accepted answer stood in something found). The presets `slimsearcher`, `otc`
and `eapo` read `tool_cost`; `search_agent` reads none.

Source: the working code of Leiden University's 0.8B search agent; the paper's text was not available. Ours differs: a
corpus of ten thousand summaries with generated questions in place of Wikipedia 2018 and MuSiQue, and BM25 by default.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from jaxagent.checks import check_options
from jaxagent.envs.base import Action, Malformed, Message, Observation, Step, ToolCall, with_system
from jaxagent.envs.importing import attribute
from jaxagent.envs.search import tiny
from jaxagent.envs.search.corpus import Corpus, Document, Question, read
from jaxagent.envs.search.retrieval import Bm25, Dense, Retriever, as_encode, load_vectors
from jaxagent.envs.splits import require_split, split_of, task_seed
from jaxagent.rewards.answers import (
  exact_match,
  extract_answer,
  f1_with_floor,
  normalize_answer,
  search_reward,
  token_f1,
  valid_format,
)

PROMPT = (
  "Use the search tool as needed, then write the answer inside <answer> and </answer>, for example"
  " <answer>Paris</answer>.\nQuestion: {question}"
)
TAGS = ("answer", "think")  # which the plain tool format reads as calls
REWARDS: dict[str, Callable[[str, tuple[str, ...], list[str]], float]] = {
  "exact_match": lambda text, golds, found: exact_match(extract_answer(text), golds),
  "token_f1": lambda text, golds, found: token_f1(extract_answer(text), golds),
  "f1_with_floor": lambda text, golds, found: f1_with_floor(text, golds),
  "search_reward": lambda text, golds, found: search_reward(text, golds, found),
}


@dataclasses.dataclass(frozen=True)
class Search:
  """Tasks: the questions of `corpus`, a folder that `python -m jaxagent.envs.search build` made, or "tiny".

  `hops` keeps questions of so many hops, `questions` the first so many of each split. `reward`: "exact_match",
  "token_f1", "f1_with_floor" or "search_reward", which are functions of `jaxagent.rewards`; the last two need thinking
  and nested-XML calls (`model.tool_format: qwen_xml`). A call finds `top_k` documents, of each at most `chunk`
  characters; more than `max_calls` calls end the episode as truncated. `retriever`: "bm25", or "dense" with `encoder`,
  `my_module:name` of a function of texts (or of an object with `encode`), and `probes`. `argument` names the tool's
  parameter ("query"; the plain tool format needs "input"); both are understood.

  ValueError: a wrong option, a folder without a corpus, a package that is not installed, a split without questions.
  """

  corpus: str = "tiny"
  hops: int | None = None
  questions: int | None = None
  reward: str = "exact_match"
  retriever: str = "bm25"
  encoder: str | None = None
  probes: int = 8
  top_k: int = 5
  chunk: int = 480
  max_calls: int = 10
  argument: str = "query"
  prompt: str = PROMPT
  system: str | None = None
  held_out: float = 0.1

  def __post_init__(self):
    check_options(
      "search: ",
      (self.hops is None or self.hops >= 1, "hops", self.hops, "at least 1, or null"),
      (self.questions is None or self.questions >= 1, "questions", self.questions, "at least 1, or null"),
      (self.reward in REWARDS, "reward", self.reward, f"one of {', '.join(REWARDS)}"),
      (self.retriever in ("bm25", "dense"), "retriever", self.retriever, "'bm25' or 'dense'"),
      ((self.encoder is None) == (self.retriever == "bm25"), "encoder", self.encoder, "given iff dense"),
      (self.probes >= 1, "probes", self.probes, "at least 1"),
      (self.top_k >= 1, "top_k", self.top_k, "at least 1"),
      (self.chunk >= 16, "chunk", self.chunk, "at least 16 characters"),
      (self.max_calls >= 1, "max_calls", self.max_calls, "at least 1"),
      (self.argument in ("query", "input"), "argument", self.argument, "'query' or 'input'"),
      ("{question}" in self.prompt, "prompt", self.prompt, "a text with {question}"),
      (0 < self.held_out < 1, "held_out", self.held_out, "in (0, 1)"),
    )
    _ = self.retrieve, self._questions  # files and packages are read, and their faults reported, here

  @functools.cached_property
  def _corpus(self) -> Corpus:
    return tiny.corpus() if self.corpus == "tiny" else read(self.corpus)

  @functools.cached_property
  def retrieve(self) -> Retriever:
    documents = self._corpus.documents
    if self.retriever == "bm25":
      return Bm25(documents)
    encode = as_encode(attribute(self.encoder, what="env.options.encoder"), what="env.options.encoder")
    vectors = load_vectors(None if self.corpus == "tiny" else self.corpus)
    return Dense(documents, encode, vectors=vectors, probes=self.probes)

  @functools.cached_property
  def _questions(self) -> dict[str, list[Question]]:
    kept = [q for q in self._corpus.questions if self.hops in (None, q.hops)]
    split: dict[str, list[Question]] = {"train": [], "eval": []}
    for question in kept:
      split[split_of(question.text, held_out=self.held_out)].append(question)
    if not all(split.values()):
      raise ValueError(
        f"search: {self.corpus} has {len(split['train'])} training and {len(split['eval'])} held-out questions with"
        f" hops={self.hops}; choose other hops or held_out"
      )
    return {name: found[: self.questions] for name, found in split.items()}

  def size(self, split: str) -> int | None:
    return len(self._questions[require_split(split)])

  def environment(self, split: str, index: int) -> tuple["SearchEpisode", int]:
    return SearchEpisode(self, self.question(split, index)), task_seed(split, index)

  def question(self, split: str, index: int) -> Question:
    if not 0 <= index < self.size(split):
      raise ValueError(f"search: the {split} split has {self.size(split)} questions, got index {index}")
    return self._questions[split][index]

  def demonstration(self, index: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """A search for each hop, by one who knows what to look for, then the first answer."""
    question = self.question("train", index % self.size("train"))
    thought = "<think>\n\n</think>\n" if self.reward in ("f1_with_floor", "search_reward") else ""
    messages = list(self.opening(question))
    for query in question.queries:
      call = {"type": "function", "function": {"name": "search", "arguments": {self.argument: query}}}
      messages.append({"role": "assistant", "content": thought.strip(), "tool_calls": [call]})
      messages += self.found(query)[0]
    answer = {"role": "assistant", "content": f"{thought}<answer>{question.answers[0]}</answer>"}
    return (*messages, answer), (self.tool,)

  @property
  def tool(self) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
    about = f"Finds the {self.top_k} documents that match a query best."
    return {"type": "function", "function": {"name": "search", "description": about, "parameters": parameters}}

  def opening(self, question: Question) -> tuple[Message, ...]:
    return with_system(self.system, {"role": "user", "content": self.prompt.replace("{question}", question.text)})

  def found(self, query: str) -> tuple[list[Message], list[str]]:
    """What the tool says to a query, and the chunks in it."""
    documents: list[Document] = self.retrieve.search(query, self.top_k)
    chunks = [document.chunk(self.chunk) for document in documents]
    return [_reply(chunk) for chunk in chunks or ["nothing found"]], chunks


class SearchEpisode:
  """One question. It ends with the first turn without a call, or after `max_calls` calls (truncated)."""

  tool_format = "chat"

  def __init__(self, tasks: Search, question: Question):
    self._tasks, self._question = tasks, question

  async def reset(self, seed: int) -> dict[int, Observation]:
    self._written: list[str] = []
    self._chunks: list[str] = []
    self._calls = 0
    return {0: Observation(self._tasks.opening(self._question), (self._tasks.tool,))}

  async def step(self, actions: dict[int, Action]) -> Step:
    action = actions[0]
    self._written.append(action.text)
    calls = [call for call in action.calls if getattr(call, "name", None) not in TAGS]
    left = self._tasks.max_calls - self._calls
    replies = tuple(message for call in calls[:left] for message in self._reply(call))
    self._calls += len(calls)
    if self._calls > self._tasks.max_calls:
      return self._scored(status="truncated", cause=f"more than {self._tasks.max_calls} calls")
    if not calls:
      return self._scored(status="truncated" if action.truncated else "done")
    return self._scored(observations={0: Observation(replies)})

  async def close(self) -> None:
    pass

  def _reply(self, call: ToolCall | Malformed) -> list[Message]:
    """What is wrong with a call goes back to the model; it does not end the episode."""
    if error := fault(call):
      return [_reply(f"error: {error}")]
    messages, chunks = self._tasks.found(query_of(call))
    self._chunks += chunks
    return messages

  def _scored(self, **fields) -> Step:
    """Every step is scored: a limit may end the episode after any of them."""
    text, golds = "\n".join(self._written), self._question.answers
    answer = extract_answer(text)
    columns = {
      "tool_cost": float(self._calls),
      "exact_match": exact_match(answer, golds),
      "token_f1": token_f1(answer, golds),
      "format_valid": float(valid_format(text)),
      "retrieved": float(any(_holds(chunk, gold) for chunk in self._chunks for gold in golds)),
    }
    info = {"columns": columns, "answer": answer, "golds": golds, "hops": self._question.hops}
    return Step(outcome=REWARDS[self._tasks.reward](text, golds, self._chunks), info=info, **fields)


def fault(call: ToolCall | Malformed) -> str:
  """What is wrong with a call, "" if nothing is."""
  if isinstance(call, Malformed):
    return call.error
  if call.name != "search":
    return f"no tool {call.name[:16]!r}, only search"
  if len(call.arguments) != 1 or not isinstance(query_of(call), str):
    return f"search takes one text, query; got {json.dumps(call.arguments, ensure_ascii=True)[:80]}"
  if not query_of(call).strip():
    return "the query is empty"
  return ""


def query_of(call: ToolCall) -> Any:
  return call.arguments.get("query", call.arguments.get("input"))


def _holds(chunk: str, gold: str) -> bool:
  words = normalize_answer(gold)
  return bool(words) and f" {words} " in f" {normalize_answer(chunk)} "


def _reply(text: str) -> Message:
  return {"role": "tool", "name": "search", "content": text}
