"""One episode, token-in token-out.

The first observation is rendered and opens a session; what the model samples is kept exactly as sampled; what the
environment says is tokenised and appended as context. Nothing is rendered twice: each turn extends the stream.
"""

import asyncio
import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxagent.envs.base import Action, Environment, Observation, Step
from jaxagent.models.chat import Chat, parse
from jaxagent.sampling.request import Sampling
from jaxagent.types import Completion, Trajectory

COIN = 2**20  # stream of an episode's key, beyond those of its agents


@dataclasses.dataclass(frozen=True)
class Limits:
  """Of an episode: turns of each agent, tokens of each agent's stream (prompt included), and seconds that the
  environment may take over the whole episode (None: no limit; the sampler's time is not counted)."""

  max_turns: int = 4
  max_tokens: int = 256
  timeout: float | None = None

  def __post_init__(self):
    for name, least in (("max_turns", 1), ("max_tokens", 2)):
      if getattr(self, name) < least:
        raise ValueError(f"Limits.{name} must be at least {least}, got {getattr(self, name)}")
    if self.timeout is not None and self.timeout <= 0:
      raise ValueError(f"Limits.timeout must be positive seconds or None, got {self.timeout}")


async def run_episode(
  engine,
  chat: Chat,
  environment: Environment,
  seed: int,
  *,
  sampling: Sampling,
  limits: Limits,
  key,
  task: int = 0,
  group: int = 0,
  rollout: int = 0,
  env: int = 0,
) -> list[Trajectory]:
  """What happened, as one trajectory per agent, in the agents' order. `environment` is reset with `seed` and closed.

  status: "done" when the environment says so; "truncated" by a limit or when the last turn was cut, with the outcome
  that the environment gave; "failed", with `cause`, when the environment raised, overran its time, or said so.
  `sampling.max_tokens` bounds a turn; `chat.eot` always ends one. The key of an agent's session is (key, agent).

  ValueError: limits beyond the engine's capacity; a prompt that leaves no room to act (`PromptTooLong`); a tool format
  that is not the chat's. The engine's errors are raised.
  """
  record = Trajectory(task, group, rollout, env=env, temperature=sampling.temperature)
  if limits.max_tokens > engine.capacity:
    raise ValueError(
      f"rollout.max_tokens={limits.max_tokens} is more than the engine's capacity of {engine.capacity}; give the engine"
      " that capacity, or lower rollout.max_tokens"
    )
  play = _Play(engine, chat, sampling, limits, key, record, _parser(chat, environment))
  call = _Calls(environment, limits.timeout)
  try:
    end = await play.run(call, seed)
  except EnvironmentFailure as failure:
    end = Step(status="failed", cause=str(failure))
  finally:
    play.close()
    await _close(environment, limits.timeout, task)
  return play.finish(end)


class PromptTooLong(ValueError):
  """A first prompt leaves no room to act."""


class EnvironmentFailure(Exception):
  """The environment broke: the rollout is invalid, the others go on."""


@dataclasses.dataclass
class _Calls:
  """Calls of the environment's methods, within its time; whatever they raise becomes an `EnvironmentFailure`."""

  environment: Environment
  timeout: float | None
  used: float = 0.0

  async def __call__(self, method: str, argument: Any) -> Any:
    start = time.monotonic()
    left = None if self.timeout is None else max(self.timeout - self.used, 0.0)
    try:
      async with asyncio.timeout(left) as deadline:
        return await getattr(self.environment, method)(argument)
    except TimeoutError as error:
      if deadline.expired():
        raise EnvironmentFailure(f"{method}: the environment took longer than {self.timeout} s in all") from error
      raise EnvironmentFailure(f"{method}: TimeoutError: {error}") from error
    except Exception as error:
      raise EnvironmentFailure(f"{method}: {type(error).__name__}: {error}") from error
    finally:
      self.used += time.monotonic() - start


@dataclasses.dataclass
class _Seat:
  """One agent's stream. `ended`: its last turn ended with the end of turn; `full`: the engine has no room left.

  `openings` of the last observation; `forced`: places of the tokens that were drawn from such, None if none ever were.
  """

  trajectory: Trajectory
  session: Any
  openings: tuple[str, ...] = ()
  forced: list[int] | None = None
  ended: bool = True
  full: bool = False


