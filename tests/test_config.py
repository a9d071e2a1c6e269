import dataclasses
import pathlib

import pytest

from jaxagent import config
from jaxagent.config import Config, ConfigError, check, describe, load, parse_overrides, to_yaml


def written(tmp_path, text: str) -> pathlib.Path:
  path = tmp_path / "run.yaml"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


SCALARS = [
  ("1e-5", 1e-5), ("1e5", 1e5), ("1E+5", 1e5), ("-.5", -0.5), ("1.", 1.0), ("6.02e23", 6.02e23), ("3", 3), ("-3", -3),
  ("010", 10), ("0x10", 16), ("0o17", 15), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
  ("no", "no"), ("on", "on"), ("yes", "yes"), ("1:30", "1:30"), ("1_000", "1_000"), ("2020-01-01", "2020-01-01"),
  ('"3"', "3"), ("'true'", "true"), ("[a, 1, 1e-3]", ["a", 1, 1e-3]), ("{a: [1]}", {"a": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("text, value", SCALARS)
def test_scalars_in_a_file_and_on_the_command_line(tmp_path, text, value):
  from_file = load(written(tmp_path, f"env:\n  options:\n    x: {text}\n")).env.options["x"]
  from_line = parse_overrides(["--env.options.x", text])["env.options.x"]
  assert (from_file, type(from_file)) == (from_line, type(from_line)) == (value, type(value))


def test_plain_text_on_the_command_line_stands_for_itself():
  assert parse_overrides(["--a", "x # y: z", "--b=k=v", "--c", "-1"]) == {"a": "x # y: z", "b": "k=v", "c": -1}


def test_values_reach_their_fields_with_their_types(tmp_path):
  text = "rollout: {samples: 4, stop: ['</a>', x]}\noptimizer:\n  learning_rate: 1e-5\n  clip: null\nsft: {stop_at: 1}"
  got = load(written(tmp_path, text))
  assert got == dataclasses.replace(
    Config(),
    rollout=config.Rollout(samples=4, stop=("</a>", "x")),
    optimizer=config.Optimizer(learning_rate=1e-5, clip=None),
    sft=config.Sft(stop_at=1.0),
  )
  assert isinstance(got.rollout.stop, tuple) and isinstance(got.sft.stop_at, float)


@pytest.mark.parametrize("text", ["", "# nothing\n", "rollout:\n", "{}", "rollout: {}\nseed: 0"])
def test_what_is_not_given_is_the_default(tmp_path, text):
  assert load(written(tmp_path, text)) == load(None) == Config()


def test_overrides_replace_values_and_merge_into_sections_and_mappings(tmp_path):
  path = written(tmp_path, "env: {name: dataset, options: {a: 1, b: {c: 2}}}\nrollout: {samples: 4, prompts: 2}")
  line = ["--rollout.samples", "6", "--env.options.b.d=3", "--env.options.e", "[1]", "--seed=1", "--seed=2"]
  by_line = load(path, line)
  assert by_line.env.options == {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
  assert (by_line.rollout.samples, by_line.rollout.prompts, by_line.seed, by_line.env.name) == (6, 2, 2, "dataset")
  by_mapping = {"rollout": {"samples": 6}, "env.options.b": {"c": 2, "d": 3}, "env.options.e": [1], "seed": 2}
  assert load(path, by_mapping) == by_line
  assert load(path, {"env.options": {}}).env.options == {}


def test_a_section_may_be_given_as_its_name(tmp_path):
  got = load(written(tmp_path, "env: my_package.module:MyEnv\nmethod: dapo"), ["--env.options.digits", "2"])
  assert got.env == config.Env(name="my_package.module:MyEnv", options={"digits": 2})
  assert got.method.name == "dapo"


def test_loading_does_not_change_the_overrides_it_is_given():
  overrides = {"env": {"options": {"a": 1}}, "env.options.b": 2}
  load(None, overrides)
  assert overrides == {"env": {"options": {"a": 1}}, "env.options.b": 2}


ERRORS = [
  # text of the file, overrides, what the line must say
  ("rollout: {samplse: 4}", [], ["rollout.samplse", "the nearest is rollout.samples"]),
  ("samples: 4", [], ["samples is not a key", "the nearest is rollout.samples"]),
  ("trainig: {}", [], ["trainig is not a key", "the nearest is training"]),
  ("training: {max_turns: 4}", [], ["training.max_turns", "the nearest is rollout.max_turns"]),
  ("", ["--optimizer.learning-rate", "1"], ["--optimizer.learning-rate", "the nearest is optimizer.learning_rate"]),
  ("seed: '3'", [], ["seed must be an integer", 'got "3"']),
  ("seed: true", [], ["seed must be an integer", "got true"]),
  ("seed: 3.0", [], ["seed must be an integer", "got 3.0"]),
  ("rollout: {samples: 1e1}", [], ["rollout.samples must be an integer", "got 10.0"]),
  ("optimizer: {learning_rate: true}", [], ["optimizer.learning_rate must be a number", "got true"]),
  ("optimizer: {learning_rate: '1e-5'}", [], ["must be a number", 'got "1e-5"']),
  ("optimizer: {schedule: step}", [], ["one of constant, cosine, linear", 'got "step"']),
  ("model: {remat: 1}", [], ["model.remat must be true or false", "got 1"]),
  ("model: {path: 1}", [], ["model.path must be a string or null", "got 1"]),
  ("rollout: {stop: a}", [], ["rollout.stop must be a list of strings", 'got "a"']),
  ("rollout: {stop: [a, 1]}", [], ["rollout.stop must be a list of strings", "1]"]),
  ("env: {options: [1]}", [], ["env.options must be a mapping", "got [1]"]),
  ("rollout: 3", [], ["rollout must be a mapping", "got 3"]),
  ("rollout: null\nseed: null", [], ["seed must be an integer", "got null"]),
  ("- 1", [], ["must be a mapping of sections", "got [1]"]),
  ("seed: 1\nrun: {}\nseed: 1", [], ["'seed' is given twice"]),
  ("rollout:\n  samples: 1\n  samples: 2", [], ["line 2", "'samples' is given twice"]),
  ("rollout: {samples: 2}\nrollout.samples: 2", [], ["rollout.samples is given twice"]),
  ("env: {options: {1: a}}", [], ["keys must be strings, got 1"]),
  ("a: b: c", [], ["not valid YAML: line 1"]),
  ("seed: [", [], ["not valid YAML"]),
  ("seed: " + "1" * 5000, [], ["not valid YAML"]),
  ("seed: !!python/name:os.system x", [], ["not valid YAML"]),
  (b"\xff\xfe", [], ["cannot be read as text"]),
  ("env: {options: &a {b: *a}}", [], ["env.options must be made of finite numbers"]),
  ("optimizer: {learning_rate: .inf}", [], ["optimizer.learning_rate must be made of finite numbers"]),
  ("optimizer: {clip: .nan}", [], ["optimizer.clip must be made of finite numbers"]),
  ("rollout: {samples: 0}", [], ["rollout.samples must be an integer >= 1, got 0"]),
  ("rollout: {temperature: 0}", [], ["rollout.temperature must be a number > 0, got 0"]),
  ("rollout: {top_p: 1.5}", [], ["rollout.top_p must be a number in (0, 1], got 1.5"]),
  ("rollout: {min_p: 1}", [], ["rollout.min_p must be a number in [0, 1), got 1"]),
  ("rollout: {stop: ['']}", [], ["rollout.stop must hold no empty string"]),
  ("optimizer: {clip: -1}", [], ["optimizer.clip must be a number > 0 or null, got -1"]),
  ("sft: {steps: -1}", [], ["sft.steps must be an integer >= 0, got -1"]),
  ("seed: -1", [], ["seed must be an integer in [0, 2**32), got -1"]),
  ("rollout: {max_tokens: 32}", [], ["rollout.max_turn_tokens must be at most rollout.max_tokens = 32, got 64"]),
  ("training: {minibatches: 3}", [], ["training.minibatches must divide", "= 64, got 3"]),
  ("training: {row_tokens: 255}", [], ["training.row_tokens must be at least rollout.max_tokens = 256", "got 255"]),
  ("critic: {minibatches: 3}", [], ["critic.minibatches must divide", "= 64, got 3"]),
  ("critic: {init: copy}", [], ["critic.init must be one of policy, fresh or null", 'got "copy"']),
  ("critic: {optimizer: {b3: 1}}", [], ["critic.optimizer.b3 is not a key of the section optimizer", "weight_decay"]),
  ("critic: {optimizer: {b2: 1}}", [], ["critic.optimizer.b2 must be a number in [0, 1)", "got 1"]),
  ("", ["--critic.optimizer.learning_rate", "1"], ["critic.optimizer.learning_rate", "critic.learning_rate_multiple"]),
  (
    "critic: {warmup_steps: 3, warmup_freezes_policy: false}", [],
    ["critic.warmup_steps 3 changes nothing", "critic.warmup_epochs"],
  ),
  ("mesh: {fsdp: 0}", [], ["mesh sizes must be at least 1", "[-1, 0, 1, 1]"]),
  ("mesh: {fsdp: -1}", [], ["only one mesh size can be -1"]),
  ("", ["--seed", "x"], ["--seed must be an integer", 'got "x"']),
  ("", ["--seed"], ["--seed needs a value"]),
  ("", ["--seed", "--mesh.fsdp"], ["--seed needs a value"]),
  ("", ["seed", "3"], ["expected --section.key value, got 'seed'"]),
  ("", ["--rollout.stop", "[a"], ["--rollout.stop", "not valid YAML"]),
  ("env: {options: {a: 2}}", ["--env.options.a.b", "3"], ["--env.options.a.b", "stands 2"]),
]  # fmt: skip


@pytest.mark.parametrize("text, overrides, says", ERRORS)
def test_errors_are_one_line_that_says_what(tmp_path, text, overrides, says):
  path = written(tmp_path, text)
  with pytest.raises(ConfigError) as caught:
    load(path, overrides)
  line = str(caught.value)
  assert "\n" not in line and len(line) < 300
  assert all(part in line for part in says), line
  assert overrides or line.startswith(f"{path}: "), line


@pytest.mark.parametrize("path, says", [("nowhere.yaml", "no such file"), (".", "cannot be read")])
def test_a_file_that_cannot_be_read(tmp_path, path, says):
  with pytest.raises(ConfigError, match=says):
    load(tmp_path / path)


def test_resolved_yaml_gives_the_same_config_again(tmp_path):
  odd = ["1e5", "no", "a: b", "# c", "two\nlines", "é\x07", "", " x ", "null", "'", '"', "</tool>", "[", "~", "1", "😀"]
  options = {"strings": odd, "small": 1e-300, "third": 1 / 3, "int": 2**70, "none": None, "nested": {"1": [[], {}]}}
  overrides = {"env.options": options, "rollout.stop": odd[:6], "model.path": "two\nlines", "optimizer.eps": 1e-12}
  got = load(None, overrides)
  assert load(written(tmp_path, to_yaml(got))) == got
  assert load(written(tmp_path, to_yaml(Config()))) == Config()
  assert "  samples: 8  # rollouts a task: the group\n" in to_yaml(Config())


def test_describe_lists_every_key_with_type_default_and_comment():
  lines = describe().splitlines()
  sections = [part.type for part in dataclasses.fields(Config) if dataclasses.is_dataclass(part.type)]
  assert len(lines) == 1 + sum(len(dataclasses.fields(section)) for section in sections)
  row = next(line for line in lines if line.startswith("rollout.prompts"))
  assert row.split() == ["rollout.prompts", "integer", ">=", "1", "8", "tasks", "a", "step"]


def test_a_config_built_in_python_is_checked():
  assert check(Config()) == Config()
  stop = dataclasses.replace(Config(), rollout=config.Rollout(stop=("a",)))
  assert check(stop) == stop
  with pytest.raises(ConfigError, match=r"rollout.samples must be an integer"):
    check(dataclasses.replace(Config(), rollout=config.Rollout(samples=0)))
  with pytest.raises(ConfigError, match=r"rollout.prompts must be"):
    check(dataclasses.replace(Config(), rollout=config.Rollout(prompts="8")))
