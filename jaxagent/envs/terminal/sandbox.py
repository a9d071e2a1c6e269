"""A bash tool in a bubblewrap sandbox that lives as long as the episode.

    sandbox = await Sandbox.start(SandboxLimits())
    result = await sandbox.run("ls -l")        # result.text is what the model reads
    sandbox.folder.read("a.txt", 1000)         # from outside, symlink-safe
    await sandbox.close()                      # no process is left

No network; only /sandbox (the folder) and /tmp can be written; namespaces of its own for users, processes, IPC, host
name, cgroups and network; no capabilities, an empty environment. Each command is a bash of its own that starts in the
folder and with the exported variables that the last one ended with, so a command that kills its shell, or is killed,
costs nothing but itself. What a command leaves running is killed at its end. `SandboxLimits` names what bounds each
resource.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path

from jaxagent.envs.terminal.cgroup import Group
from jaxagent.envs.terminal.confinement import (
  FOLDER,
  SCRATCH,
  SandboxLimits,
  bubblewrap,
  first_process,
  open_shell,
  pipe_of,
  require_confinement,
)
from jaxagent.envs.terminal.folder import Folder
from jaxagent.envs.terminal.syscalls import seccomp_filter

MAX_COMMAND = 32 * 1024  # bytes
START = 20.0  # seconds that a sandbox may take to start
GRACE = 5.0  # seconds that its first process may take to kill a command
WATCH = 0.2  # seconds between two looks at memory and files
CHUNK = 65536
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Result:
  """Of a command. `output` has at most `shown` bytes, its middle cut; `cut` counts the bytes that are not shown.

  `killed` says why the command was killed, "" if it ended by itself; `left` counts the processes that it left behind.
  """

  output: str
  code: int
  cut: int = 0
  killed: str = ""
  left: int = 0

  @property
  def notes(self) -> tuple[str, ...]:
    """What was reported beside the output, but for the exit code."""
    left = f"{self.left} left running, killed" if self.left and not self.killed else ""
    return tuple(note for note in (self.killed and f"killed: {self.killed}", left) if note)

  @property
  def text(self) -> str:
    """The output and, in brackets, the exit code where it is not 0 or nothing was printed, and what was reported."""
    code = f"exit {self.code}" if not self.killed and (self.code or not self.output) else ""
    brackets = [f"[{note}]" for note in (code, *self.notes) if note]
    return "\n".join([*([self.output.removesuffix("\n")] if self.output else []), *brackets])


class SandboxGone(Exception):
  """The sandbox had to be stopped, or died; it says why. Its folder can still be read."""


class Sandbox:
  """Of one event loop; holds eight descriptors and two processes of this machine.

  `folder` is its /sandbox, seen from outside: also after the sandbox was stopped, until `close`.
  """

  def __init__(self, limits: SandboxLimits, shown: int):
    self.limits, self.shown = limits, shown
    self.gone = ""  # why it was stopped
    self.pid = 0  # of the sandbox's first process, as this machine sees it
    self._fds = contextlib.ExitStack()
    self._process: subprocess.Popen | None = None
    self._first: int | None = None  # descriptors of its first process, and of the one that waits for it outside
    self._monitor: int | None = None
    self._group: Group | None = None
    self._lines = b""

  @classmethod
  async def start(cls, limits: SandboxLimits | None = None, *, shown: int = 4096) -> "Sandbox":
    """ValueError where this machine cannot confine it (`require_confinement`); OSError where it does not start."""
    await asyncio.to_thread(require_confinement)
    sandbox = cls(limits or SandboxLimits(), shown)
    try:
      sandbox._spawn()
      async with asyncio.timeout(START):
        await sandbox._ready()
    except BaseException:
      await sandbox.close()
      raise
    return sandbox

  async def run(self, command: str, *, wall: float | None = None) -> Result:
    """One command at a time, for `wall` seconds (by default the limit's).

    SandboxGone: it was stopped, or died of what ran in it, now or before. OSError: it was killed from outside, which
    nothing in it can do.
    """
    if self.gone:
      raise SandboxGone(self.gone)
    try:
      request = command.encode()
    except UnicodeEncodeError:
      return Result("error: the command is not text", 126)
    if b"\0" in request or len(request) > MAX_COMMAND:
      return Result(f"error: a command has at most {MAX_COMMAND} bytes and no NUL", 126)
    try:
      return await self._serve(request, self.limits.wall if wall is None else wall)
    except (EOFError, BrokenPipeError):
      gone = await self._stop("its first process ended")
      if self._process is not None and self._process.returncode == 128 + signal.SIGKILL:
        raise OSError("the sandbox was killed from outside, perhaps for want of memory") from None
      raise SandboxGone(gone) from None

  async def close(self) -> None:
    """Kills the sandbox and waits until the last of its processes is gone. May be called twice."""
    self.gone = self.gone or "it was closed"
    try:
      await self._kill()
    finally:
      self._fds.close()
    if self._group is not None:
      group, self._group = self._group, None
      group.remove()

  def _spawn(self) -> None:
    self._control, control = self._ends(*(end.detach() for end in socket.socketpair()))
    self._output, output = self._ends(*os.pipe())
    self._info, info = self._ends(*os.pipe())
    seccomp, shell = pipe_of(seccomp_filter()), open_shell()
    program = bubblewrap(first_process(self.limits), self.limits, seccomp=seccomp, shell=shell, info=info)
    try:
      self._process = subprocess.Popen(
        program, stdin=control, stdout=output, stderr=output, pass_fds=(info, seccomp, shell), cwd="/"
      )
    finally:
      for descriptor in (control, output, info, seccomp, shell):
        os.close(descriptor)
    self._monitor = self._own(os.pidfd_open(self._process.pid))

  def _ends(self, ours: int, theirs: int) -> tuple[int, int]:
    os.set_blocking(self._own(ours), False)
    return ours, theirs

  def _own(self, descriptor: int) -> int:
    self._fds.callback(os.close, descriptor)
    return descriptor

  async def _ready(self) -> None:
    """Nothing that is not ours runs before the first request, so what is opened here is what it should be."""
    await self._find()
    try:
      said = await self._line()
    except EOFError:
      said = b""
    if said != b"ready":
      raise OSError(f"the sandbox did not start: {self._read().decode(errors='replace').strip() or 'it said nothing'}")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    self.folder, self._scratch = (
      Folder(self._own(os.open(f"/proc/{self.pid}/root{path}", flags))) for path in (FOLDER, SCRATCH)
    )
    self._group = Group.create(self.limits, self.pid)

  async def _find(self) -> None:
    """Learns from bubblewrap which process is the sandbox's first, if there will be one."""
    await _ready_to(asyncio.get_running_loop().add_reader, self._info)
    found = re.search(rb'"child-pid": *(\d+)', os.read(self._info, CHUNK))
    if found:
      self.pid = int(found[1])
      with contextlib.suppress(ProcessLookupError):  # it has ended already, as when its limits are refused
        self._first = self._own(os.pidfd_open(self.pid))

  async def _serve(self, request: bytes, wall: float) -> Result:
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()
    output = _Output(self.shown)
    starved = self._group.killed() if self._group else 0

    def say(reason: str) -> None:
      if not stop.done():
        stop.set_result(reason)

    def collect() -> None:
      output.add(self._read())
      if output.total > self.limits.output:
        say(f"more than {self.limits.output} bytes of output")

    loop.add_reader(self._output, collect)
    ended = asyncio.create_task(self._reply(request))
    watch = asyncio.create_task(self._watch(say))
    timer = loop.call_later(wall, say, f"longer than {wall:g} s")
    try:
      await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
      if not ended.done():
        self._signal(self._first, signal.SIGUSR1)
        await asyncio.wait({ended}, timeout=GRACE)
      if not ended.done():
        raise SandboxGone(await self._stop(f"a command could not be killed: {stop.result()}"))
      code, left = ended.result()
    finally:
      timer.cancel()
      loop.remove_reader(self._output)
      await _cancelled(ended, watch)
    while more := self._read():
      output.add(more)
    if self._crowded():
      raise SandboxGone(await self._stop(f"more than {self.limits.files} files"))
    killed = stop.result() if stop.done() else ""
    if self._group and self._group.killed() > starved:
      killed = killed or self._hog()
    return Result(output.text, code, output.cut, killed, left)

  async def _reply(self, request: bytes) -> tuple[int, int]:
    """(exit code, processes left behind). A line that does not answer the request is not ours, and is passed over."""
    name = secrets.token_hex(8).encode()
    await self._send(name + b"\0" + request + b"\0")
    while True:
      words = (await self._line()).split()
      if len(words) == 3 and words[0] == name and words[1].isdigit() and words[2].isdigit():
        return int(words[1]), int(words[2])

  async def _send(self, content: bytes) -> None:
    while content:
      try:
        content = content[os.write(self._control, content) :]
      except BlockingIOError:
        await _ready_to(asyncio.get_running_loop().add_writer, self._control)

  async def _line(self) -> bytes:
    """The next line that the first process says. EOFError: it is gone."""
    while b"\n" not in self._lines:
      await _ready_to(asyncio.get_running_loop().add_reader, self._control)
      try:
        found = os.read(self._control, CHUNK)
      except BlockingIOError:
        continue
      except ConnectionResetError:
        raise EOFError from None
      if not found:
        raise EOFError
      self._lines = (self._lines + found)[-CHUNK:]
    line, _, self._lines = self._lines.partition(b"\n")
    return line

  def _read(self) -> bytes:
    """What the output pipe holds, up to `CHUNK` bytes."""
    try:
      return os.read(self._output, CHUNK)
    except BlockingIOError:
      return b""

  async def _watch(self, say: Callable[[str], None]) -> None:
    while True:
      await asyncio.sleep(WATCH)
      if self._crowded():
        say(f"more than {self.limits.files} files")
      if self._group is None and resident(self.pid) > self.limits.total_memory:
        say(self._hog())

  def _hog(self) -> str:
    return f"more than {self.limits.total_memory} bytes of memory"

  def _crowded(self) -> bool:
    return any(folder.inodes() > self.limits.files for folder in (self.folder, self._scratch))

  async def _stop(self, reason: str) -> str:
    self.gone = f"the sandbox was stopped: {reason}"
    await self._kill()
    return self.gone

  async def _kill(self) -> None:
    """The kernel ends a process namespace with its first process, which is gone only after all others are.

    The process that waits for it outside then ends by itself; killed earlier, it would leave a zombie to the system, or
    a first process that is not yet set to die with it.
    """
    if self._process is None or self._monitor is None or self._process.returncode is not None:
      return
    if self._first is None:
      await _within(GRACE, self._find())
    if self._first is not None:
      self._signal(self._first, signal.SIGKILL)
      await _within(GRACE, _ready_to(asyncio.get_running_loop().add_reader, self._monitor))
    self._process.kill()
    self._process.wait()

  def _signal(self, descriptor: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      signal.pidfd_send_signal(descriptor, number)


class _Output:
  """Keeps the first and the last bytes of what is added, at most `shown` in all."""

  def __init__(self, shown: int):
    self.total = 0
    self._head, self._tail = bytearray(), bytearray()
    self._first, self._last = shown - shown // 2, shown // 2

  def add(self, content: bytes) -> None:
    self.total += len(content)
    room = self._first - len(self._head)
    self._head += content[:room]
    self._tail += content[room:]
    if self._last < len(self._tail):
      del self._tail[: len(self._tail) - self._last]

  @property
  def cut(self) -> int:
    return self.total - len(self._head) - len(self._tail)

  @property
  def text(self) -> str:
    middle = f"\n[{self.cut} bytes cut]\n".encode() if self.cut else b""
    return (bytes(self._head) + middle + bytes(self._tail)).decode(errors="replace")


async def _ready_to(add: Callable, descriptor: int) -> None:
  """Waits until a descriptor can be read or written; `add` is the loop's add_reader or add_writer."""
  loop = asyncio.get_running_loop()
  ready = loop.create_future()
  add(descriptor, lambda: ready.done() or ready.set_result(None))
  try:
    await ready
  finally:
    (loop.remove_reader if add == loop.add_reader else loop.remove_writer)(descriptor)


async def _within(seconds: float, waiting: Coroutine) -> None:
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(seconds):
      await waiting


async def _cancelled(*tasks: asyncio.Task) -> None:
  """Cancels them and waits until they have let go of their descriptors."""
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


def resident(pid: int) -> int:
  """Bytes in memory of a process and all below it; pages that several share count for each."""
  total, waiting = 0, [pid]
  while waiting:
    process = Path(f"/proc/{waiting.pop()}")
    with contextlib.suppress(OSError):
      total += int((process / "statm").read_text().split()[1]) * PAGE
      for thread in (process / "task").iterdir():
        waiting += map(int, (thread / "children").read_text().split())
  return total
