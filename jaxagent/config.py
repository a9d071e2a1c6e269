"""The schema of a run: frozen dataclasses that hold the defaults. YAML holds values only.

Read with `load(path, overrides)`; an unknown key is an error that names the nearest valid one.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import json
import os
import re
import tokenize
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import yaml
from pydantic import Field

# a type, its range, and both in words
Count = Annotated[int, Field(ge=1), "an integer >= 1"]
Natural = Annotated[int, Field(ge=0), "an integer >= 0"]
Seed = Annotated[int, Field(ge=0, lt=2**32), "an integer in [0, 2**32)"]
AxisSize = Annotated[int, Field(ge=-1), "an integer >= 1, or -1"]
Positive = Annotated[float, Field(gt=0), "a number > 0"]
NonNegative = Annotated[float, Field(ge=0), "a number >= 0"]
Decay = Annotated[float, Field(ge=0, lt=1), "a number in [0, 1)"]
Share = Annotated[float, Field(gt=0, le=1), "a number in (0, 1]"]
Unit = Annotated[float, Field(ge=0, le=1), "a number in [0, 1]"]


@dataclasses.dataclass(frozen=True)
class Run:
  dir: str | None = None  # the run's folder, local or remote; default runs/<config>-<n>
  steps: Natural = 100  # batches of rollouts
  init_from: str | None = None  # a finished run to start from: its newest checkpoint's parameters
  checkpoint_every: Count = 20  # steps; the last step is always saved
  checkpoint_keep: Count = 2
  compilation_cache: str | None = "auto"  # folder of the persistent compilation cache; null switches it off


@dataclasses.dataclass(frozen=True)
class Model:
  path: str | None = None  # a Hugging Face folder, .gguf file, hub name, or package:NAME/FILE; null: `shape`
  tokenizer: str | None = None  # "bytes", or a folder with tokenizer.json; default: from `path`, else bytes
  tool_format: Literal["hermes", "qwen_xml", "plain"] = "plain"
  shape: dict[str, Any] = field(default_factory=dict)  # of models.config.DecoderConfig; beside a path: attention only
  dtype: Literal["float32", "bfloat16"] = "float32"  # of the compute; parameters, router, logits, softmax: float32
  remat: bool = False  # recompute each layer's activations in the backward pass


@dataclasses.dataclass(frozen=True)
class Env:
  name: str = "calculator"  # one of docs/environments.md, or my_package.module:MyEnv
  options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclasses.dataclass(frozen=True)
class Rollout:
  prompts: Count = 8  # tasks a step
  samples: Count = 8  # rollouts a task: the group
  max_turns: Count = 4
  max_tokens: Count = 256  # of a whole episode, prompt included: the row length and the cache capacity
  max_turn_tokens: Count = 64
  temperature: Positive = 1.0
  top_k: Natural = 0
  top_p: Share = 1.0
  min_p: Decay = 0.0
  stop: tuple[str, ...] = ()
  slots: Count = 64  # sequences decoded at once
  replay_routing: bool = True  # MoE: train with the experts that the sampler used


@dataclasses.dataclass(frozen=True)
class Scheduling:
  name: Literal["uniform", "envsched"] = "uniform"  # envsched: the tasks whose rollouts can teach most
  rounds: Count = 1  # above 1: sample more tasks, so often at most, until the outcomes of every group differ (DAPO)
  pool: Count = 1024  # envsched: it chooses among so many tasks
  discount: Share = 0.98  # envsched: of older evidence, a step
  lent_share: NonNegative = 0.5  # envsched: of a group that neighbours' evidence counts at most
  informativeness: Literal["variance", "mixed"] = "variance"  # envsched: E[p(1-p)], or P(outcomes differ)
  uncertainty: NonNegative = 0.5  # envsched: weight of the deviation of the success rate
  env_share: Share = 0.5  # envsched: share of being of one kind in the similarity of two tasks
  neighbours: Count = 16  # envsched: tasks that lend a task evidence
  quota_ratio: Positive = 1.5  # envsched: of an equal share of each kind in a batch
  penalty: NonNegative = 0.5  # envsched: for similarity within a batch
  explore: Decay = 0.05  # envsched: share of uniform draws


@dataclasses.dataclass(frozen=True)
class Sft:
  steps: Natural = 0  # 0: no warm start
  source: str = "demonstrations"  # those of the environment, or the folder of a run whose stored rollouts are imitated
  filter: Literal["none", "correct", "pareto"] = "correct"  # pareto: the most efficient correct one of each task
  batch: Count = 64  # demonstrations, or rows of rollouts, a step
  learning_rate: Positive = 1e-3
  stop_at: Share | None = None  # end early at this held-out success
  eval_every: Count = 50


@dataclasses.dataclass(frozen=True)
class Funnel:
  """Read by `jaxagent funnel`."""

  round_steps: Count = 1  # steps of the policy between two edits of the state; `run.steps` is a multiple
  reflect: str = "candidates"  # how edits are proposed: candidates, judge, or my_package.module:my_reflect
  candidates: tuple[str, ...] = ()  # skills to try in this order; empty: those of the environment
  prompt: str = ""  # of the first state
  max_tokens: Count = 512  # of a state's text
  gate_tasks: Count = 50  # held-out tasks that validate, those after the evaluation's
  gate_samples: Count = 1
  persistent: Unit = 0.5  # weight of what helped already before the edit; 1 for what the edit made useful
  residual_every: Natural = 1  # rounds between looking for what the policy can do without; 0: never
  tolerance: NonNegative = 0.0  # of validation success that an item may add and still be dropped


@dataclasses.dataclass(frozen=True)
class MethodSection:
  name: str = "grpo"  # a preset of jaxagent.methods, or my_package.module:my_method
  options: dict[str, Any] = field(default_factory=dict)  # for a preset or function that takes arguments


@dataclasses.dataclass(frozen=True)
class Judge:
  """Read by methods that ask about rollouts: draco, cliff, taspo, shaping; the encoder by scpo; and by a funnel."""

  backend: Literal["rules", "endpoint", "policy"] | None = None  # the environment's own rules, a server, the policy
  base_url: str | None = None  # of the endpoint: http://127.0.0.1:8000/v1
  model: str | None = None  # of the endpoint
  api_key_env: str | None = None  # the environment variable that holds the endpoint's key
  body: dict[str, Any] = field(default_factory=dict)  # more keys of the endpoint's requests; null takes one out
  votes: Count = 1  # times that each verdict is asked for
  temperature: NonNegative = 0.1  # of its replies
  max_tokens: Count = 2048  # of a reply
  context: Count = 4096  # policy: tokens of a question and its reply, which the engine must hold
  timeout: Positive = 120.0  # seconds of a call
  retries: Natural = 4  # of a call to the endpoint that failed
  concurrency: Count = 16  # calls in flight
  cache: str | None = "auto"  # folder of the endpoint's replies; auto: in the run's folder; null: none
  encoder: str | None = None  # of sentences: a folder, package:NAME/FOLDER, or my_package.module:encode


@dataclasses.dataclass(frozen=True)
class Optimizer:
  name: Literal["adamw", "muon"] = "adamw"  # muon: for hidden matrices, at AdamW's scale; AdamW for the rest
  learning_rate: NonNegative = 1e-6
  schedule: Literal["constant", "cosine", "linear"] = "constant"
  warmup: Natural = 0  # updates
  b1: Decay = 0.9
  b2: Decay = 0.999
  momentum: Decay = 0.95  # of Muon
  eps: Positive = 1e-8
  weight_decay: NonNegative = 0.0
  clip: Positive | None = 1.0  # global norm


@dataclasses.dataclass(frozen=True)
class Critic:
  init: Literal["policy", "fresh"] | None = None  # its trunk: a copy of the first policy's, or random; null: no critic
  init_from: str | None = None  # a finished run with a critic: its newest values instead
  learning_rate_multiple: Positive = 10.0  # of optimizer.learning_rate
  optimizer: dict[str, Any] = field(default_factory=dict)  # keys of `optimizer` in which the critic's chain differs
  epochs: Count = 1  # its passes over each batch of rollouts
  minibatches: Count = 1  # its updates a pass
  value_clip: Positive | None = 0.2  # in units of reward, around the values before the update; null: no clip
  warmup_steps: Natural = 0  # first steps, in which the critic makes `warmup_epochs` passes
  warmup_epochs: Count = 1
  warmup_freezes_policy: bool = True  # in those steps only the critic is updated
  bootstrap_truncated: bool = False  # a rollout that was cut off is worth its last state's value in addition


@dataclasses.dataclass(frozen=True)
class Training:
  epochs: Count = 1  # passes over each batch of rollouts
  minibatches: Count = 1  # optimizer updates a pass
  microbatch_rows: Count = 8  # packed rows whose gradient is computed at once
  row_tokens: Count | None = None  # length of a packed row; default rollout.max_tokens
  logprob_chunk: Count = 1024  # tokens whose logits exist at once
  backprop_windows: Count | None = None  # prefix sliding: train on the prefix and this many windows; the loss: the last


@dataclasses.dataclass(frozen=True)
class Evaluation:
  every: Natural = 0  # steps; 0: only before and after
  tasks: Natural = 200  # 0: no evaluation
  temperature: NonNegative = 0.0
  samples: Count = 1


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Sizes of the mesh axes; -1 takes the devices that are left."""

  data: AxisSize = -1
  fsdp: AxisSize = 1
  tensor: AxisSize = 1
  expert: AxisSize = 1


