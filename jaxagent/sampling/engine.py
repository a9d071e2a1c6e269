"""The engine: many token streams, a fixed number of cache rows, few device programs.

A *session* is one token stream. Its tokens are on the host; all but the last of them are *processed* into a row of the
device's cache before the next one is sampled. Work goes in *calls*, each one prefill or up to K decoding steps over all
the rows that are ready. Between calls rows are freed and filled again.

The policy's cache must overwrite what it stored at a position when that position is processed again, and a token must
attend only to stored positions up to its own; then a row can be reused, cut back, or copied from a stream that begins
the same way, without being cleared. A row is cut back by fewer tokens than one call has steps.
"""

import asyncio
import collections
import dataclasses
import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxagent.models.policy import Policy
from jaxagent.models.sharding import transfer
from jaxagent.sampling import calls, programs, rules
from jaxagent.sampling.calls import Call
from jaxagent.sampling.request import Sampling
from jaxagent.sampling.rows import SHARE, Offloaded, Rows
from jaxagent.sampling.session import Busy, Participant, Session, Turn, participants
from jaxagent.types import Completion


@dataclasses.dataclass(frozen=True)
class _Job:
  """A planned call with what it runs under: moves of rows that come first, weights, and the state of both."""

  call: Call
  moves: tuple[Callable, ...]  # cache -> cache
  weights: Any
  version: int
  generation: int  # of the cached keys


