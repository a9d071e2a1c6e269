"""How a sandbox is made: the arguments of bubblewrap, the shell that is its first process, and the probe.

The first process (pid 1, which nothing inside can kill) reads commands, runs each in a bash of its own, and after each
kills whatever is left. It is as confined as what it runs: nothing is won by taking it over.
"""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxagent
from jaxagent.envs.terminal.syscalls import seccomp_filter

MIB = 2**20
FOLDER, SCRATCH = "/sandbox", "/tmp"
SHELL = "/shell"  # bash as the first process runs it
NOBODY = "65534"
PACKAGE = Path(jaxagent.__file__).resolve().parent
SHOWN_OF_ETC = ("/etc/alternatives", "/etc/ld.so.cache")


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """What one sandbox may use; bytes and seconds. In brackets what enforces it.

  `memory`: address space of a process [RLIMIT_AS].
  `total_memory`: all processes together [cgroup v2 `memory.max` where a cgroup is delegated to us; else the sum of
    resident sizes, looked at five times a second; beyond it the command is killed].
  `cpu`: of a process [RLIMIT_CPU].
  `processes`: threads included [RLIMIT_NPROC, counted in the sandbox's own user namespace; cgroup v2 `pids.max`].
  `open_files`: of a process [RLIMIT_NOFILE].
  `file_size`: of a file [RLIMIT_FSIZE].
  `disk`: all content of /sandbox, and as much again of /tmp [size of their tmpfs].
  `files`: files and folders in /sandbox, and in /tmp [looked at five times a second; beyond it the sandbox is
    stopped].
  `output`: that a command prints [counted outside; beyond it the command is killed].
  `wall`: of a command [a clock outside; beyond it the command is killed].
  None at all: core dumps, locked memory, message queues [RLIMIT_CORE, RLIMIT_MEMLOCK, RLIMIT_MSGQUEUE], and what no
  limit counts, such as memfd and System V memory [seccomp, see `syscalls`]. Short of memory, the kernel ends commands
  before anything else [oom_score_adj, which a command may take back]. Without a cgroup, no sandbox's sum has
  the buffers of sockets and pipes: the kernel bounds them for all processes of a user.
  """

  memory: int = 512 * MIB
  total_memory: int = 1024 * MIB
  cpu: int = 10
  processes: int = 32
  open_files: int = 64
  file_size: int = 8 * MIB
  disk: int = 16 * MIB
  files: int = 4096
  output: int = MIB
  wall: float = 10.0

  def __post_init__(self):
    least = {
      "memory": 32 * MIB, "total_memory": 32 * MIB, "cpu": 1, "processes": 8, "open_files": 16, "file_size": 4096,
      "disk": 65536, "files": 16, "output": 1024, "wall": 0.1,
    }  # fmt: skip
    for name, bound in least.items():
      value = getattr(self, name)
      whole = isinstance(value, int) or (name == "wall" and isinstance(value, float))
      if isinstance(value, bool) or not whole or not bound <= value < 2**53:
        kind = "seconds" if name == "wall" else "a whole number,"
        raise ValueError(f"terminal: limits.{name} must be {kind} at least {bound}, got {value!r}")


# A command starts in the folder and with the exported variables that the last one ended with. One line: bash counts the
# command's own lines from there.
COMMAND = (
  f'[ -f /tmp/.shell ] && . /tmp/.shell; cd -- "$PWD" || cd {FOLDER};'
  " trap '{ export -p >/tmp/.shell.new && /bin/mv -f /tmp/.shell.new /tmp/.shell; } 2>/dev/null' EXIT;"
  ' echo 1000 >/proc/self/oom_score_adj; exec 2>&1; eval "$1"'
)

# Arguments: seconds of CPU, COMMAND, limits. Its input is a socket, which no other process can open by way of /proc.
# There it reads requests, name NUL command NUL, and writes lines: "ready", then for each request its name, the exit
# code, and how many processes had to be killed.
FIRST_PROCESS = """
cpu=$1 run=$2
shift 2
ulimit "$@" || exit 1
exec 2>/dev/null
trap 'kill -9 -1' USR1
echo ready >&0
while IFS= read -r -d '' name && IFS= read -r -d '' command; do
  (ulimit -t "$cpu"; exec bash -c "$run" bash "$command") </dev/null &
  wait $!
  code=$?
  set -- /proc/[0-9]*
  left=$(($# - 1))
  kill -9 -1
  while set -- /proc/[0-9]*; [ $# -gt 1 ]; do :; done
  echo "$name $code $left" >&0
done
"""