@dataclasses.dataclass(frozen=True)
class Tracking:
  tensorboard: bool = True
  wandb: str | None = None  # project
  rollouts_every: Natural = 1  # steps between stored batches of rollouts; 0: none
  show: Natural = 2  # rollouts of each step in readable form
  gap_warning: Positive = 0.1  # nats of logp_gap/max above which a warning is printed


@dataclasses.dataclass(frozen=True)
class Config:
  run: Run = field(default_factory=Run)
  model: Model = field(default_factory=Model)
  env: Env = field(default_factory=Env)
  rollout: Rollout = field(default_factory=Rollout)
  scheduling: Scheduling = field(default_factory=Scheduling)
  sft: Sft = field(default_factory=Sft)
  method: MethodSection = field(default_factory=MethodSection)
  judge: Judge = field(default_factory=Judge)
  funnel: Funnel = field(default_factory=Funnel)
  optimizer: Optimizer = field(default_factory=Optimizer)
  critic: Critic = field(default_factory=Critic)
  training: Training = field(default_factory=Training)
  evaluation: Evaluation = field(default_factory=Evaluation)
  mesh: Mesh = field(default_factory=Mesh)
  tracking: Tracking = field(default_factory=Tracking)
  seed: Seed = 0


class ConfigError(ValueError):
  """One line for the user: which key or file, what was wrong, what was got, what is valid."""


