"""The engine: many token streams, a fixed number of cache rows, two device programs.

A *session* is one token stream. Its tokens are on the host; all but the last of them are *processed* into a row of the
device's cache before the next one is sampled. Work goes in *calls*, each one prefill or up to K decoding steps over all
the rows that are ready. Between calls rows are freed and filled again.

The policy's cache must overwrite what it stored at a position when that position is processed again, and a token must
attend only to stored positions up to its own; then a row can be reused, or cut back, without being cleared. A row is
cut back by fewer tokens than one call has steps.
"""

import asyncio
import collections
import contextvars
import dataclasses
import functools
import heapq
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxagent.models.policy import Policy
from jaxagent.sampling import programs, rules
from jaxagent.sampling.request import Sampling
from jaxagent.types import Completion

CHUNKS = (16, 128)  # tokens of a row that one prefill call processes
FEW = 4  # rows of the small prefill calls; twice as many in the small decode calls
CALL_COST = 256  # what a prefill call costs beside its tokens, in tokens

_participant: contextvars.ContextVar = contextvars.ContextVar("participant", default={})  # noqa: B039 (never mutated)


@dataclasses.dataclass(eq=False)
class _Turn:
  """A request in flight and what it has sampled so far."""

  session: "Session"
  sampling: Sampling
  order: int
  start: int  # tokens of the stream before the turn
  first_routing: int  # the stream position whose routing is reported first
  closes: bool = False  # the session ends with this turn
  drawn: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)  # logps, entropy, version
  routing: list[np.ndarray] = dataclasses.field(default_factory=list)
  routed: int = 0  # rows in `routing`
  searched: int = 0  # tokens that complete no stop string
  future: asyncio.Future | None = None
  completion: Completion | None = None
  error: BaseException | None = None

  @property
  def done(self) -> bool:
    return self.completion is not None or self.error is not None

  def record_routing(self, at: int, rows: np.ndarray | None) -> None:
    """Keeps the rows, of stream positions from `at` on, that were not reported before."""
    if rows is not None:
      rows = rows[max(self.first_routing + self.routed - at, 0) :]
      self.routing.append(rows)
      self.routed += len(rows)

  def settle(self, completion: Completion | None = None, error: BaseException | None = None) -> None:
    self.completion, self.error = completion, error
    if self.future is not None and not self.future.done():
      self.future.set_exception(error) if error else self.future.set_result(completion)


@dataclasses.dataclass(frozen=True)
class _Call:
  """One device call, planned: everything it reads, and whose work it does."""

  run: Any  # cache -> (cache, results)
  work: list[tuple[int, _Turn, int, int]]  # index in the call's arrays, turn, first stream position, tokens to prefill
  version: int
  generation: int  # of the cached keys


class Session:
  """One token stream: a prompt, then turns that the policy samples and tokens that are appended between them.

  It takes a cache row at its first `sample` and holds it until `close` (or the end of its participant), so that later
  turns process only new tokens. Where every row is held by a session that is not sampling and another one waits, the
  waiting one gets the row, and the other's tokens are processed again at its next turn; so sessions never deadlock.
  """

  def __init__(
    self, engine: "Engine", tokens: list[int], key: np.ndarray, index: int, participant: "Participant | None"
  ):
    self.tokens = tokens  # the stream so far; read it, change it by `append`
    self.prefix_length = len(tokens)  # of the first prompt, which a prefix-sliding policy keeps
    self.index = index
    self.closed = False
    self._engine = engine
    self._key = key
    self._participant = participant
    self._turn: _Turn | None = None
    self._row: int | None = None
    self._processed = 0  # leading tokens whose keys the row holds
    self._reported = 0  # leading tokens whose routing a completion has reported

  @property
  def room(self) -> int:
    """Tokens that the stream can still take."""
    return self._engine.capacity - len(self.tokens)

  async def sample(self, sampling: Sampling | None = None) -> Completion:
    """The next turn. Cancelling it takes its tokens back and frees the row; the session can go on.

    Errors: ValueError for a closed session, one that is already sampling, no room left, or a request that the engine
    cannot serve; FloatingPointError where the logits are not finite.
    """
    turn = self._engine._submit(self, sampling or Sampling())
    turn.future = asyncio.get_running_loop().create_future()
    self._engine._notify()
    try:
      return await turn.future
    except asyncio.CancelledError:
      self._engine._abort(turn)
      raise

  def append(self, ids: Sequence[int]) -> None:
    """Adds tokens that the policy did not sample. Errors: ValueError if they are not ids, or more than `room`."""
    self._check_idle("append to")
    ids = self._engine._ids(ids, "appended tokens")
    if len(ids) > self.room:
      raise ValueError(
        f"{len(ids)} tokens appended to a session of {len(self.tokens)} exceed the engine's capacity of"
        f" {self._engine.capacity}; shorten them, end the episode (Session.room says what fits), or raise the capacity"
      )
    self.tokens.extend(ids)

  def close(self) -> None:
    """Frees the row. A turn in flight ends with an error. Closing twice does nothing."""
    if not self.closed:
      self.closed = True
      self._engine._close(self)

  def __enter__(self) -> "Session":
    return self

  def __exit__(self, *error) -> None:
    self.close()

  @property
  def _rank(self) -> tuple[int, int]:
    return self._participant.number if self._participant else 0, self.index

  @property
  def _pending(self) -> int:
    """Tokens to process before the last one can be decoded from."""
    return max(len(self.tokens) - 1 - self._processed, 0)

  def _check_idle(self, action: str) -> None:
    if self.closed:
      raise ValueError(f"cannot {action} a closed session; open a new one")
    if self._turn is not None:
      raise ValueError(f"cannot {action} a session while it samples a turn; await that turn first")

  def _cut(self, length: int) -> None:
    """Drops the tokens past `length`; their keys are overwritten before anything can attend to them."""
    del self.tokens[length:]
    self._processed = min(self._processed, length - 1)