@dataclasses.dataclass
class _Play:
  engine: Any
  chat: Chat
  sampling: Sampling
  limits: Limits
  key: Any
  record: Trajectory  # what all agents' trajectories start from
  parse: Callable[[str], tuple]
  seats: dict[int, _Seat] = dataclasses.field(default_factory=dict)
  steps: int = 0  # that the environment has taken

  def __post_init__(self):
    stop_ids = tuple(dict.fromkeys((*self.sampling.stop_ids, self.chat.eot)))
    self.sampling = dataclasses.replace(self.sampling, stop_ids=stop_ids)

  async def run(self, call: _Calls, seed: int) -> Step:
    step = Step(observations=await call("reset", seed))
    while True:
      if not step.observations:
        raise EnvironmentFailure("the environment is running but gave no observations")
      if not all([self.read(agent, observation) for agent, observation in step.observations.items()]):
        return dataclasses.replace(step, status="truncated", cause="max_tokens")
      agents = sorted(step.observations)
      actions = dict(zip(agents, await asyncio.gather(*map(self.act, agents))))
      step = self.take(await call("step", actions), actions)
      self.steps += 1
      if step.status != "running":
        return step
      if any(self.turns(agent) >= self.limits.max_turns for agent in step.observations):
        return dataclasses.replace(step, status="truncated", cause="max_turns")

  def turns(self, agent: int) -> int:
    return self.seats[agent].trajectory.turns if agent in self.seats else 0

  def read(self, agent: int, observation: Observation) -> bool:
    """Appends what the agent observed; False, with nothing appended, where that would leave no room to act."""
    seat = self.seats.get(agent)
    if seat is None:
      self.seats[agent] = seat = self.open(agent, observation)
    else:
      ids = self.chat.continuation(observation.messages, ended=seat.ended)
      if seat.full or len(seat.trajectory.tokens) + len(ids) >= self.limits.max_tokens:
        return False
      seat.trajectory.append_context(ids)
      seat.session.append(ids)
    seat.trajectory.transcript.extend(observation.messages)
    seat.openings = observation.openings
    return True

  def open(self, agent: int, observation: Observation) -> _Seat:
    ids = self.chat.render(observation.messages, observation.tools)
    if len(ids) >= self.limits.max_tokens:
      raise PromptTooLong(
        f"the prompt of task {self.record.task} has {len(ids)} tokens, which leaves no room to act within"
        f" rollout.max_tokens={self.limits.max_tokens}; raise rollout.max_tokens or shorten the prompt"
      )
    trajectory = dataclasses.replace(self.record, agent=agent, **_fresh_lists())
    trajectory.append_context(ids)
    return _Seat(trajectory, self.engine.open(ids, key=self.key, index=agent))

  async def act(self, agent: int) -> Action:
    seat = self.seats[agent]
    room = self.limits.max_tokens - len(seat.trajectory.tokens)
    rules = dataclasses.replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
    completion: Completion = await (self.begun(agent, rules) if seat.openings else seat.session.sample(rules))
    if not len(completion.ids):
      raise ValueError(f"the engine sampled no tokens for task {self.record.task} (finish={completion.finish!r})")
    seat.trajectory.append_action(completion, step=self.steps)
    cut = completion.finish != "stop"
    seat.full = completion.finish == "capacity"
    last = int(completion.ids[-1])
    seat.ended = not cut and last == self.chat.eot
    words = completion.ids[:-1] if not cut and last in self.sampling.stop_ids else completion.ids
    text = self.chat.tokenizer.decode(words)
    seat.trajectory.transcript.append({"role": "assistant", "content": text})
    return Action(text, self.parse(text), truncated=cut)

  async def begun(self, agent: int, rules: Sampling) -> Completion:
    """A turn whose first token a coin draws from those of the openings, whatever the policy thinks of it."""
    seat = self.seats[agent]
    ids = [self.chat.tokenizer.encode(text)[0] for text in seat.openings]
    if len(set(ids)) < len(ids):
      raise ValueError(f"the openings {seat.openings} do not begin with different tokens; choose other words")
    coin = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(self.key, COIN), agent), self.steps)
    drawn = ids[int(jax.random.randint(coin, (), 0, len(ids)))]
    seat.forced = [*(seat.forced or []), len(seat.trajectory.tokens)]
    first = await seat.session.sample(dataclasses.replace(rules, max_tokens=1, allowed=(drawn,)))
    first = dataclasses.replace(first, logp_sampled=np.full(1, -math.log(len(ids)), first.logp_sampled.dtype))
    if rules.max_tokens == 1 or first.finish != "length":
      return first
    return _joined(first, await seat.session.sample(dataclasses.replace(rules, max_tokens=rules.max_tokens - 1)))

  def take(self, step: Step, actions: dict[int, Action]) -> Step:
    """Records the turn's rewards; a fault of the environment in them is an `EnvironmentFailure`."""
    if strangers := set(step.turn_rewards) - set(actions):
      raise EnvironmentFailure(f"the environment rewarded agents {sorted(strangers)}, which did not act")
    numbers = {"outcome": step.outcome, **{f"turn reward of agent {a}": r for a, r in step.turn_rewards.items()}}
    for name, value in numbers.items():
      if not math.isfinite(value):
        raise EnvironmentFailure(f"the environment's {name} is {value}")
    for agent in actions:
      self.seats[agent].trajectory.turn_reward.append(float(step.turn_rewards.get(agent, 0.0)))
    if step.status == "done" and any(action.truncated for action in actions.values()):
      return dataclasses.replace(step, status="truncated", cause=step.cause or "the last turn was cut")
    return step

  def close(self) -> None:
    for seat in self.seats.values():
      seat.session.close()

  def finish(self, end: Step) -> list[Trajectory]:
    trajectories = [self.seats[agent].trajectory for agent in sorted(self.seats)]
    trajectories = trajectories or [dataclasses.replace(self.record, **_fresh_lists())]
    for trajectory in trajectories:
      trajectory.status = end.status
      trajectory.cause = end.cause or ("the environment reported a failure" if end.status == "failed" else "")
      trajectory.outcome = 0.0 if end.status == "failed" else float(end.outcome)
      trajectory.turn_reward += [0.0] * (trajectory.turns - len(trajectory.turn_reward))
      trajectory.columns.update(end.info.get("columns", {}))
      seat = self.seats.get(trajectory.agent)
      if seat is not None and seat.forced is not None:
        trajectory.columns["forced"] = np.isin(np.arange(len(trajectory.tokens)), seat.forced)
      if end.info:
        trajectory.transcript.append({"role": "environment", "content": repr(end.info)})
    return trajectories


