"""The sandbox, and attacks on it. Without bubblewrap these fail: nothing is skipped on Linux."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxagent
from jaxagent.envs.terminal import Sandbox, SandboxGone, SandboxLimits, confinement, sandbox, syscalls
from jaxagent.envs.terminal.cgroup import Group, delegated
from jaxagent.envs.terminal.confinement import require_confinement

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the platform is not Linux")

MIB = 2**20


def namespace(pid):
  try:
    return os.readlink(f"/proc/{pid}/ns/pid")
  except OSError:
    return ""


def living(of):
  """Processes of this machine that live in a sandbox's process namespace."""
  return [pid for pid in os.listdir("/proc") if pid.isdigit() and namespace(pid) == of]


def inside(*commands, shown=4096, then=None, **limits):
  """Results of the commands, in one sandbox; a SandboxGone is the last of them. No process may outlive it."""

  async def play():
    box = await Sandbox.start(SandboxLimits(**limits), shown=shown)
    of, results = namespace(box.pid), []
    assert of and str(box.pid) in living(of)
    try:
      for command in commands:
        results.append(await box.run(command))
      if then is not None:
        results.append(then(box))
    except SandboxGone as gone:
      results.append(gone)
    finally:
      await box.close()
    assert living(of) == []
    return results

  return asyncio.run(play())


def text(*commands, **options):
  return inside(*commands, **options)[-1].text


def test_the_folder_and_exported_variables_stay_and_the_rest_does_not():
  commands = ["mkdir a; cd a; echo 1 > f; export X='a  b'; Y=1", "pwd; cat f; echo \"[$X$Y]\"; exit 3", "cd ..; pwd"]
  first, second, third = inside(*commands)
  assert (first.text, second.text, third.text) == ("[exit 0]", "/sandbox/a\n1\n[a  b]\n[exit 3]", "/sandbox")


@pytest.mark.parametrize(
  "command, said",
  [
    ("echo a; echo b >&2", "a\nb"), ("true", "[exit 0]"), ("exit 7", "[exit 7]"), ("echo a; false", "a\n[exit 1]"),
    ("printf 'a\\0b\\377'", "a\0b�"), ("cat", "[exit 0]"), ("cat <<'E'\na 'b' \"c\"\nE", "a 'b' \"c\""),
    ("if", "bash: eval: line 2: syntax error: unexpected end of file\n[exit 2]"), ("", "[exit 0]"),
    ("\ud800", "error: the command is not text\n[exit 126]"),
    ("a\0b", "error: a command has at most 32768 bytes and no NUL\n[exit 126]"),
    ("#" * 32769, "error: a command has at most 32768 bytes and no NUL\n[exit 126]"),
    ("#" * 32768, "[exit 0]"), ("ls -a /sandbox /tmp; echo $HOME", "/sandbox:\n.\n..\n\n/tmp:\n.\n..\n/tmp"),
    ("env | grep -c SECRET", "0\n[exit 1]"),
  ],
)  # fmt: skip
def test_what_a_command_says(command, said, monkeypatch):
  monkeypatch.setenv("SECRET", "1")
  assert text(command) == said


def test_output_is_cut_in_its_middle_and_says_by_how_much():
  (result,) = inside("seq 1 1000", shown=20)
  assert result.output == "1\n2\n3\n4\n5\n\n[3873 bytes cut]\n\n999\n1000\n"
  assert result.cut == 3873 and len("".join(f"{i}\n" for i in range(1, 1001))) == 3873 + 20
  assert inside("printf 1234567890", shown=10)[0].output == "1234567890"