class Participant:
  """An episode, as the engine counts them: `async with engine.participant(): ...`; sessions opened inside belong to it.

  In lockstep the engine makes a device call only when every participant has a request in flight, so what a call holds
  depends on the inputs and not on timing. At its end the participant's sessions are closed. Enter before the first
  `sample` of any; agents that sample at the same time enter one each, and one that waits for another is not entered.
  """

  def __init__(self, engine: "Engine"):
    self._engine = engine
    self.number = -1
    self.sessions: list[Session] = []

  async def __aenter__(self) -> "Participant":
    self._engine._participants.append(self)
    self._engine._entered += 1
    self.number = self._engine._entered
    self._outer = _participant.get()
    _participant.set({**self._outer, self._engine: self})
    return self

  async def __aexit__(self, *error) -> None:
    for session in self.sessions:
      session.close()
    _participant.set(self._outer)
    self._engine._participants.remove(self)
    self._engine._notify()


class Engine:
  """Samples from a policy: many streams at once, in `slots` cache rows of `capacity` tokens each.

  The rows of a policy whose every layer slides have a fixed size: `capacity` only says how long a stream may get.

      out = engine.generate(prompts, n=8, sampling=Sampling(temperature=1.0, max_tokens=512))   # [prompt][sample]

      session = engine.open(prompt_ids)                                                         # several turns
      turn = await session.sample(Sampling(stop_ids=(2,)))
      session.append(tool_result_ids)

  Randomness: the uniform of a token is a function of its session's key and its position in the stream alone. So a
  result does not depend on what else is in flight, on slots or on K, but for rounding in the last bits of the logits.
  With `lockstep` the asynchronous front is deterministic bit for bit: see `Participant`.

  Log-probs are those of the policy at temperature T (see `rules.sample`); every limit and rule is traced, and shapes
  are few: at most four of prefill and two of decode, whatever the lengths.

  Memory: the cache and `policy.prepare(params)`, whose arrays may be those of `params`: after donating these to another
  computation, `load` before sampling again.

  `mesh`: weights that are not on it are replicated over it, and rows are split over its axes "data" and "fsdp" where
  their sizes divide `slots`. By default the mesh of the parameters.
  `tokenizer`: anything with `decode(ids) -> str`; needed by stop strings only. `max_pending` bounds the requests in
  flight; one more is a RuntimeError.
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
    steps_per_call: int = 16,
    prefill_tokens: int = 2048,
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
    self._steps, self._max_pending, self._lockstep = steps_per_call, max_pending, lockstep
    self._key = jax.random.key(seed)
    self._opened, self._calls, self._order, self._entered = collections.Counter(), 0, 0, 0
    self._rows: list[Session | None] = [None] * slots
    self._turns: dict[_Turn, None] = {}  # in flight, in the order of submission
    self._participants: list[Participant] = []
    self._generation, self._prefilled, self._busy = 0, False, False
    self._lock = threading.Lock()
    self._driver: asyncio.Task | None = None
    self._wake: asyncio.Event | None = None
    self._shapes = _prefill_shapes(slots, capacity, prefill_tokens)
    self._build(mesh, params)

  def _build(self, mesh, params) -> None:
    params = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf), params)
    mesh = mesh or _mesh_of(params)
    axes = programs.row_axes(self.policy, self.capacity)
    self._params_sharding = jax.tree.map(lambda leaf: _placed(leaf, mesh), params)
    self._described = _description(params)
    home = jax.tree.leaves(self._params_sharding)[0]
    cache = jax.tree.map(lambda axis: home if mesh is None else _row_sharding(mesh, axis, self.slots), axes)
    rest = home if mesh is None else NamedSharding(mesh, PartitionSpec())
    self._new_cache = jax.jit(functools.partial(self.policy.cache, self.slots, self.capacity), out_shardings=cache)
    self._prepare = jax.jit(self.policy.prepare)
    jit = functools.partial(jax.jit, out_shardings=(cache, rest))
    self._prefill = jit(functools.partial(programs.prefill, self.policy, axes), donate_argnums=1)
    self._decode = jit(functools.partial(programs.decode, self.policy, axes, self._steps), donate_argnums=1)
    self._weights = self._prepare(jax.device_put(params, self._params_sharding))
    self._cache = self._new_cache()

  @property
  def compiles(self) -> int:
    """Programs compiled so far for prefill and decode."""
    return self._prefill._cache_size() + self._decode._cache_size()

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
    participant = _participant.get().get(self)
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
    are ("keep"). Routing that was reported is not reported again.
    """
    if on_load not in ("recompute", "keep"):
      raise ValueError(f'on_load must be "recompute" or "keep", got {on_load!r}')
    if _description(params) != self._described:
      raise ValueError("load needs parameters of the engine's tree, shapes and dtypes; build a new engine for others")
    self._weights = self._prepare(jax.device_put(params, self._params_sharding))
    self.version = self.version + 1 if version is None else version
    if on_load == "recompute":
      self._forget_keys()

  def step(self) -> bool:
    """Makes one device call, if there is work. Returns whether requests remain in flight."""
    if self._busy:
      raise RuntimeError("a device call for session.sample is in flight; await the sessions before step or generate")
    if self._turns:
      call = self._plan()
      try:
        results = self._execute(call)
      except BaseException as error:  # an interrupt too: the cache was given away
        self._fail(call, error)
        raise
      self._commit(call, results)
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
    if sampling.stop and self.tokenizer is None:
      raise ValueError(f"stop strings {sampling.stop} need a tokenizer: Engine(..., tokenizer=...), or use stop_ids")

  def _submit(self, session: Session, sampling: Sampling, closes: bool = False) -> _Turn:
    session._check_idle("sample from")
    self._check_sampling(sampling)
    if session.room < 1:
      raise ValueError(
        f"the session's {len(session.tokens)} tokens fill the engine's capacity of {self.capacity}: nothing can be"
        " sampled; end the episode (Session.room says what fits) or raise the capacity"
      )
    if self._max_pending is not None and len(self._turns) >= self._max_pending:
      raise RuntimeError(
        f"{len(self._turns)} requests are in flight, the engine's max_pending; wait for some to finish, or raise it"
      )
    self._order += 1
    turn = _Turn(session, sampling, self._order, len(session.tokens), session._reported, closes)
    session._turn = turn
    self._turns[turn] = None
    return turn

  # a call: plan (reads and writes the host's state), execute (may run in another thread), commit

  def _plan(self) -> _Call:
    self._admit()
    running = [s for s in self._rows if s is not None and s._turn is not None]
    pending, ready = [s for s in running if s._pending], [s for s in running if not s._pending]
    # a decode call between two prefill calls where more rows would wait than gain: a long prompt stalls nobody
    self._prefilled = bool(pending) and not (self._prefilled and len(ready) > len(pending))
    return self._plan_prefill(pending) if self._prefilled else self._plan_decode(ready)

  def _admit(self) -> None:
    queue = [turn for turn in self._turns if turn.session._row is None]
    if queue and all(s is not None and s._turn is None for s in self._rows):
      for session in sorted(self._rows, key=lambda s: s._rank, reverse=True)[: len(queue)]:
        self._release(session)
    free = [row for row, session in enumerate(self._rows) if session is None]
    for turn, row in zip(heapq.nsmallest(len(free), queue, key=lambda t: (*t.session._rank, t.order)), free):
      self._rows[row], turn.session._row = turn.session, row

  def _plan_prefill(self, pending: list[Session]) -> _Call:
    pending = sorted(pending, key=lambda s: (-s._pending, s._row))

    def use(shape):  # tokens that matter for each unit of cost
      rows, chunk = shape
      return sum(min(s._pending, chunk) for s in pending[:rows]) / (rows * chunk + CALL_COST)

    rows, chunk = max(self._shapes, key=use)
    place = self._places(pending[:rows], rows)
    tokens, position = np.zeros((rows, chunk), np.int32), np.full((rows, chunk), -1, np.int32)
    prefix_length = np.zeros(rows, np.int32)
    work = []
    for at, session in place.items():
      start = session._processed
      size = min(session._pending, chunk)
      tokens[at, :size] = session.tokens[start : start + size]
      position[at, :size] = np.arange(start, start + size)
      prefix_length[at] = session.prefix_length
      work.append((at, session._turn, start, size))
    arrays = (self._row_index(place, rows), tokens, position, prefix_length)
    weights = self._weights
    return _Call(lambda cache: self._prefill(weights, cache, *arrays), work, self.version, self._generation)

  def _plan_decode(self, ready: list[Session]) -> _Call:
    few = min(2 * FEW, self.slots)
    size = few if len(ready) <= few else self.slots
    place = self._places(ready, size)
    rows = _filler(size)
    for at, session in place.items():
      _fill(rows, at, session, self.capacity, self.policy.vocab_size)
    work = [(at, session._turn, len(session.tokens) - 1, 0) for at, session in place.items()]
    arrays = (self._row_index(place, size), rows)
    weights = self._weights
    return _Call(lambda cache: self._decode(weights, cache, *arrays), work, self.version, self._generation)

  def _places(self, sessions: list[Session], size: int) -> dict[int, Session]:
    """Where each session stands in a call of `size` rows: at its own row if all of them take part."""
    return {session._row if size == self.slots else i: session for i, session in enumerate(sessions)}

  def _row_index(self, place: dict[int, Session], size: int) -> np.ndarray | None:
    if size == self.slots:
      return None
    index = np.full(size, self.slots, np.int32)
    index[list(place)] = [session._row for session in place.values()]
    return index

  def _execute(self, call: _Call):
    with self._lock:
      self._cache, results = call.run(self._cache)
      return jax.device_get(results)

  def _commit(self, call: _Call, results) -> None:
    for at, turn, start, size in call.work:
      if turn.session._turn is not turn:
        continue  # cancelled or closed meanwhile
      if isinstance(results, programs.Decoded):
        size = int(results.count[at])
        self._take_drawn(turn, at, size, results, call.version)
        turn.record_routing(start, None if results.routing is None else results.routing[:size, at])
      else:
        turn.record_routing(start, None if results is None else results[at, :size])
      if call.generation == self._generation:
        turn.session._processed = start + size
      if isinstance(results, programs.Decoded) and turn.error is None:
        self._finish_if_ended(turn)

  def _take_drawn(self, turn: _Turn, at: int, size: int, results: programs.Decoded, version: int) -> None:
    drawn = results.drawn
    turn.session.tokens.extend(drawn.id[:size, at].tolist())
    values = [x[:size, at] for x in (drawn.logp_rollout, drawn.logp_sampled, drawn.entropy)]
    turn.drawn.append((*values, np.full(size, version, np.int32)))
    if not np.isfinite(values[0]).all():
      self._end(turn, error=FloatingPointError(
        f"the logits that follow token {len(turn.session.tokens) - size} of a session are not finite, under weights of"
        f" version {version}; look at the parameters, and at the last update's gradient"
      ))  # fmt: skip

  def _finish_if_ended(self, turn: _Turn) -> None:
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

  def _stop_string_end(self, turn: _Turn) -> int | None:
    """Tokens of the turn up to the one that completes a stop string."""
    ids = turn.session.tokens[turn.start :]
    has = lambda size: any(s in text for text in [self.tokenizer.decode(ids[:size])] for s in turn.sampling.stop)  # noqa: E731
    if not has(len(ids)):
      turn.searched = len(ids)
      return None
    return next(size for size in range(turn.searched + 1, len(ids) + 1) if has(size))

  def _complete(self, turn: _Turn, finish) -> None:
    session = turn.session
    size = len(session.tokens) - turn.start
    values = [np.concatenate(parts)[:size] for parts in zip(*turn.drawn)]
    routing = None
    if turn.routing:
      routing = np.concatenate(turn.routing)[: len(session.tokens) - 1 - turn.first_routing]
      session._reported = turn.first_routing + len(routing)
    ids = np.array(session.tokens[turn.start :], np.int32)
    self._end(turn, Completion(ids, values[0], values[1], values[3], finish, entropy=values[2], routing=routing))

  # how turns and sessions end

  def _end(self, turn: _Turn, completion: Completion | None = None, error: BaseException | None = None) -> None:
    del self._turns[turn]
    turn.session._turn = None
    turn.settle(completion, error)
    if turn.closes or error is not None:
      turn.session.close()

  def _abort(self, turn: _Turn) -> None:
    """Takes a turn back whose caller was cancelled, be it in flight or just completed."""
    session = turn.session
    self._turns.pop(turn, None)
    if session._turn is turn:
      session._turn = None
    session._cut(turn.start)
    session._reported = turn.first_routing
    self._release(session)

  def _close(self, session: Session) -> None:
    if session._turn is not None:
      self._end(session._turn, error=ValueError("the session was closed while it sampled a turn"))
    self._release(session)

  def _release(self, session: Session) -> None:
    if session._row is not None:
      self._rows[session._row] = None
    session._row, session._processed = None, 0

  def _forget_keys(self) -> None:
    self._generation += 1
    for session in filter(None, self._rows):
      session._processed = 0

  def _fail(self, call: _Call, error: BaseException) -> None:
    """A device call failed: its turns end with the error, the others' keys, lost with the cache, are computed again."""
    self._cache = self._new_cache()
    self._forget_keys()
    for _, turn, _, _ in call.work:
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
    call = self._plan()
    self._busy = True
    try:
      results = await asyncio.to_thread(self._execute, call)
    except Exception as error:
      self._fail(call, error)
    else:
      self._commit(call, results)
    finally:
      self._busy = False