def load(path: str | os.PathLike | None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
  """The config of a YAML file (None: the defaults), changed by `overrides` and checked.

  `overrides` are `["--rollout.samples", "4", "--seed=3"]` as on a command line, or a mapping with dotted or nested
  keys. Sections merge, values replace; a path into a mapping (`env.options.digits`) sets one key of it. A section that
  has a `name` may be given as that name alone: `env: dataset`. Types are strict: '3' and true are not integers.
  Errors: ConfigError, always one line.
  """
  changes = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
  values = {} if path is None else _flatten(_read(Path(path)), label=f"{path}: ")
  labels = {key: f"{path}: {key}" for key in values}
  for key, value in _flatten(changes, label="--").items():
    leaf = _leaf(key)
    inside = key[len(leaf) + 1 :]
    values[leaf] = _set(values.get(leaf, {}), inside.split("."), value, f"--{key}") if inside else value
    labels[leaf] = f"--{leaf}"
  return _build(values, labels, where="" if path is None else f"{path}: ")


def flat(config: Config) -> dict[str, Any]:
  """Every key, dotted, with its value."""
  return _flatten(dataclasses.asdict(config))


def check(config: Config) -> Config:
  """`config` with every type and range checked, for one that was built in Python. Errors: ConfigError, one line."""
  return _build(_flatten(dataclasses.asdict(config)), {}, where="")


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
  """`["--rollout.samples", "4", "--seed=3"]` -> `{"rollout.samples": 4, "seed": 3}`.

  Values are read as in YAML; of two for one key the last wins.
  """
  changes, rest = {}, list(arguments)
  while rest:
    name, equals, text = rest.pop(0).partition("=")
    key = name.removeprefix("--")
    if key == name or not key:
      raise ConfigError(f"expected --section.key value, got {name!r}")
    if not equals:
      if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{name} needs a value: {name} VALUE or {name}=VALUE")
      text = rest.pop(0)
    changes[key] = _parse(text, name)
  return changes


def to_yaml(config: Config) -> str:
  """The whole config as YAML with the schema's comments; `load` of it gives `config` again."""
  lines, section = [], ""
  for key, value in _flatten(dataclasses.asdict(config)).items():
    head, _, name = key.rpartition(".")
    if head != section and head:
      lines.append(f"{head}:")
    section = head
    line = f"{'  ' if head else ''}{name}: {_dump(value)}"
    lines.append(f"{line}  # {_COMMENTS[key]}" if _COMMENTS[key] else line)
  return "\n".join(lines) + "\n"


def describe() -> str:
  """Every key with its type, default and comment, one a line."""
  types = {key: re.sub(r"\ban? ", "", _wanted(hint)) for key, hint in _KEYS.items()}
  rows = [(key, types[key], _dump(_DEFAULTS[key]), _COMMENTS[key]) for key in _KEYS]
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows)