class Engine:
  """Samples from a policy: many streams at once, in `slots` cache rows of `capacity` tokens each.

  The rows of a policy whose every layer slides have a fixed size: `capacity` only says how long a stream may get.

      out = engine.generate(prompts, n=8, sampling=Sampling(temperature=1.0, max_tokens=512))   # [prompt][sample]

      session = engine.open(prompt_ids)                                                         # several turns
      turn = await session.sample(Sampling(stop_ids=(2,)))
      session.append(tool_result_ids)

  Streams that begin alike share the work: what a row holds of a common beginning (16 tokens or more) is copied, so the
  prompt of a group is processed once. Keys belong to the weights that made them: `load` ends the sharing.

  Randomness: the uniform of a token is a function of its session's key and its position in the stream alone. So a
  result does not depend on what else is in flight, on slots or on K, but for rounding in the last bits of the logits.
  With `lockstep` the asynchronous front is deterministic bit for bit: see `Participant`; what ended sessions hold is
  then forgotten once none is left.

  Log-probs are those of the policy at temperature T (see `rules.sample`); every limit and rule is traced, and shapes
  are few: at most three of prefill and two of decode, whatever the lengths.

  Memory: the cache and `policy.prepare(params)`, whose arrays may be those of `params`: after donating these to another
  computation, `load` before sampling again.

  `mesh`: what the engine runs on, by default the mesh of the parameters. Prepared weights lie on it by the trainer's
  rules, but for "fsdp", over which decoding would gather them in every step: a ValueError names one that does not fit.
  Rows of the cache are split over "data" and "fsdp", key heads over "tensor", where their numbers divide. The
  parameters may be on another mesh, also in `load`: see `sharding.transfer`.
  `offload`: sessions whose keys may rest in host memory when others need their rows, at `row_bytes` each; the tokens of
  more are processed again. `prefill_tokens`: about what one prefill call processes; raise it on large accelerators.
  `tokenizer`: anything with `decode(ids) -> str`; needed by stop strings only. `max_pending` bounds the requests in
  flight; one more is `Busy`, a RuntimeError.
  """

  def __init__(
    self,
    policy: Policy,
    params: Any,
    *,
    tokenizer: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    slots: int = 64,
    capacity: int = 1024,
    seed: int = 0,
    steps_per_call: int = calls.STEPS_PER_CALL,
    prefill_tokens: int = calls.PREFILL_TOKENS,
    offload: int | None = None,
    max_pending: int | None = None,
    lockstep: bool = True,
    version: int = 0,
  ):
    sizes = {"slots": slots, "capacity": capacity, "steps_per_call": steps_per_call, "prefill_tokens": prefill_tokens}
    for name, value in sizes.items():
      least = 2 if name == "capacity" else 1
      if value < least:
        raise ValueError(f"Engine's {name} must be at least {least}, got {value}")
    if policy.rewind is not None and steps_per_call > policy.rewind:
      raise ValueError(
        f"Engine's steps_per_call must be at most {policy.rewind}, the tokens by which this policy's rows can be cut"
        f" back, got {steps_per_call}; lower it, or build the policy with a larger rewind"
      )
    self.policy, self.tokenizer, self.slots, self.capacity = policy, tokenizer, slots, capacity
    self.version = version
    self._offload = slots if offload is None else offload
    self._steps, self._max_pending, self._lockstep = steps_per_call, max_pending, lockstep
    self._key = jax.random.key(seed)
    self._opened, self._calls, self._order, self._entered = collections.Counter(), 0, 0, 0
    self._rows = Rows(policy, slots)
    self._offloaded: dict[Session, None] = {}  # in the order in which they lost their rows
    self._moves: list[Callable] = []  # cache -> cache, before the next call
    self._turns: dict[Turn, None] = {}  # in flight, in the order of submission
    self._participants: list[Participant] = []
    self._generation, self._prefilled, self._busy = 0, False, False
    self._lock = threading.Lock()
    self._driver: asyncio.Task | None = None
    self._wake: asyncio.Event | None = None
    self._shapes = calls.prefill_shapes(slots, capacity, prefill_tokens)
    self._build(mesh, params)

  def _build(self, mesh, params) -> None:
    params = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf), params)
    mesh = mesh or _mesh_of(params)
    self._described = _description(params)
    sizes = {"slots": self.slots, "capacity": self.capacity, "steps": self._steps}
    made = programs.programs_for(self.policy, params, mesh, **sizes)
    self._params_sharding, self._prepare, self._new_cache = made.params_sharding, made.prepare, made.new_cache
    self._prefill, self._decode = made.prefill, made.decode
    self._copy, self._read, self._write = made.copy, made.read, made.write
    self._weights = self._prepare(transfer(params, self._params_sharding))
    self._cache = self._new_cache()

  @property
  def compiles(self) -> int:
    """Programs compiled so far, of prefill and decode; one each to copy a row, to take it off the device, and back."""
    made = (self._prefill, self._decode, self._copy, self._read, self._write)
    return sum(program._cache_size() for program in made)

  @property
  def row_bytes(self) -> int:
    """Bytes of one row of the cache."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache)) // self.slots

  # what a caller does

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    sampling: Sampling | Sequence[Sampling] | None = None,
    key: Array | None = None,
  ) -> list[list[Completion]]:
    """`n` samples of each prompt, `[prompt][sample]`; `sampling` is one for all or one for each prompt.

    Synchronous, and usable while an event loop runs. Sample j of prompt i has the key fold_in(fold_in(key, i), j); by
    default the key is folded from the engine's seed and the number of the call, so that two calls differ.
    Errors: ValueError before anything runs, for n < 1, an empty prompt, one that leaves no room or exceeds the policy's
    `max_prefix`, an id outside the vocabulary, or a request that cannot be served.
    """
    if n < 1:
      raise ValueError(f"generate needs n >= 1 samples of each prompt, got n={n}")
    each = [sampling or Sampling()] * len(prompts) if isinstance(sampling, Sampling | None) else list(sampling)
    if len(each) != len(prompts):
      raise ValueError(f"generate got {len(prompts)} prompts and {len(each)} samplings; give one for all or one each")
    prompts = [self._prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    for one in each:
      self._check_sampling(one)
    if key is None:
      self._calls += 1
      key = jax.random.fold_in(jax.random.fold_in(self._key, 1), self._calls)
    keys = [jax.random.fold_in(key, i) for i in range(len(prompts))]
    sessions = [[self.open(p, key=jax.random.fold_in(k, j)) for j in range(n)] for p, k in zip(prompts, keys)]
    try:
      turns = [[self._submit(s, one, closes=True) for s in group] for group, one in zip(sessions, each)]
      while not all(turn.done for group in turns for turn in group):
        self.step()
    finally:
      for session in (s for group in sessions for s in group):
        session.close()
    for error in (turn.error for group in turns for turn in group if turn.error):
      raise error
    return [[turn.completion for turn in group] for group in turns]

  def open(self, prompt: Sequence[int], *, key: Array | None = None, index: int | None = None) -> Session:
    """A session that begins with `prompt`. Requests wait for rows in the order of participant, then `index`.

    A given `index` is folded into the key, so that the agents of one episode differ under one key. The default index
    counts sessions; the default key is folded from the engine's seed, the index and how often it was opened before.
    Errors: ValueError for an empty prompt, an id outside the vocabulary, a prompt that leaves no room for a token, or
    one that exceeds the policy's `max_prefix`.
    """
    tokens = self._prompt(prompt, "prompt")
    before = self._opened[index]
    self._opened[index] += 1
    if key is None:
      key = jax.random.fold_in(jax.random.fold_in(self._key, 2 if index is None else 3), before)
    if index is None:
      index = before
    else:
      key = jax.random.fold_in(key, index)
    participant = participants.get().get(self)
    session = Session(self, tokens, np.asarray(jax.random.bits(key, (2,), "uint32")), index, participant)
    if participant is not None:
      participant.sessions.append(session)
    return session

  def participant(self) -> Participant:
    """Registers an episode for lockstep: `async with engine.participant(): ...`."""
    return Participant(self)

  def load(
    self, params: Any, version: int | None = None, *, on_load: Literal["recompute", "keep"] = "recompute"
  ) -> None:
    """New weights of the same shapes, from the next call on; `version` (default: one more) is recorded with each token.

    Live sessions go on. Their keys in the cache are computed again under the new weights ("recompute"), or stay as they
    are ("keep"); either way nobody else copies them. Routing that is known already is not reported anew.
    """
    if on_load not in ("recompute", "keep"):
      raise ValueError(f'on_load must be "recompute" or "keep", got {on_load!r}')
    if _description(params) != self._described:
      raise ValueError("load needs parameters of the engine's tree, shapes and dtypes; build a new engine for others")
    self._weights = self._prepare(transfer(params, self._params_sharding))
    self.version = self.version + 1 if version is None else version
    self._rows.epoch += 1
    self._rows.forget()
    if on_load == "recompute":
      self._forget_keys()

  def _enter(self, participant: Participant) -> int:
    self._participants.append(participant)
    self._entered += 1
    return self._entered

  def _leave(self, participant: Participant) -> None:
    self._participants.remove(participant)
    self._forget_if_idle()
    self._notify()

  def step(self) -> bool:
    """Makes one device call, if there is work. Returns whether requests remain in flight."""
    if self._busy:
      raise RuntimeError("a device call for session.sample is in flight; await the sessions before step or generate")
    if self._turns:
      job = self._plan()
      try:
        results = self._execute(job)
      except BaseException as error:  # an interrupt too: the cache was given away
        self._fail(job, error)
        raise
      self._commit(job, results)
    return bool(self._turns)

  # checks at submission

  def _ids(self, ids: Sequence[int], what: str) -> list[int]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
      raise ValueError(f"{what} must be a flat sequence of integer token ids, got shape {array.shape} of {array.dtype}")
    bad = array[(array < 0) | (array >= self.policy.vocab_size)]
    if bad.size:
      raise ValueError(
        f"{what}: token id {bad[0]} is outside the model's vocabulary [0, {self.policy.vocab_size}); use the"
        " model's own tokenizer"
      )
    return array.tolist()

  def _prompt(self, ids: Sequence[int], what: str) -> list[int]:
    ids = self._ids(ids, what)
    if not ids:
      raise ValueError(f"{what} is empty; it needs at least one token (a start or end-of-text token will do)")
    if len(ids) >= self.capacity:
      raise ValueError(
        f"{what} has {len(ids)} tokens, which leaves no room to sample within the engine's capacity of {self.capacity};"
        " shorten it or raise the capacity"
      )
    most = self.policy.max_prefix
    if most is not None and len(ids) > most:
      raise ValueError(
        f"{what} has {len(ids)} tokens, but the policy keeps a first prompt of at most {most} (max_prefix of its"
        " config); shorten it or raise max_prefix"
      )
    return ids

  def _check_sampling(self, sampling: Sampling) -> None:
    self._ids(sampling.stop_ids, "stop_ids")
    if len(sampling.stop_ids) > programs.STOP_IDS:
      raise ValueError(
        f"at most {programs.STOP_IDS} stop_ids are possible, got {len(sampling.stop_ids)}; use fewer, or stop strings"
      )
    for name, ids in (("logit_bias", [i for i, _ in sampling.logit_bias]), ("allowed", sampling.allowed or ())):
      self._ids(ids, name)
      if len(set(ids)) != len(ids):
        raise ValueError(f"Sampling.{name} lists an id twice; give each once")
      if len(ids) > rules.BIASES:
        raise ValueError(f"Sampling.{name} may list {rules.BIASES} ids, got {len(ids)}; use fewer")
    if sampling.stop and self.tokenizer is None:
      raise ValueError(f"stop strings {sampling.stop} need a tokenizer: Engine(..., tokenizer=...), or use stop_ids")

  def _submit(self, session: Session, sampling: Sampling, closes: bool = False) -> Turn:
    session._check_idle("sample from")
    self._check_sampling(sampling)
    if session.room < 1:
      raise ValueError(
        f"the session's {len(session.tokens)} tokens fill the engine's capacity of {self.capacity}: nothing can be"
        " sampled; end the episode (Session.room says what fits) or raise the capacity"
      )
    if self._max_pending is not None and len(self._turns) >= self._max_pending:
      raise Busy(
        f"{len(self._turns)} requests are in flight, the engine's max_pending; wait for some to finish, or raise it"
      )
    self._order += 1
    turn = Turn(session, sampling, self._order, len(session.tokens), session._reported, closes)
    session._turn = turn
    self._turns[turn] = None
    return turn

  # a call: plan (reads and writes the host's state), execute (may run in another thread), commit

  def _plan(self) -> _Job:
    self._admit()
    running = [s for s in self._rows.sessions if s is not None and s._turn is not None]
    pending = self._share([s for s in running if s._pending])
    ready = [s for s in running if not s._pending]
    # a decode call between two prefill calls where more rows would wait than gain: a long prompt stalls nobody
    self._prefilled = bool(pending) and not (self._prefilled and len(ready) > len(pending))
    if self._prefilled:
      call = calls.plan_prefill(pending, self._shapes, self.slots)
    else:
      call = calls.plan_decode(ready, self.slots, self.capacity)
    for _, turn, _, _ in call.work:
      if not turn.session._processed:
        self._begin(turn.session)
    moves, self._moves = tuple(self._moves), []
    return _Job(call, moves, self._weights, self.version, self._generation)

  def _admit(self) -> None:
    """Gives rows to turns that wait for one."""
    queue = [turn for turn in self._turns if turn.session._row is None]
    queue = heapq.nsmallest(self.slots, queue, key=lambda turn: (*turn.session._rank, turn.order))
    held = [s for s in self._rows.sessions if s is not None]
    idle = sorted((s for s in held if s._turn is None), key=lambda s: s._rank, reverse=True)
    if self._offload or len(idle) == len(held):  # else the running ones' rows are sooner there than tokens again
      for session in idle[: max(len(queue) - (self.slots - len(held)), 0)]:
        self._take_row(session)
    for turn, row in zip(queue, self._rows.free()):
      self._rows.give(row, turn.session)
      self._restore(turn.session)

  def _take_row(self, session: Session) -> None:
    """Frees the row of a session that is not sampling; its keys go to host memory if there is room."""
    kept = Offloaded(session._processed, session._written, session._epoch, self._generation)
    row = np.array([session._row], np.int32)
    self._rows.release(session)
    if self._offload and kept.count:
      while len(self._offloaded) >= self._offload:
        self._drop_offloaded(next(iter(self._offloaded)))
      self._offloaded[session], session._host = None, kept

      def move(cache):
        kept.part = jax.device_get(self._read(cache, row))
        return cache

      self._moves.append(move)

  def _restore(self, session: Session) -> None:
    kept = session._host
    self._drop_offloaded(session)
    if kept is not None and kept.generation == self._generation:
      row = np.array([session._row], np.int32)
      self._rows.forget(session._row)
      session._processed, session._written, session._epoch = kept.count, kept.written, kept.epoch
      self._moves.append(lambda cache: self._write(cache, row, kept.part))

  def _drop_offloaded(self, session: Session) -> None:
    self._offloaded.pop(session, None)
    session._host = None

  def _share(self, pending: list[Session]) -> list[Session]:
    """Copies beginnings that a row holds already. Returns whose tokens are to be processed now: not those of sessions
    whose beginning another one is about to have."""
    source, target, leading = [], [], []
    for session in sorted(pending, key=lambda s: (-s._processed, *s._rank)):
      if not session._processed:
        row, count, routing = self._rows.shared(session)
        if self._rows.promised(session, leading) > max(count, SHARE - 1):
          continue
        if count:
          self._begin(session)
          session._processed = session._written = count
          session._record_routing(0, routing)
          if row != session._row:
            source.append(row)
            target.append(session._row)
      leading.append(session)
    if source:
      rows = np.zeros((2, self.slots), np.int32)
      rows[:, : len(source)] = source, target
      self._moves.append(lambda cache: self._copy(cache, *rows, np.int32(len(source))))
    return [session for session in leading if session._pending]

  def _begin(self, session: Session) -> None:
    """The session's keys are about to be written into its row."""
    session._epoch = self._rows.epoch
    self._rows.forget(session._row)

  def _execute(self, job: _Job):
    with self._lock:
      for move in job.moves:
        self._cache = move(self._cache)
      program = self._prefill if job.call.prefills else self._decode
      self._cache, results = program(job.weights, self._cache, *job.call.arrays)
      return jax.device_get(results)

  def _commit(self, job: _Job, results) -> None:
    for at, turn, start, size in job.call.work:
      session = turn.session
      if session._turn is not turn:
        continue  # cancelled or closed meanwhile
      if job.call.prefills:
        session._record_routing(start, None if results is None else results[at, :size])
      else:
        size = int(results.count[at])
        self._take_drawn(turn, at, size, results, job.version)
        session._record_routing(start, None if results.routing is None else results.routing[:size, at])
      if job.generation == self._generation:
        session._processed = session._written = start + size
      if not job.call.prefills and turn.error is None:
        self._finish_if_ended(turn)

  def _take_drawn(self, turn: Turn, at: int, size: int, results: programs.Decoded, version: int) -> None:
    drawn = results.drawn
    turn.session.tokens.extend(drawn.id[:size, at].tolist())
    values = [x[:size, at] for x in (drawn.logp_rollout, drawn.logp_sampled, drawn.entropy)]
    turn.drawn.append((*values, np.full(size, version, np.int32)))
    if not np.isfinite(values[0]).all():
      self._end(turn, error=FloatingPointError(
        f"the logits that follow token {len(turn.session.tokens) - size} of a session are not finite, under weights of"
        f" version {version}; look at the parameters, and at the last update's gradient"
      ))  # fmt: skip

  def _finish_if_ended(self, turn: Turn) -> None:
    session, sampling = turn.session, turn.sampling
    sampled = len(session.tokens) - turn.start
    cut = self._stop_string_end(turn) if sampling.stop else None
    if cut is not None:
      session._cut(turn.start + cut)
      self._complete(turn, "stop")
    elif session.tokens[-1] in sampling.stop_ids:
      self._complete(turn, "stop")
    elif sampled >= sampling.max_tokens:
      self._complete(turn, "length")
    elif session.room < 1:
      self._complete(turn, "capacity")
    else:
      turn.hand_out()

  def _stop_string_end(self, turn: Turn) -> int | None:
    """Tokens of the turn up to the one that completes a stop string."""
    ids = turn.session.tokens[turn.start :]

    def has(size):
      text = self.tokenizer.decode(ids[:size])
      return any(s in text for s in turn.sampling.stop)

    if not has(len(ids)):
      turn.searched = len(ids)
      return None
    return next(size for size in range(turn.searched + 1, len(ids) + 1) if has(size))

  def _complete(self, turn: Turn, finish) -> None:
    session = turn.session
    size = len(session.tokens) - turn.start
    values = [np.concatenate(parts)[:size] for parts in zip(*turn.drawn)]
    routing = session._known_routing()
    if routing is not None:
      routing = routing[turn.first_routing : len(session.tokens) - 1]
      session._reported = turn.first_routing + len(routing)
    ids = np.array(session.tokens[turn.start :], np.int32)
    turn.hand_out()
    self._end(turn, Completion(ids, values[0], values[1], values[3], finish, entropy=values[2], routing=routing))

  # how turns and sessions end

  def _end(self, turn: Turn, completion: Completion | None = None, error: BaseException | None = None) -> None:
    del self._turns[turn]
    turn.session._turn, turn.session.completion = None, completion
    turn.settle(completion, error)
    if turn.closes or error is not None:
      turn.session.close()

  def _abort(self, turn: Turn) -> None:
    """Takes a turn back whose caller was cancelled, be it in flight or just completed."""
    session = turn.session
    self._turns.pop(turn, None)
    if session._turn is turn:
      session._turn = None
    session._cut(turn.start)
    session._reported = turn.first_routing
    self._rows.release(session, keep=False)
    self._drop_offloaded(session)
    self._forget_if_idle()

  def _close(self, session: Session) -> None:
    turn = session._turn
    if turn is not None:
      self._end(turn, error=ValueError("the session was closed while it sampled a turn"))
    self._rows.release(session, keep=turn is None)
    self._drop_offloaded(session)
    self._forget_if_idle()

  def _forget_if_idle(self) -> None:
    busy = self._participants or self._turns or self._offloaded or any(self._rows.sessions)
    if self._lockstep and not busy:
      self._rows.forget()

  def _forget_keys(self) -> None:
    self._generation += 1
    self._rows.forget()
    for session in filter(None, self._rows.sessions):
      session._processed = session._written = 0

  def _fail(self, job: _Job, error: BaseException) -> None:
    """A device call failed: its turns end with the error, the others' keys, lost with the cache, are computed again."""
    self._cache = self._new_cache()
    self._forget_keys()
    for _, turn, _, _ in job.call.work:
      if turn.session._turn is turn:
        self._end(turn, error=error)

  # the asynchronous front

  def _notify(self) -> None:
    loop = asyncio.get_running_loop()
    if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
      self._wake = asyncio.Event()
      self._driver = loop.create_task(self._drive())
    self._wake.set()

  async def _drive(self) -> None:
    while self._turns:
      await asyncio.sleep(0)  # who can answer at once joins the next call
      self._wake.clear()
      if self._lockstep and not {turn.session._participant for turn in self._turns}.issuperset(self._participants):
        await self._wake.wait()
      elif self._turns:
        await self._call()

  async def _call(self) -> None:
    try:
      job = self._plan()
    except Exception as error:  # nobody waits for an answer that does not come
      for turn in list(self._turns):
        self._end(turn, error=error)
      return
    self._busy = True
    try:
      results = await asyncio.to_thread(self._execute, job)
    except Exception as error:
      self._fail(job, error)
    else:
      self._commit(job, results)
    finally:
      self._busy = False


def _description(params) -> tuple:
  leaves, tree = jax.tree.flatten(params)
  return tree, [(np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves]


def _mesh_of(params) -> Mesh:
  """That of the parameters, or one of their single device."""
  leaves = jax.tree.leaves(params)
  meshes = (leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding))
  return next(meshes, None) or Mesh(np.array(sorted(leaves[0].devices(), key=lambda d: d.id)), ("data",))