def _prefill_shapes(slots: int, capacity: int, budget: int) -> list[tuple[int, int]]:
  """(rows, tokens a row) of the prefill calls: a few rows, and as many as `budget` tokens allow, for each chunk."""
  chunks = {min(chunk, capacity) for chunk in CHUNKS}
  return sorted({(rows, c) for c in chunks for rows in (min(FEW, slots), min(max(budget // c, 1), slots))})


def _filler(size: int) -> programs.Decoding:
  whole, real = functools.partial(np.full, size, dtype=np.int32), functools.partial(np.full, size, dtype=np.float32)
  return programs.Decoding(
    token=whole(0), position=whole(-1), left=whole(0), prefix_length=whole(0), key=np.zeros((size, 2), np.uint32),
    stop=np.full((size, programs.STOP_IDS), -1, np.int32), rules=rules.Rules(real(1), whole(0), real(1), real(0)),
  )  # fmt: skip


def _fill(rows: programs.Decoding, at: int, session: Session, capacity: int, vocab_size: int) -> None:
  turn, length = session._turn, len(session.tokens)
  sampling = turn.sampling
  rows.token[at], rows.position[at] = session.tokens[-1], length - 1
  rows.prefix_length[at] = session.prefix_length
  rows.left[at] = min(sampling.max_tokens - (length - turn.start), capacity - length)
  rows.key[at] = session._key
  rows.stop[at, : len(sampling.stop_ids)] = sampling.stop_ids
  rows.rules.temperature[at], rows.rules.top_p[at] = sampling.temperature, sampling.top_p
  rows.rules.top_k[at], rows.rules.min_p[at] = min(sampling.top_k, vocab_size), sampling.min_p


def _description(params) -> tuple:
  leaves, tree = jax.tree.flatten(params)
  return tree, [(np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves]


def _mesh_of(params) -> jax.sharding.Mesh | None:
  shardings = (leaf.sharding for leaf in jax.tree.leaves(params))
  return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def _placed(leaf: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.sharding.Sharding:
  if mesh is None or (isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh):
    return leaf.sharding
  return NamedSharding(mesh, PartitionSpec())


def _row_sharding(mesh: jax.sharding.Mesh, axis: int, slots: int) -> NamedSharding:
  names = tuple(name for name in ("data", "fsdp") if name in mesh.axis_names)
  size = int(np.prod([mesh.shape[name] for name in names], initial=1))
  return NamedSharding(mesh, PartitionSpec(*[None] * axis, names) if names and slots % size == 0 else PartitionSpec())
