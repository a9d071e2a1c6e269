import asyncio
import json
import sys

import pytest

from jaxagent.envs.base import Action
from jaxagent.envs.dataset import Dataset

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(20)]


def write(path, rows):
  path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
  return str(path)


def score(tasks, text, index=0, split="train"):
  async def run():
    environment, seed = tasks.environment(split, index)
    prompt = (await environment.reset(seed))[0].messages
    return prompt, await environment.step({0: Action(text)})

  return asyncio.run(run())


def test_exact_match_is_the_default(tmp_path):
  tasks = Dataset(write(tmp_path / "a.jsonl", ROWS), system="S")
  prompt, step = score(tasks, f" {tasks.rows['train'][0]['answer']}\n")
  assert [m["role"] for m in prompt] == ["system", "user"] and step.outcome == 1 and step.status == "done"
  assert score(tasks, "no")[1].outcome == 0


def test_held_out_prompts_are_a_share_and_repeats_stay_together(tmp_path):
  tasks = Dataset(write(tmp_path / "a.jsonl", ROWS + ROWS + [""]), held_out=0.25)
  train, held = ({row["prompt"] for row in tasks.rows[s]} for s in ("train", "eval"))
  assert len(held) == 5 and not train & held and tasks.size("train") == 30 and tasks.size("eval") == 10


def test_order_and_additions_do_not_move_prompts(tmp_path):
  one = Dataset(write(tmp_path / "a.jsonl", ROWS), held_out=0.25).rows["eval"]
  two = Dataset(write(tmp_path / "b.jsonl", ROWS[::-1]), held_out=0.25).rows["eval"]
  assert {r["prompt"] for r in one} == {r["prompt"] for r in two}


def test_a_second_file_is_the_held_out_split(tmp_path):
  path, other = write(tmp_path / "a.jsonl", ROWS[:5]), write(tmp_path / "b.jsonl", ROWS[5:8])
  tasks = Dataset(path, eval_path=other)
  assert (tasks.size("train"), tasks.size("eval")) == (5, 3)
  with pytest.raises(ValueError, match="1 prompts are both in"):
    Dataset(path, eval_path=write(tmp_path / "c.jsonl", ROWS[4:8]))


@pytest.mark.parametrize(
  "rows, message",
  [
    ([], "prompt set is empty"),
    (["", "  "], "prompt set is empty"),
    ([ROWS[0], "{nope"], "line 2: not JSON"),
    ([ROWS[0], "", "[1]"], "line 3: expected a JSON object, got list"),
    ([ROWS[0], {"prompt": "x"}], "line 2 of .* has no 'answer'; its keys are prompt"),
    ([{"prompt": "", "answer": 1}], "must be a text"),
    ([{"prompt": [{"role": "user"}], "answer": 1}], "list of messages"),
    ([ROWS[0]], "all held out"),
  ],
)
def test_bad_files(tmp_path, rows, message):
  with pytest.raises(ValueError, match=message):
    Dataset(write(tmp_path / "a.jsonl", rows))


def test_missing_file(tmp_path):
  with pytest.raises(ValueError, match="no file"):
    Dataset(str(tmp_path / "none.jsonl"))


def test_hugging_face_needs_its_library(monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ValueError, match="pip install datasets"):
    Dataset("some/name")


def test_hugging_face_rows_by_name_or_from_a_saved_folder(tmp_path, monkeypatch):
  class Library:
    @staticmethod
    def load_dataset(path, name, split):
      return ROWS if (path, name, split) == ("some/name", "main", "test") else []

    @staticmethod
    def load_from_disk(path):
      return [{"prompt": "x"}]

  monkeypatch.setitem(sys.modules, "datasets", Library)
  tasks = Dataset("some/name", name="main", split="test")
  assert tasks.size("train") + tasks.size("eval") == 20
  (tmp_path / "dataset_info.json").write_text("{}")
  with pytest.raises(ValueError, match=r"row 0 of .* has no 'answer'"):
    Dataset(str(tmp_path))


async def later(prompt, completion, answer):
  await asyncio.sleep(0)
  return 0.5


@pytest.mark.parametrize("reward, outcome", [(lambda p, c, a: len(c), 2.0), (later, 0.5), (lambda p, c, a: True, 1.0)])
def test_reward_functions(tmp_path, reward, outcome):
  assert score(Dataset(write(tmp_path / "a.jsonl", ROWS), reward=reward), "ab")[1].outcome == outcome


@pytest.mark.parametrize("value, error", [(float("nan"), ValueError), (None, TypeError), ("1", TypeError)])
def test_a_reward_that_is_no_number_is_a_failure_not_a_zero(tmp_path, value, error):
  tasks = Dataset(write(tmp_path / "a.jsonl", ROWS), reward=lambda p, c, a: value)
  with pytest.raises(error, match="reward function"):
    score(tasks, "x")


def test_reward_by_name_from_the_working_directory(tmp_path, monkeypatch):
  (tmp_path / "my_reward_module.py").write_text("def reward(prompt, completion, answer):\n  return 0.25\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", list(sys.path))
  path = write(tmp_path / "a.jsonl", ROWS)
  assert score(Dataset(path, reward="my_reward_module:reward"), "x")[1].outcome == 0.25
  for spec, message in [
    ("my_reward_module:rewards", "no attribute"), ("no_such_module:f", "no module"), ("reward", "module:name"),
  ]:  # fmt: skip
    with pytest.raises(ValueError, match=message):
      Dataset(path, reward=spec)


def test_demonstration(tmp_path):
  messages, _ = Dataset(write(tmp_path / "a.jsonl", ROWS)).demonstration(0)
  assert messages[0]["content"] == f"p{messages[1]['content']}"
