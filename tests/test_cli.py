"""The command line: every command on a small run, and one clear line with exit code 2 for every mistake."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import openai
import pytest
import yaml
from safetensors import safe_open

from jaxagent import cli, run
from jaxagent.config import Config
from jaxagent.report import folder as run_folder

CONFIG = {
  "model": {"shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16}},
  "env": {"name": "calculator", "options": {"digits": 1}},
  "rollout": {
    "prompts": 2, "samples": 4, "max_turns": 2, "max_tokens": 64, "max_turn_tokens": 8, "slots": 8
  },
  "run": {"steps": 2, "checkpoint_every": 1, "compilation_cache": None},
  "training": {"microbatch_rows": 8},
  "evaluation": {"tasks": 4},
}  # fmt: skip


def write(folder, **changes):
  """A config file with dotted changes; None as a value removes nothing, it is YAML's null."""
  values = json.loads(json.dumps(CONFIG))
  for key, value in changes.items():
    *path, last = key.split("__")
    place = values
    for name in path:
      place = place.setdefault(name, {})
    place[last] = value
  path = folder / "tiny.yaml"
  path.write_text(yaml.safe_dump(values))
  return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A finished run, and where it is."""
  folder = tmp_path_factory.mktemp("finished")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    assert cli.main(["train", write(folder), "--seed=3"]) == 0
  return folder / "runs" / "tiny-1"


def test_train_leaves_a_whole_run(finished):
  records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
  assert [(r["phase"], r["step"]) for r in records] == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
  assert "eval/success" in records[0]
  assert yaml.safe_load((finished / "config.yaml").read_text())["seed"] == 3
  assert list((finished / "tensorboard").glob("events*")) and len(list((finished / "rollouts").iterdir())) == 2
  assert len(list((finished / "checkpoints").iterdir())) == 2


def test_a_second_run_gets_its_own_folder_and_resume_says_which(finished, capsys, monkeypatch):
  monkeypatch.chdir(finished.parent.parent)
  before = (finished / "metrics.jsonl").read_text()
  assert cli.main(["train", "tiny.yaml", "--seed=3", "--resume", "--run.steps", "2"]) == 0
  said = capsys.readouterr().out
  assert "tiny-1" in said and "finished" in said
  assert (finished / "metrics.jsonl").read_text() == before
  assert cli.main(["train", "tiny.yaml", "--run.steps", "0", "--evaluation.tasks=0"]) == 0
  assert (finished.parent / "tiny-2").exists()
  shutil.rmtree(finished.parent / "tiny-2")


def test_two_runs_that_begin_at_once_get_folders_of_their_own(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  fresh, config = run_folder.fresh, Config()

  def late(config, name):
    folder = fresh(config, name)
    if not folder.parent.exists():
      folder.mkdir(parents=True)  # the other run is faster
    return folder

  monkeypatch.setattr(run_folder, "fresh", late)
  assert [run_folder.claim(config, "a").name for _ in range(2)] == ["a-2", "a-3"]


@pytest.mark.parametrize("fault", ["another model", "all checkpoints corrupt"])
def test_a_resume_that_cannot_be_leaves_the_run_as_it_was(fault, finished, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(finished.parent.parent)
  folder = shutil.copytree(finished, tmp_path / "run")
  arguments = ["train", "tiny.yaml", "--seed=3", "--resume", str(folder), "--run.steps", "3"]
  if fault == "another model":
    arguments += ["--model.shape.width", "32"]
  else:
    for meta in folder.glob("checkpoints/*/meta.json"):
      meta.unlink()
  files = ("config.yaml", "metrics.jsonl")
  before = [(folder / name).read_text() for name in files]
  assert cli.main(arguments) == 2
  said = capsys.readouterr().err
  assert ("has shape" in said or "all corrupt" in said) and len(said.splitlines()) == 1
  assert [(folder / name).read_text() for name in files] == before


def test_a_resume_keeps_the_settings_of_the_run(finished, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(finished.parent.parent)
  folder = shutil.copytree(finished, tmp_path / "run")
  assert cli.main(["train", "tiny.yaml", "--resume", str(folder)]) == 2  # it had seed 3
  said = capsys.readouterr().err
  assert "was run with seed 3" in said and "or choose by --seed" in said and len(said.splitlines()) == 1
  own = str(folder / "config.yaml")
  assert cli.main(["train", own, "--resume", str(folder)]) == 0
  assert "finished" in capsys.readouterr().out


def test_one_run_in_a_folder(tmp_path):
  with run_folder.alone(tmp_path):
    with pytest.raises(ValueError, match="another run is in"), run_folder.alone(tmp_path):
      pass
  with run_folder.alone(tmp_path):
    pass


def test_what_a_run_left_that_failed_at_once_is_written_over(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  config = Config(run=dataclasses.replace(Config().run, dir=str(folder)))
  for name in ("lock", "config.yaml", "config.yaml.new", "metrics.jsonl"):
    (folder / name).write_text("")
  assert run_folder.fresh(config, "a") == run.epath.Path(folder)
  (folder / "metrics.jsonl").write_text("{}")
  with pytest.raises(ValueError, match="exists; choose another"):
    run_folder.fresh(config, "a")


def test_a_config_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
  path = run.epath.Path(tmp_path / "config.yaml")
  path.write_text("old")

  def full(self, text):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
    patch.setattr(type(path), "write_text", full)
    run_folder.write_whole(path, "new")
  assert path.read_text() == "old"
  run_folder.write_whole(path, "new")
  assert path.read_text() == "new"


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["--profile", "9"], "no step 9 to profile: those to come are 1..2"),
    (["--seed", "-1"], "--seed must be an integer in"),
    (["--model.shape.layers", "-1"], "layers must be positive, got -1"),
    (["--model.shape.width", "x"], "model.shape.width must be of type int, got 'x'"),
    (["--model.shape.qk_norm", "3"], "model.shape.qk_norm must be of type bool, got 3"),
    (["--model.shape.rope_theta", "null"], "model.shape.rope_theta must be of type float, got None"),
    (["--model.shape={width: 16}"], "model.shape needs layers, heads"),
    (["--env.options.digits", "x"], "env.options of calculator"),
    (["--method.name=spo_plus_plus", "--method.options.tasks", "-3"], "tasks must be the number of prompts"),
    (["--method.name=gepo", "--method.options.base", "grpo"], "method.options of gepo"),
    (["--method.name=gepo", "--method.options.alpha_low", "7"], "alpha_low must lie in [0, 1], got 7"),
    (["--method.name=dr_grpo_within", "--method.options.max_tokens", "-1"], "max_tokens must be positive, got -1"),
  ],
)
def test_a_mistake_inside_a_mapping_is_one_line(words, said, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["train", write(tmp_path), *words]) == 2
  error = capsys.readouterr().err
  assert said in error and len(error.splitlines()) == 1


def test_looking_at_a_run(finished, capsys, tmp_path):
  assert cli.main(["eval", str(finished), "--evaluation.tasks", "3"]) == 0
  assert "success" in capsys.readouterr().out
  assert cli.main(["sample", str(finished), "1+1", "-n", "2", "--max-tokens", "4"]) == 0
  assert cli.main(["rollouts", str(finished)]) == 0
  assert capsys.readouterr().out.count("task") >= 8
  assert cli.main(["rollouts", str(finished), "--step", "1", "--index", "0"]) == 0
  assert "policy" in capsys.readouterr().out
  assert cli.main(["export", str(finished), str(tmp_path / "exported")]) == 0
  modes = {path.stat().st_mode for path in (tmp_path / "exported").iterdir()}
  assert len(modes) == 1
  with safe_open(tmp_path / "exported" / "model.safetensors", "np") as file:
    assert "model.embed_tokens.weight" in file.keys()
  assert cli.main(["sample", str(tmp_path / "exported"), "1+1", "--max-tokens", "4"]) == 0


def test_serve_a_run(finished, tmp_path):
  """A process of its own, as a person starts it: it says where it is, answers, and Ctrl-C stops it cleanly."""
  words = ["serve", str(finished), "--port", "0", "--slots", "2", "--capacity", "256", "--name", "policy"]
  environment = {**os.environ, "JAXAGENT_API_KEY": "sesame", "PYTHONUNBUFFERED": "1"}
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  command = [sys.executable, "-m", "jaxagent.cli", *words]
  with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as process:
    try:
      said = ""
      while "Ctrl-C stops" not in said:
        said += (line := process.stdout.readline())
        assert line, process.stderr.read()
      url = re.search(r"serving policy at (http://127\.0\.0\.1:\d+/v1)", said)[1]
      with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
        asked = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4}
        assert 1 <= client.chat.completions.create(**asked).usage.completion_tokens <= 4
        assert [model.id for model in client.models.list()] == ["policy"]
      with openai.OpenAI(base_url=url, api_key="open", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
          client.models.list()
      process.send_signal(signal.SIGINT)
      rest, errors = process.communicate(timeout=60)
      assert (process.returncode, rest, errors) == (0, "", "")
    finally:
      process.kill()


def test_a_run_is_served_with_its_own_tool_format(finished, capsys):
  assert cli.main(["serve", str(finished), "--port", "0", "--tool-format", "hermes"]) == 2
  assert "tool format 'plain', not 'hermes'" in capsys.readouterr().err


def test_a_run_starts_from_another(finished, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["train", write(tmp_path, run__steps=1), "--run.init_from", str(finished)]) == 0


def test_sft_leaves_a_run_to_start_from(finished, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  config = write(tmp_path, run__steps=1, sft={"steps": 2, "batch": 4})
  assert cli.main(["sft", config, "--sft.source", str(finished), "--sft.filter", "none"]) == 0
  assert "sft.filter none keeps 16 rows, of 4 tasks, among 16 rollouts" in capsys.readouterr().out
  records = [json.loads(line) for line in (tmp_path / "runs/tiny-sft-1/metrics.jsonl").read_text().splitlines()]
  assert [(r["phase"], r["step"]) for r in records] == [("sft", 1), ("sft", 2), ("eval", 0)]
  assert cli.main(["train", config, "--sft.steps", "0", "--run.init_from", "runs/tiny-sft-1"]) == 0
  for words, said in {
    ("--sft.steps", "0"): "sft.steps is 0",
    ("--sft.filter", "pareto"): "set sft.source to a run",
    ("--sft.source", "nowhere"): "nowhere is not a run's folder",
    ("--sft.source", str(finished), "--sft.filter", "pareto"): "keeps none of the 16 rollouts",
    ("--sft.source", str(finished), "--sft.filter", "none", "--rollout.max_tokens", "20"): "raise rollout.max_tokens",
  }.items():
    assert cli.main(["sft", config, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_funnel_keeps_its_states_and_goes_on(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  section = {"candidates": ["use the tool", "check the sum"], "max_tokens": 40, "gate_tasks": 2}
  config = write(tmp_path, method="experience_funnel", rollout__max_tokens=128, funnel=section)
  assert cli.main(["funnel", config, "--run.steps", "1"]) == 0
  assert cli.main(["funnel", config, "--run.steps", "2", "--resume"]) == 0
  states = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs/tiny-1/states").iterdir())]
  assert [s["proposed"]["skills"] for s in states] == [["use the tool"], ["check the sum"]]
  assert states[-1]["state"]["refused"] == ["use the tool", "check the sum"]  # a random policy solves nothing
  records = [json.loads(line) for line in (tmp_path / "runs/tiny-1/metrics.jsonl").read_text().splitlines()]
  assert [(r["phase"], r["step"]) for r in records] == [
    ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2),
  ]  # fmt: skip
  capsys.readouterr()
  assert cli.main(["funnel", config, "--method", "grpo"]) == 2
  error = capsys.readouterr().err
  assert "set method.name to experience_funnel" in error and len(error.splitlines()) == 1


def test_config_prints_what_would_run(tmp_path, capsys):
  assert cli.main(["config", write(tmp_path), "--rollout.samples", "5"]) == 0
  assert yaml.safe_load(capsys.readouterr().out)["rollout"]["samples"] == 5
  assert cli.main(["config", "--keys"]) == 0
  assert "rollout.samples" in capsys.readouterr().out


COMMANDS = (
  "", "train", "sft", "funnel", "eval", "sample", "serve", "plan", "reference-stats", "rollouts", "config", "export"
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_everywhere(command, capsys):
  with pytest.raises(SystemExit) as end:
    cli.main([*command.split(), "--help"])
  assert end.value.code == 0 and "usage: jaxagent" in capsys.readouterr().out


MISTAKES = {
  "unknown key": (["--rollout.sample", "4"], {}, "rollout.samples"),
  "wrong type": (["--rollout.samples", "many"], {}, "integer"),
  "does not divide": (["--training.minibatches", "3"], {}, "training.minibatches"),
  "microbatch over the mesh": (["--training.microbatch_rows", "3"], {}, "training.microbatch_rows"),
  "mesh": (["--mesh.tensor", "3"], {}, "mesh"),
  "parameter over the mesh": (["--mesh.tensor", "8"], {}, "'vocab' of size 259 does not divide"),
  "unknown environment": ([], {"env__name": "calculater"}, "calculator"),
  "unknown option": ([], {"env__options": {"digit": 1}}, "digit"),
  "unknown method": (["--method.name", "grop"], {}, "grpo"),
  "options of a value": ([], {"method": {"name": "grpo", "options": {"x": 1}}}, "takes no options"),
  "wrong options of a function": ([], {"method": {"name": "grpo_kl", "options": {"x": 1}}}, "method.options"),
  "unknown shape": ([], {"model__shape": {"wide": 3}}, "wide"),
  "model that is not there": (["--model.path", "no/such/model.gguf"], {"model__shape": {}}, "no model at"),
  "path and shape": (["--model.path", "x"], {}, "model.shape"),
  "prompt longer than the cache": (["--rollout.max_tokens", "16"], {}, "rollout.max_tokens"),
  "no prompts": ([], {"env": {"name": "dataset", "options": {"path": "rows.jsonl"}}}, "no rows"),
  "run to start from": (["--run.init_from", "nowhere"], {}, "nowhere"),
  "too few tasks": (
    ["--evaluation.tasks", "0"],
    {"env": {"name": "dataset", "options": {"path": "one.jsonl", "held_out": 0}}},
    "rollout.prompts",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name, tmp_path, monkeypatch, capsys):
  arguments, changes, message = MISTAKES[name]
  monkeypatch.chdir(tmp_path)
  (tmp_path / "rows.jsonl").write_text("")
  (tmp_path / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
  assert cli.main(["train", write(tmp_path, **changes), *arguments]) == 2
  said = capsys.readouterr().err
  assert message in said and said.startswith("jaxagent: error: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["train", "nowhere.yaml"], "nowhere.yaml"),
    (["train", "tiny.yaml", "--run.dir", "taken"], "taken exists"),
    (["train", "tiny.yaml", "--resume"], "no run to resume"),
    (["train", "tiny.yaml", "--resume", "nowhere"], "no run to resume in nowhere"),
    (["eval", "nowhere"], "not a run's folder"),
    (["rollouts", "nowhere"], "not a run's folder"),
    (["export", "nowhere", "out"], "not a run's folder"),
    (["sample", "nowhere.gguf", "hello"], "no model at nowhere.gguf"),
    (["serve", "nowhere.gguf", "--port", "0"], "no model at nowhere.gguf"),
    (["serve", "nowhere.gguf", "--port", "70000"], "--port must be in 0..65535"),
    (["serve", "nowhere.gguf", "--port", "0", "--host", "0.0.0.0"], "needs an API key"),
    (["serve", "nowhere.gguf", "--port", "0", "--api-key", ""], "API key must be printable"),
    (["serve", "nowhere.gguf", "--host", "no.such.host.invalid", "--api-key", "k"], "cannot listen at no.such.host"),
  ],
)
def test_a_missing_thing_is_named(arguments, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write(tmp_path)
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken" / "file").touch()
  assert cli.main(arguments) == 2
  said = capsys.readouterr().err
  assert message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["train", "tiny.yaml", "-x"], ["eval", "run", "surplus", "-z"], ["fly"]])
def test_an_unknown_flag_is_usage_and_exit_code_2(arguments, capsys):
  with pytest.raises(SystemExit) as end:
    cli.main(arguments)
  assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_an_interrupt_before_anything_runs_is_one_line(monkeypatch, capsys):
  from jaxagent import run

  def interrupted(args, rest):
    raise KeyboardInterrupt

  monkeypatch.setattr(run, "config_command", interrupted)
  assert cli.main(["config"]) == 130
  assert capsys.readouterr().err == "jaxagent: interrupted\n"


def test_a_prompt_that_is_not_text(finished, capsys):
  assert cli.main(["sample", str(finished), "\udcff"]) == 2
  assert "not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("topology, program, says", [
  ("v9:2x2", "train", "no chip 'v9'"), ("v5e:2x2", "step", "no program 'step' to plan"),
])  # fmt: skip
def test_plan_refuses_in_one_line(topology, program, says, tmp_path, capsys):
  config = tmp_path / "c.yaml"
  config.write_text("model: {shape: {width: 16, layers: 1, heads: 2, mlp_width: 16}}\nenv: calculator\n")
  assert cli.main(["plan", str(config), "--topology", topology, "--only", program]) == 2
  (error,) = capsys.readouterr().err.splitlines()
  assert error.startswith("jaxagent: error: ") and says in error
