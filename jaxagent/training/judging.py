"""The section `judge` of a config: which of a method's columns it provides, and the judge itself."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from jaxagent.config import Config
from jaxagent.envs.base import Tasks
from jaxagent.envs.importing import attribute
from jaxagent.judges import (
  Cache,
  Endpoint,
  FirstError,
  Guidance,
  Judge,
  Matches,
  Panel,
  PolicyJudge,
  Progress,
  Rubric,
  Rules,
)
from jaxagent.methods import Given, Method
from jaxagent.methods.objective import Annotator
from jaxagent.models.chat import Chat
from jaxagent.models.encoder import load_encoder
from jaxagent.sampling.engine import Engine
from jaxagent.training.annotate import Tools

# who provides the columns that a preset leaves to the caller
PROVIDERS: dict[tuple[str, ...], Callable[[], Annotator]] = {
  ("verdict", "step_quality"): Rubric,
  ("first_error",): FirstError,
  ("logp_privileged",): Guidance,
  ("potential",): Progress,
  ("anchor", "step_credit"): Matches,
}
KEYS = {
  "judge": "judge.backend (rules, endpoint or policy)",
  "encoder": "judge.encoder (a folder, package:NAME/FOLDER, or my_package.module:encode)",
}


def with_judge(config: Config, method: Method, tasks: Tasks, *, own_tasks: bool = False) -> Method:
  """`method`, what it leaves to the caller provided by the judge and the encoder that the config names.

  `own_tasks`: they are one of jaxagent's environments, whose `columns` are all that its rollouts bring.
  ValueError: a judge, or an encoder, that nothing uses; or, among own tasks, none for a method that needs one.
  """
  named = {"judge": config.judge.backend is not None, "encoder": config.judge.encoder is not None}
  annotators = tuple(_provided(annotator, named) for annotator in method.annotators)
  if own_tasks:
    for annotator in annotators:
      _check_provided(config, annotator, getattr(tasks, "columns", ()))
  known = all(isinstance(a, Given) or hasattr(a, "uses") for a in annotators)
  used = {name for annotator in annotators for name in getattr(annotator, "uses", ())}
  used |= {"judge"} if config.funnel.reflect == "judge" else set()
  for name, given in named.items():
    if given and known and name not in used:
      key = "judge.backend" if name == "judge" else "judge.encoder"
      raise ValueError(f"{key} is set, but method {config.method.name} asks no {name}; set it to null")
    if name in used and not given:
      raise ValueError(f"method {config.method.name} asks a {name}: set {KEYS[name]}")
  return dataclasses.replace(method, annotators=annotators)


def _provided(annotator: Annotator, named: dict[str, bool]) -> Annotator:
  if not isinstance(annotator, Given) or annotator.source is not None or annotator.columns not in PROVIDERS:
    return annotator
  provider = PROVIDERS[annotator.columns]()
  return provider if all(named[name] for name in provider.uses) else annotator


def _check_provided(config: Config, annotator: Annotator, columns: tuple[str, ...]) -> None:
  if isinstance(annotator, Given) and annotator.source is None and annotator.columns in PROVIDERS:
    if not set(annotator.columns) <= set(columns):
      needed = " and ".join(KEYS[name] for name in PROVIDERS[annotator.columns]().uses)
      raise ValueError(
        f"method {config.method.name} reads {', '.join(annotator.columns)}, which environment {config.env.name} does"
        f" not provide: set {needed}"
      )


def check_judge(config: Config, tasks: Tasks) -> None:
  """What keeps the judge from being asked, before anything runs."""
  if config.judge.backend == "rules" and not hasattr(tasks, "judge"):
    raise ValueError(
      f"judge.backend is rules, but environment {config.env.name} has none (a method judge(question) of its tasks);"
      " set it to endpoint or policy"
    )
  if config.judge.backend == "endpoint":
    _endpoint(config)


def build_tools(config: Config, chat: Chat, engine: Engine, tasks: Tasks) -> Tools:
  """What annotators may use. Where `judge.cache` is still "auto", no run's folder keeps the replies."""
  c = config.judge
  encoder = None if c.encoder is None else build_encoder(c.encoder)
  if c.backend is None:
    return Tools(chat, engine, None, encoder)
  folder = None if c.cache == "auto" else c.cache
  kept = Cache(folder) if folder is not None and c.backend == "endpoint" else None
  judge = _backend(config, chat, engine, tasks)
  return Tools(chat, engine, Panel(judge, votes=c.votes, cache=kept, concurrency=c.concurrency), encoder)


def build_encoder(spec: str) -> Callable[..., Any]:
  """A folder, `package:NAME/FOLDER`, or `my_package.module:encode`, a function of texts."""
  if ":" in spec and not spec.startswith("package:"):
    return attribute(spec, what="judge.encoder")
  try:
    return load_encoder(spec)
  except (FileNotFoundError, ValueError) as error:
    raise ValueError(f"judge.encoder: {error}") from None


def _backend(config: Config, chat: Chat, engine: Engine, tasks: Tasks) -> Judge:
  c = config.judge
  if c.backend == "rules":
    return Rules(tasks.judge)  # type: ignore[attr-defined]
  if c.backend == "endpoint":
    return _endpoint(config)
  return PolicyJudge(chat, engine, c.temperature, c.max_tokens, c.timeout, config.seed)


def _endpoint(config: Config) -> Endpoint:
  c = config.judge
  key = None if c.api_key_env is None else os.environ.get(c.api_key_env)
  if c.api_key_env is not None and not key:
    raise ValueError(f"judge.api_key_env names {c.api_key_env}, which is not set in the environment")
  return Endpoint(
    c.base_url, c.model, key, temperature=c.temperature, max_tokens=c.max_tokens, timeout=c.timeout, retries=c.retries,
    seed=config.seed, votes=c.votes, body=c.body,
  )  # fmt: skip