ATTACKS = {  # name: (limits, commands, what the last but one says; the last shows that the tool still works)
  "endless output": ({}, ["yes"], "[killed: more than 1048576 bytes of output]"),
  "no end": ({"wall": 0.3}, ["sleep 100"], "[killed: longer than 0.3 s]"),
  "no end, deaf": ({"wall": 0.3}, ["trap '' TERM INT HUP USR1; while :; do :; done"], "[killed: longer than 0.3 s]"),
  "memory": ({"memory": 64 * MIB}, ["tail /dev/zero"], "memory exhausted"),
  "a file too large": ({"file_size": 8192}, ["head -c 9000 /dev/zero > a"], "File size limit exceeded"),
  "a sparse file": ({}, ["truncate -s 1T a"], "File size limit exceeded"),
  "the disk": ({"disk": MIB}, ["cat /dev/zero > a"], "No space left on device"),
  "the other disk": ({"disk": MIB}, ["cat /dev/zero > /tmp/a"], "No space left on device"),
  "open files": ({}, ["for i in $(seq 10 100); do eval \"exec $i</dev/null\"; done"], "Bad file descriptor"),
  "kill all": ({}, ["kill -9 -1; echo still"], "still"),
  "kill the shell": ({}, ["kill -9 $$"], "[exit 137]"),
  "kill the first process": ({}, ["for s in 9 15 19 3; do kill -$s 1; done; sleep 0.1; echo still"], "still"),
  "talk as the first process": (
    {}, ["for f in /proc/1/fd/0 /proc/1/fd/2; do echo 1 2 3 > $f; done; echo still"], "Permission denied"),
  "write into the first process": ({}, ["echo > /proc/1/mem"], "Permission denied"),
  "read the first process": ({}, ["cat /proc/1/environ"], "Permission denied"),
  "write into the one to come": ({}, ["cat /shell; echo x > /shell; chmod 777 /shell"], "Read-only file system"),
  "starve the first process": ({}, ["prlimit --pid 1 --as=4096 --cpu=1"], "Operation not permitted"),
  "the root": ({}, ["echo x > /a"], "Read-only file system"),
  "programs": ({}, ["echo x > /usr/bin/bash"], "Read-only file system"),
  "devices": ({}, ["echo x > /dev/shm/a"], "Read-only file system"),
  "a device of one's own": ({}, ["mknod a b 8 0"], "Operation not permitted"),
  "a mount": ({}, ["mount -t tmpfs x /sandbox"], "mount"),
  "a user namespace": ({}, ["unshare -U true"], "unshare failed"),
  "root": ({}, ["su -c id; cat /etc/shadow"], "No such file or directory"),
  "a link out": ({}, ["ln -s /etc/passwd l; cat l"], "No such file or directory"),
  "a path out": ({}, ["cd ../../../..; ls; cat home/* root/*"], "No such file or directory"),
  "the machine's processes": ({}, [f"ls /proc/{os.getpid()}/root"], "No such file or directory"),
  "network": ({}, ["echo > /dev/tcp/1.1.1.1/80"], "Network is unreachable"),
  "network, local": ({}, ["echo > /dev/tcp/127.0.0.1/22"], "refused"),
  "names": ({}, ["getent hosts example.com || echo no such name"], "no such name"),
  "processes left behind": (
    {}, ["sleep 99 & nohup sleep 99 >/dev/null 2>&1 & (setsid sleep 99 &) ; sleep 0.1; echo ok"],
    "ok\n[3 left running, killed]"),
  "a state that blocks": ({"wall": 0.5}, ["exec 3<&-; trap - EXIT; rm -f /tmp/.shell; mkfifo /tmp/.shell"], "[exit 0]"),
  "a state that is garbage": ({}, ["trap - EXIT; echo 'exit 9' > /tmp/.shell; rm /tmp/.shell"], "[exit 0]"),
  "memory that no process holds": (
    {}, ["perl -e '$x = \"x\"; syscall(`uname -m` =~ /aarch/ ? 279 : 319, $x, 0) < 0 and print $!'"],
    "Operation not permitted"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name):
  limits, commands, reported = ATTACKS[name]
  *_, attacked, after = inside(*commands, "echo well", **limits)
  assert reported in attacked.text
  assert after.text == "well"


@pytest.mark.parametrize(
  "bomb", [":(){ :|:& };:", "perl -e 'for (;;) { fork }'", "f() { f & f & wait; }; f"], ids=["bash", "perl", "waiting"]
)
def test_fork_bombs(bomb):
  bombed, after = inside(bomb, "echo well", wall=0.5, processes=16)
  assert bombed.killed == "longer than 0.5 s" or 0 < bombed.left <= 16
  assert after.text == "well"


def test_memory_of_many_processes():
  many = 'for i in 1 2 3 4; do perl -e \'$x = "a" x 40e6; sleep 9\' & done; wait'
  hog, after = inside(many, "echo well", memory=100 * MIB, total_memory=100 * MIB)
  assert hog.killed == f"more than {100 * MIB} bytes of memory"
  assert after.text == "well"


@pytest.mark.slow
def test_cpu_of_a_process():
  (result,) = inside("while :; do :; done", cpu=1, wall=60)
  assert result.code == 137 and not result.killed


def test_too_many_files_stop_the_sandbox():
  gone = inside("i=0; while :; do : > f$((i++)); done", "echo never", files=500)[-1]
  assert isinstance(gone, SandboxGone) and "more than 500 files" in str(gone)


@pytest.mark.parametrize("path", ["/sandbox", "/tmp"])
def test_files_are_counted_also_of_a_short_command(path):
  gone = inside(f"cd {path}; for i in $(seq 600); do : > $i; done", files=500)[-1]
  assert isinstance(gone, SandboxGone)


def test_nothing_of_this_project_can_be_seen_or_written():
  found, written = inside(f"ls {jaxagent.__path__[0]}", f"echo x > {confinement.__file__}; echo $?")
  assert found.code != 0 or found.output == ""
  assert written.output.endswith("1\n") and Path(confinement.__file__).read_text().startswith('"""How a sandbox')


def test_a_package_below_usr_is_covered(monkeypatch):
  monkeypatch.setattr(confinement, "PACKAGE", Path("/usr/lib"))
  arguments = confinement.bubblewrap(["bash"], SandboxLimits(), seccomp=9, shell=8)
  at = arguments.index("/usr/lib")
  assert arguments[at - 1 : at + 3] == ["--tmpfs", "/usr/lib", "--remount-ro", "/usr/lib"]
  assert arguments.index("/usr") < at


def test_what_is_inside_is_what_the_probe_promises():
  status, processes, links = inside(
    "grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status | tr -d '[:blank:]'",
    "echo /proc/[0-9]*",
    "ls /proc/self/fd",
  )
  assert status.text == "CapEff:0000000000000000\nNoNewPrivs:1\nSeccomp:2"
  assert len(processes.output.split()) == 2
  assert links.output.split() == ["0", "1", "2", "3"]  # 3 is the folder that ls reads


def test_a_signal_between_commands_does_no_harm():
  def signalled(box):
    for _ in range(3):
      os.kill(box.pid, signal.SIGUSR1)
      time.sleep(0.01)

  async def play():
    box = await Sandbox.start()
    signalled(box)
    said = (await box.run("echo well")).text
    await box.close()
    return said

  assert asyncio.run(play()) == "well"


async def dying(command, error, what):
  box = await Sandbox.start()
  await box.run("echo x > a")
  asyncio.get_running_loop().call_later(0.1, os.kill, box.pid, signal.SIGKILL)
  with pytest.raises(error, match=what):
    await box.run(command)
  with pytest.raises(SandboxGone, match="its first process ended"):
    await box.run("echo")
  content = box.folder.read("a", 10)
  await box.close()
  return content


def test_a_sandbox_that_is_killed_from_outside_is_a_fault_of_the_machine():
  assert asyncio.run(dying("sleep 9", OSError, "killed from outside")) == b"x\n"


def test_a_sandbox_that_ends_by_itself_is_gone(monkeypatch):
  ends = confinement.FIRST_PROCESS.replace("; do\n", '; do\n[ "$command" = end ] && exit 1\n', 1)
  monkeypatch.setattr(confinement, "FIRST_PROCESS", ends)
  assert asyncio.run(dying("end", SandboxGone, "its first process ended")) == b"x\n"


def test_closing_in_the_middle_of_a_command_kills_it_and_may_be_repeated():
  async def play():
    box = await Sandbox.start()
    of = namespace(box.pid)
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0.3):
        await box.run("setsid sleep 100 & sleep 100")
    assert len(living(of)) >= 3
    await box.close()
    await box.close()
    return living(of)

  before = set(os.listdir("/proc/self/fd"))
  assert asyncio.run(play()) == []
  assert set(os.listdir("/proc/self/fd")) == before