# Values: YAML 1.2's core schema, where 1e-5 is a float, and no, on and 1:30 are strings.


class _Loader(yaml.SafeLoader):
  yaml_implicit_resolvers: ClassVar[dict] = {}

  def construct_mapping(self, node, deep=False):
    keys = [child.value for child, _ in node.value if child.tag != "tag:yaml.org,2002:merge"]
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
      raise ConfigError(f"line {node.start_mark.line + 1}: key {twice!r} is given twice in one mapping")
    mapping = super().construct_mapping(node, deep)
    if other := [key for key in mapping if not isinstance(key, str)]:
      raise ConfigError(f"line {node.start_mark.line + 1}: keys must be strings, got {other[0]!r}; quote it")
    return mapping

  def construct_int(self, node):
    text = node.value
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
  yaml_implicit_resolvers: ClassVar[dict] = {}

  def ignore_aliases(self, data):
    return True


for _tag, _pattern, _first in (
  ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
  ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
  ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
  ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
  ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
  ("merge", r"<<", ["<"]),
):  # fmt: skip
  for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Dumper.add_representer(float, lambda d, x: d.represent_scalar("tag:yaml.org,2002:float", repr(x)))
_Dumper.add_representer(str, lambda d, s: d.represent_scalar("tag:yaml.org,2002:str", s, '"' if "\n" in s else None))
_Dumper.add_representer(tuple, lambda d, x: d.represent_list(x))


def _dump(value: Any) -> str:
  """A value on one line."""
  style = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": float("inf")}
  text = yaml.dump(value, Dumper=_Dumper, **style)
  return text.removesuffix("...\n").strip()


def _parse(text: str, label: str) -> Any:
  """The value of an override; a plain scalar keeps its "#" and ":"."""
  try:
    if text.lstrip().startswith(("[", "{", '"', "'")):
      return yaml.load(text, _Loader)
    loader, scalar = _Loader(""), text.strip()
    tag = loader.resolve(yaml.ScalarNode, scalar, (True, False))
    return text if tag.endswith(":str") else loader.construct_object(yaml.ScalarNode(tag, scalar))
  except ConfigError as error:
    raise ConfigError(f"{label}: {error}") from None
  except (yaml.YAMLError, ValueError, RecursionError) as error:
    raise ConfigError(f"{label}: {_shown(text)} is not valid YAML: {_one_line(error)}") from None


def _read(path: Path) -> Mapping[str, Any]:
  try:
    values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
  except FileNotFoundError:
    raise ConfigError(f"{path}: no such file") from None
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path}: cannot be read as text: {_one_line(error)}") from None
  except ConfigError as error:
    raise ConfigError(f"{path}: {error}") from None
  except (yaml.YAMLError, ValueError, RecursionError) as error:
    raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
  if not isinstance(values, Mapping | None):
    raise ConfigError(f"{path}: must be a mapping of sections, got {_shown(values)}")
  return values or {}


def _one_line(error: Exception) -> str:
  if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
    return f"line {error.problem_mark.line + 1}: {error.problem}"
  return " ".join(str(error).split())


# Keys: a config is a flat mapping of dotted keys until its types are checked.


def _schema() -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
  """Type, default and comment of every dotted key."""
  hints, defaults, comments = {}, {}, {}
  for part in dataclasses.fields(Config):
    section = dataclasses.is_dataclass(part.type)
    for item in dataclasses.fields(part.type) if section else [part]:
      key = f"{part.name}.{item.name}" if section else item.name
      hints[key] = item.type
      defaults[key] = item.default if item.default is not dataclasses.MISSING else item.default_factory()
      comments[key] = _comments(part.type if section else Config).get(item.name, "")
  return hints, defaults, comments