def _joined(first: Completion, rest: Completion) -> Completion:
  """Two calls that sampled one turn."""
  both = {}
  for field in ("ids", "logp_rollout", "logp_sampled", "version", "entropy", "routing"):
    parts = [getattr(first, field), getattr(rest, field)]
    both[field] = None if any(part is None for part in parts) else np.concatenate(parts)
  return Completion(finish=rest.finish, **both)


def _fresh_lists() -> dict[str, Any]:
  made = [f for f in dataclasses.fields(Trajectory) if f.default_factory is not dataclasses.MISSING]
  return {f.name: f.default_factory() for f in made}


def _parser(chat: Chat, environment: Environment) -> Callable[[str], tuple]:
  wanted = getattr(environment, "tool_format", None)
  if wanted is None:
    return lambda text: ()
  if wanted not in ("chat", chat.tool_format):
    raise ValueError(
      f"{type(environment).__name__} wants tool calls as {wanted!r}, but the chat shows the model {chat.tool_format!r};"
      f" set model.tool_format to {wanted!r}, or the environment's tool_format to 'chat', which follows it"
    )
  return lambda text: tuple(parse(text, chat.tool_format))


async def _close(environment: Environment, timeout: float | None, task: int) -> None:
  """The episode's result stands whatever `close` does; a failure to close is reported."""
  try:
    async with asyncio.timeout(timeout):
      await environment.close()
  except Exception as error:
    warnings.warn(f"closing the environment of task {task} failed: {type(error).__name__}: {error}", stacklevel=2)