# Prints what is not as it must be.
PROBE = """
[ $$ = 1 ] || echo 'processes are not apart'
while read -r key value _; do
  case "$key $value" in
    'NoNewPrivs: 0'|'Seccomp: 0') echo "$key $value" ;;
    CapEff:*) [ "$((16#$value))" = 0 ] || echo "capabilities $value" ;;
  esac
done </proc/self/status
for file in / /usr/ /dev/ /etc/; do (: >"${file}jaxagent-probe") 2>/dev/null && echo "$file can be written"; done
(: </proc/1/environ) 2>/dev/null && echo 'the first process is open to the others'
(: >probe) 2>/dev/null || echo 'the folder cannot be written'
while read -r name _; do
  [[ $name = lo: || $name != *: ]] || echo "network $name"
done </proc/net/dev
(ulimit -u 1; exec xargs true) </dev/null >/dev/null 2>&1 && echo 'the number of processes is not limited'
(ulimit -u 8; exec xargs true) </dev/null >/dev/null 2>&1 || echo 'processes outside count too'
echo probed
"""


def first_process(limits: SandboxLimits) -> list[str]:
  kib = 1024
  bounds = {
    "-v": limits.memory // kib, "-f": limits.file_size // kib, "-u": limits.processes, "-n": limits.open_files,
    "-c": 0, "-l": 0, "-q": 0,
  }  # fmt: skip
  options = [text for name, value in bounds.items() for text in (name, str(value))]
  return [SHELL, "-c", FIRST_PROCESS, "bash", str(limits.cpu), COMMAND, *options]


def bubblewrap(
  program: Sequence[str], limits: SandboxLimits, *, seccomp: int, shell: int, info: int | None = None
) -> list[str]:
  """The command that runs `program` as pid 1 of a new sandbox. `seccomp`, `shell`, `info` are open descriptors.

  `shell` becomes `SHELL`, which can be executed and not read: the kernel keeps the memory and the descriptors of a
  process that runs such a file from all others.

  Root gives up its identity first: the kernel does not limit the number of root's processes, in no namespace.
  """
  identity = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
  cover = ["--tmpfs", str(PACKAGE), "--remount-ro", str(PACKAGE)] if PACKAGE.is_relative_to("/usr") else []
  return [
    *identity, "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--assert-userns-disabled",
    "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--seccomp", str(seccomp),
    *(() if info is None else ("--info-fd", str(info))),
    "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", SCRATCH,
    "--setenv", "PWD", FOLDER, "--setenv", "LC_ALL", "C.UTF-8", "--setenv", "TERM", "dumb", "--hostname", "sandbox",
    "--ro-bind", "/usr", "/usr", *cover, *_beside_usr(), *(x for p in SHOWN_OF_ETC for x in ("--ro-bind-try", p, p)),
    "--proc", "/proc", "--dev", "/dev", "--perms", "0111", "--ro-bind-data", str(shell), SHELL,
    "--size", str(limits.disk), "--tmpfs", FOLDER, "--size", str(limits.disk), "--tmpfs", SCRATCH,
    "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--", *program,
  ]  # fmt: skip


def _beside_usr() -> list[str]:
  found = []
  for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
    if path.is_symlink():
      found += ["--symlink", os.readlink(path), str(path)]
    elif path.is_dir():
      found += ["--ro-bind", str(path), str(path)]
  return found


def open_shell() -> int:
  return os.open(shutil.which("bash") or "/bin/bash", os.O_RDONLY | os.O_CLOEXEC)


def pipe_of(content: bytes) -> int:
  """The reading end of a pipe that holds `content` (less than a page) and ends there."""
  reader, writer = os.pipe()
  os.write(writer, content)
  os.close(writer)
  return reader


@functools.cache
def require_confinement() -> None:
  """Probes once, with a real sandbox, whether this machine confines. ValueError: what is wrong, and what to do."""
  if sys.platform != "linux":
    raise ValueError(f"terminal: its sandbox needs Linux, got {sys.platform}; nothing is run without a sandbox")
  for program, package in {"bwrap": "bubblewrap", "bash": "bash", "xargs": "findutils"}.items():
    _require_program(program, package)
  if os.geteuid() == 0:
    _require_program("setpriv", "util-linux")
  said = _probe(PROBE)
  if said != "probed":
    raise ValueError(
      f"terminal: this machine does not confine a sandbox, and nothing is run without one: {said}. It needs Linux 5.14"
      " and bubblewrap 0.8, or newer ones, and user namespaces for ordinary users: sysctl user.max_user_namespaces > 0"
      " and, where they exist, kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0;"
      " in a container, a seccomp profile and a /proc that allow them (Docker: --security-opt seccomp=unconfined"
      " --security-opt systempaths=unconfined)"
    )


def _require_program(program: str, package: str) -> None:
  if shutil.which(program) is None:
    raise ValueError(f"terminal: its sandbox needs {program}, which is not on PATH; install {package} (apt-get)")


def _probe(script: str) -> str:
  seccomp, shell = pipe_of(seccomp_filter()), open_shell()
  try:
    done = subprocess.run(
      bubblewrap([SHELL, "-c", script], SandboxLimits(), seccomp=seccomp, shell=shell),
      pass_fds=(seccomp, shell), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    return "the probe took longer than 30 s"
  finally:
    os.close(seccomp)
    os.close(shell)
  return "; ".join((done.stdout + done.stderr).split("\n")).strip("; ") or f"the probe ended with {done.returncode}"