@functools.cache
def _comments(cls: type) -> dict[str, str]:
  """The comment at the end of each field's line; none where the source is not there."""
  try:
    source = inspect.getsource(cls)
  except OSError:
    return {}
  lines = tokenize.generate_tokens(io.StringIO(source).readline)
  comments = {token.start[0]: token.string.lstrip("# ") for token in lines if token.type == tokenize.COMMENT}
  fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
  return {node.target.id: comments[node.end_lineno] for node in fields if node.end_lineno in comments}


_KEYS, _DEFAULTS, _COMMENTS = _schema()
_SECTIONS = tuple(f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type))


def _flatten(values: Mapping[str, Any], prefix: str = "", label: str = "") -> dict[str, Any]:
  """Nested or dotted sections -> dotted keys; `--` before a key names an override."""
  flat = {}
  for name, value in values.items():
    key = f"{prefix}{name}"
    if key in _SECTIONS and not isinstance(value, Mapping | None):
      if f"{key}.name" not in _KEYS or not isinstance(value, str):
        raise ConfigError(f"{label}{key} must be a mapping of its keys, got {_shown(value)}")
      value = {"name": value}
    new = _flatten(value or {}, f"{key}.", label) if key in _SECTIONS else {key: value}
    for leaf in new:
      if _leaf(leaf) is None:
        raise ConfigError(f"{label}{leaf} is not a key of the config; the nearest is {_nearest(leaf)}")
      if leaf in flat:
        raise ConfigError(f"{label}{leaf} is given twice")
    flat |= new
  return flat


def _leaf(key: str) -> str | None:
  """The schema's key that `key` is, or is a part of."""
  inside = (k for k, hint in _KEYS.items() if typing.get_origin(hint) is dict and key.startswith(f"{k}."))
  return key if key in _KEYS else next(inside, None)


def _nearest(key: str) -> str:
  def likeness(other):
    ratio = difflib.SequenceMatcher(None, key, other).ratio()
    return ratio + difflib.SequenceMatcher(None, key.split(".")[-1], other.split(".")[-1]).ratio()

  return max((*_KEYS, *_SECTIONS), key=likeness)


def _set(tree: Any, path: list[str], value: Any, label: str) -> dict[str, Any]:
  if not isinstance(tree, Mapping):
    raise ConfigError(f"{label} sets a key of a mapping, but there stands {_shown(tree)}")
  head, *rest = path
  return {**tree, head: _set(tree.get(head, {}), rest, value, label) if rest else value}


# Checks


@functools.cache
def _adapter() -> pydantic.TypeAdapter:
  return pydantic.TypeAdapter(Config)


def _build(values: Mapping[str, Any], labels: Mapping[str, str], where: str) -> Config:
  tree = {}
  for key, value in values.items():
    _check_finite(value, labels.get(key, key))
    section, _, name = key.rpartition(".")
    (tree.setdefault(section, {}) if section else tree)[name] = value
  try:
    config = _adapter().validate_json(json.dumps(tree), strict=True)
  except pydantic.ValidationError as error:
    first = error.errors()[0]
    size = 2 if first["loc"][0] in _SECTIONS else 1
    key = ".".join(first["loc"][:size])
    raise ConfigError(f"{labels.get(key, key)} must be {_wanted(_KEYS[key])}, got {_shown(values[key])}") from None
  for ok, message in _relations(config):
    if not ok:
      raise ConfigError(f"{where}{message}")
  return config


def _check_finite(value: Any, label: str) -> None:
  try:
    json.dumps(value, allow_nan=False)
  except (TypeError, ValueError, RecursionError):
    kinds = "finite numbers, strings, booleans, nulls, lists and mappings"
    raise ConfigError(f"{label} must be made of {kinds}, got {_shown(value)}") from None


def _wanted(hint: Any) -> str:
  """A type in words, as it stands after "must be"."""
  words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if hint in words:
    return words[hint]
  if origin is Annotated:
    return arguments[-1]
  if origin is Literal:
    return "one of " + ", ".join(map(str, arguments))
  if origin in (tuple, dict):
    return "a list of strings" if origin is tuple else "a mapping"
  return " or ".join(_wanted(a) for a in arguments)


def _shown(value: Any) -> str:
  try:
    text = json.dumps(value, ensure_ascii=False)
  except (TypeError, ValueError, RecursionError):
    text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."