def test_a_start_that_is_cancelled_at_any_moment_leaves_no_process():
  mark = str(7 * MIB + 4096 * (os.getpid() % 1000))  # of this process, in the arguments of bubblewrap

  async def cancelled(after):
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(after):
        box = await Sandbox.start(SandboxLimits(disk=int(mark)))
        await box.close()

  async def play():
    await asyncio.gather(*(cancelled(0.002 * i) for i in range(30)))

  asyncio.run(play())
  for _ in range(500):
    commands = [command_line(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    if not any(mark in command for command in commands):
      return
    time.sleep(0.01)
  raise AssertionError([command[:3] for command in commands if mark in command])


def command_line(pid):
  try:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
  except OSError:
    return []


def test_the_event_loop_goes_on_while_a_command_runs_and_commands_run_side_by_side():
  async def play():
    boxes = await asyncio.gather(*(Sandbox.start() for _ in range(4)))
    running = [asyncio.create_task(box.run("sleep 0.6; echo well")) for box in boxes]
    turns = 0
    while not all(task.done() for task in running):
      await asyncio.sleep(0.01)
      turns += 1
    results = [task.result().text for task in running]
    await asyncio.gather(*(box.close() for box in boxes))
    return turns, results

  turns, results = asyncio.run(play())
  assert turns > 10 and results == ["well"] * 4


HARNESS = """
import asyncio, sys
from jaxagent.envs.terminal.sandbox import Sandbox
async def main():
  box = await Sandbox.start()
  print(box.pid, flush=True)
  await box.run("setsid sleep 100 & sleep 100")
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_sandbox_dies_with_its_harness():
  harness = subprocess.Popen([sys.executable, "-c", HARNESS], stdout=subprocess.PIPE, text=True)
  of = namespace(int(harness.stdout.readline()))
  assert of and living(of)
  harness.kill()
  harness.wait()
  harness.stdout.close()
  for _ in range(500):
    if not living(of):
      return
    time.sleep(0.01)
  raise AssertionError(f"{living(of)} outlived the harness")


@pytest.mark.slow
def test_many_at_once():
  async def one(i):
    box = await Sandbox.start()
    said = (await box.run(f"echo {i} > a; cat a")).text
    await box.close()
    return said

  async def play():
    return await asyncio.gather(*(one(i) for i in range(60)))

  assert asyncio.run(play()) == [str(i) for i in range(60)]


# --- refusing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unprobed():
  require_confinement.cache_clear()
  yield
  require_confinement.cache_clear()


@pytest.mark.parametrize("program, package", [("bwrap", "bubblewrap"), ("bash", "bash")])
def test_without_a_program_nothing_starts(unprobed, monkeypatch, program, package):
  found = confinement.shutil.which
  monkeypatch.setattr(confinement.shutil, "which", lambda name: None if name == program else found(name))
  with pytest.raises(ValueError, match=f"needs {program}, which is not on PATH; install {package}"):
    asyncio.run(Sandbox.start())


def test_another_platform_is_refused(unprobed, monkeypatch):
  monkeypatch.setattr(confinement.sys, "platform", "darwin")
  with pytest.raises(ValueError, match="needs Linux, got darwin"):
    require_confinement()


@pytest.mark.parametrize(
  "without, with_, what",
  [
    (["--cap-drop", "ALL"], ["--cap-add", "ALL"], "capabilities"),
    (["--unshare-all"], ["--unshare-pid", "--unshare-uts"], "network"),
    (["--as-pid-1"], [], "processes are not apart"),
    (["--perms", "0111"], ["--perms", "0555"], "the first process is open to the others"),
    (["--remount-ro", "/"], [], "/ can be written"),
    (["--remount-ro", "/dev"], [], "/dev/ can be written"),
    (["--assert-userns-disabled"], ["--no-such-option"], "Unknown option"),
  ],
)
def test_a_sandbox_that_lets_something_through_is_refused(unprobed, monkeypatch, without, with_, what):
  made = confinement.bubblewrap

  def weaker(*args, **kwargs):
    arguments = made(*args, **kwargs)
    at = next(i for i in range(len(arguments)) if arguments[i : i + len(without)] == without)
    return [*arguments[:at], *with_, *arguments[at + len(without) :]]

  monkeypatch.setattr(confinement, "bubblewrap", weaker)
  with pytest.raises(ValueError, match=f"does not confine.*{what}.*needs Linux"):
    require_confinement()


@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="an ordinary user has no identity to give up")
def test_root_that_stays_root_is_refused(unprobed, monkeypatch):
  monkeypatch.setattr(confinement.os, "geteuid", lambda: 1000)
  with pytest.raises(ValueError, match="the number of processes is not limited"):
    require_confinement()


def test_a_sandbox_that_does_not_start_leaves_nothing(monkeypatch):
  monkeypatch.setattr(sandbox, "first_process", lambda limits: ["bash", "-c", "echo broken; exit 3"])
  before = set(os.listdir("/proc/self/fd"))
  with pytest.raises(OSError, match="did not start: broken"):
    asyncio.run(Sandbox.start())
  assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
  "limits",
  [{"memory": 0}, {"wall": 0}, {"wall": "1"}, {"processes": 2}, {"disk": 1.5}, {"cpu": True}, {"files": 2**60}],
)
def test_wrong_limits(limits):
  with pytest.raises(ValueError, match=f"limits.{next(iter(limits))} must be"):
    SandboxLimits(**limits)


# --- parts ------------------------------------------------------------------------------------------------------------


def verdict(program, architecture, number, argument=0):
  """What a filter answers: a five-line interpreter of the instructions that it uses."""
  steps, at, value = list(syscalls.struct.iter_unpack("=HBBI", program)), 0, 0
  while True:
    code, yes, no, k = steps[at]
    if code == syscalls.RETURN:
      return k
    if code == syscalls.LOAD:
      value, jump = {0: number, 4: architecture, 16: argument}[k], 0
    else:
      jump = yes if (value == k if code == syscalls.JUMP_EQUAL else value >= k) else no
    at += 1 + jump


@pytest.mark.parametrize("machine, column, architecture", [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)])
def test_the_filter_refuses_what_it_lists_and_no_more(machine, column, architecture):
  program = syscalls.seccomp_filter(machine)
  refused = {row[column] for row in syscalls.REFUSED.values()}
  assert {n for n in range(600) if verdict(program, architecture, n) == syscalls.REFUSE} == refused
  assert verdict(program, architecture, syscalls.X32 + 1) == syscalls.REFUSE
  assert verdict(program, 0x40000003, 1) == syscalls.REFUSE  # 32-bit calls
  limits = syscalls.LIMITS_OF_OTHERS[column]
  assert [verdict(program, architecture, limits, pid) == syscalls.REFUSE for pid in (0, 1, 77)] == [False, True, True]


def test_a_machine_without_a_list_is_refused():
  with pytest.raises(ValueError, match="no list of system calls for 's390x'"):
    syscalls.seccomp_filter("s390x")


def delegation(path, controllers):
  path.mkdir(parents=True)
  (path / "cgroup.subtree_control").write_text(controllers)
  return path


def test_a_delegated_cgroup_is_used(tmp_path):
  own, above = delegation(tmp_path / "a" / "own", "memory pids\n"), tmp_path / "a"
  group = Group.create(SandboxLimits(total_memory=64 * MIB, processes=10), 42, (own, above))
  assert group.path.parent == own
  files = {name: (group.path / name).read_text() for name in os.listdir(group.path)}
  assert files == {"memory.max": str(64 * MIB), "memory.swap.max": "0", "pids.max": "18", "cgroup.procs": "42"}
  (group.path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
  assert group.killed() == 2


def test_where_no_cgroup_is_delegated_there_is_none(tmp_path):
  assert Group.create(SandboxLimits(), 42, (tmp_path / "not there",)) is None
  assert Group.create(SandboxLimits(), 42, ()) is None


def test_the_cgroups_that_may_be_ours(tmp_path):
  (tmp_path / "mountinfo").write_text(
    "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n22 1 0:1 / /proc rw - proc proc rw\n"
  )
  (tmp_path / "cgroup").write_text("0::/user.slice/run/own\n")
  own = Path("/sys/fs/cgroup/user.slice/run/own")
  assert delegated(tmp_path) == (own, own.parent)
  (tmp_path / "cgroup").write_text("0::/\n")
  assert delegated(tmp_path) == (Path("/sys/fs/cgroup"),)
  assert delegated(tmp_path / "not there") == ()