def _relations(c: Config) -> list[tuple[bool, str]]:
  """What must hold between values, each with the line to print if it does not."""
  rollouts, row = c.rollout.prompts * c.rollout.samples, c.training.row_tokens
  turn, episode = c.rollout.max_turn_tokens, c.rollout.max_tokens
  axes = [getattr(c.mesh, f.name) for f in dataclasses.fields(Mesh)]
  return [
    (turn <= episode, f"rollout.max_turn_tokens must be at most rollout.max_tokens = {episode}, got {turn}"),
    (
      rollouts % c.training.minibatches == 0,
      f"training.minibatches must divide rollout.prompts * rollout.samples = {rollouts}, got {c.training.minibatches}",
    ),
    (
      row is None or row >= episode,
      f"training.row_tokens must be at least rollout.max_tokens = {episode}, or null, got {row}",
    ),
    (
      rollouts % c.critic.minibatches == 0,
      f"critic.minibatches must divide rollout.prompts * rollout.samples = {rollouts}, got {c.critic.minibatches}",
    ),
    (
      not c.critic.warmup_steps or c.critic.warmup_freezes_policy or c.critic.warmup_epochs != c.critic.epochs,
      f"critic.warmup_steps {c.critic.warmup_steps} changes nothing: freeze the policy, or set critic.warmup_epochs to"
      " other than critic.epochs",
    ),
    *_critic_options(c),
    (0 not in axes, f"mesh sizes must be at least 1, or -1 for the devices that are left, got {axes}"),
    (axes.count(-1) <= 1, f"only one mesh size can be -1 (the devices that are left), got {axes}"),
    (all(c.rollout.stop), "rollout.stop must hold no empty string: every text contains it"),
    *_judge_options(c),
    (
      c.sft.filter != "pareto" or c.sft.source != "demonstrations",
      "sft.filter pareto chooses among the rollouts of a task; set sft.source to a run",
    ),
    (
      c.run.steps % c.funnel.round_steps == 0,
      f"funnel.round_steps must divide run.steps = {c.run.steps}, got {c.funnel.round_steps}",
    ),
  ]


def _judge_options(c: Config) -> list[tuple[bool, str]]:
  """What the judge's backend needs, and what only others read."""
  j, readers = c.judge, dict.fromkeys(("base_url", "model", "api_key_env", "body", "retries", "cache"), ("endpoint",))
  readers |= dict.fromkeys(("votes", "temperature", "max_tokens", "timeout"), ("endpoint", "policy"))
  readers |= {"context": ("policy",), "concurrency": ("rules", "endpoint", "policy")}
  unread = [k for k, who in readers.items() if j.backend not in who and getattr(j, k) != _DEFAULTS[f"judge.{k}"]]
  found = [
    (False, f"judge.{k} is read by judge.backend {' or '.join(readers[k])}, got backend {_shown(j.backend)}")
    for k in unread
  ]
  for key in ("base_url", "model"):
    needed = j.backend == "endpoint"
    found.append((not needed or bool(getattr(j, key)), f"judge.backend endpoint needs judge.{key}"))
  return [
    *found,
    (
      j.backend != "policy" or j.max_tokens < j.context,
      f"judge.max_tokens must be less than judge.context = {j.context}, which holds the question too,"
      f" got {j.max_tokens}",
    ),
    (
      j.backend != "policy" or j.votes == 1 or j.temperature > 0,
      "judge.votes above 1 need judge.temperature above 0: greedy votes are all the same",
    ),
  ]


def _critic_options(c: Config) -> list[tuple[bool, str]]:
  """What critic.optimizer may change of the section optimizer."""
  hints, found = {k.removeprefix("optimizer."): h for k, h in _KEYS.items() if k.startswith("optimizer.")}, []
  for key, value in c.critic.optimizer.items():
    if key == "learning_rate":
      found.append((False, "critic.optimizer.learning_rate is not a key; set critic.learning_rate_multiple"))
    elif key not in hints:
      found.append((False, f"critic.optimizer.{key} is not a key of the section optimizer: {', '.join(hints)}"))
    else:
      wanted = f"critic.optimizer.{key} must be {_wanted(hints[key])}, got {_shown(value)}"
      found.append((fits(hints[key], value), wanted))
  return found


def fits(hint: Any, value: Any) -> bool:
  """Whether a value is of a type and in its range, strictly: '3' and true are not integers."""
  try:
    pydantic.TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
  except pydantic.ValidationError:
    return False
  return True
