"""The environment `terminal`: its tasks, its verifier, and an agent that cheats."""

import asyncio
import dataclasses
import os
import random
import sys

import jax
import pytest
from scripted import ScriptedEngine

from jaxagent.config import Env
from jaxagent.envs.base import Action, Malformed, ToolCall
from jaxagent.envs.registry import resolve
from jaxagent.envs.splits import task_seed
from jaxagent.envs.terminal import Sandbox, SandboxGone, SandboxLimits, Terminal, confinement, verifier
from jaxagent.envs.terminal.tasks import ASSERTIONS, KINDS, LEVELS, Task, generators
from jaxagent.envs.terminal.tasks.task import Case, Content, Exists, Line, Mode, Others, Prefix, Setting, parsed
from jaxagent.envs.terminal.verifier import score
from jaxagent.models.chat import Chat, write_calls
from jaxagent.models.tokenizer import byte_tokenizer
from jaxagent.rollout.batch import to_rollouts
from jaxagent.rollout.episode import Limits, run_episode
from jaxagent.sampling.request import Sampling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the platform is not Linux")

MAKERS = [(level, make) for level in LEVELS for make in generators(KINDS, level)]
each_generator = pytest.mark.parametrize("level, make", MAKERS, ids=[f"{level}-{m.__name__}" for level, m in MAKERS])


def call(command):
  return Action("", (ToolCall("bash", {"input": command}),))


def play(task, *actions, **options):
  """Steps of an episode of this task; a text is a command, and an Action is taken as it is."""

  async def run():
    tasks = Terminal(**options)
    episode, seed = tasks.environment("train", 0)
    object.__setattr__(tasks, "task", lambda split, seed: task)
    steps = []
    try:
      await episode.reset(seed)
      for action in actions:
        steps.append(await episode.step({0: call(action) if isinstance(action, str) else action}))
    finally:
      await episode.close()
    return steps

  return asyncio.run(run())


DONE = Action("done")


def said(step):
  return step.observations[0].messages[-1]["content"]


# --- tasks ------------------------------------------------------------------------------------------------------------


def solved(make, seed):
  task = make(random.Random(seed))
  untouched, *turns, last = play(task, "true", *task.solution, DONE)
  assert untouched.outcome == 0 and untouched.info["columns"] == {"assertions_passed": 0}
  assert [said(turn) for turn in turns] == ["[exit 0]"] * len(task.solution)
  assert (last.status, last.outcome, last.info["columns"]) == ("done", 1.0, {"assertions_passed": 20})
  assert len(last.info["record"]) == ASSERTIONS and not last.info["reports"]


@each_generator
def test_untouched_scores_0_and_the_solution_20_of_20(level, make):
  solved(make, 0)


@pytest.mark.slow
@each_generator
def test_every_task_can_be_solved(level, make):
  for seed in range(1, 12):
    solved(make, seed)


@each_generator
def test_a_generator_gives_many_tasks_and_the_same_ones_for_the_same_seed(level, make):
  made = [make(random.Random(seed)) for seed in range(200)]
  assert made[:20] == [make(random.Random(seed)) for seed in range(20)]
  assert len({task.identity for task in made}) > 100
  assert len({task.name for task in made}) == 1 and made[0].name.split("/")[0] in KINDS
  if level == "tiny":
    assert max(len(task.prompt.encode()) for task in made) <= 60
    assert max(len(command.encode()) for task in made for command in task.solution) <= 60
    assert all(len(task.solution) == 1 for task in made)
  assert all(len(task.solution) <= 3 for task in made)


def test_every_kind_has_three_generators_of_each_level():
  assert {(kind, level): len(generators((kind,), level)) for kind in KINDS for level in LEVELS} == {
    (kind, level): 3 for kind in KINDS for level in LEVELS
  }


@pytest.mark.parametrize("level", LEVELS)
def test_no_task_is_in_both_splits(level):
  tasks = Terminal(level=level)
  train, held = (
    {tasks.task(split, task_seed(split, i)).identity for i in range(n)} for split, n in (("train", 400), ("eval", 60))
  )
  assert train and held and not train & held


def test_a_task_with_facts_that_do_not_divide_the_assertions_is_an_error():
  with pytest.raises(ValueError, match="must divide 20 assertions, got 3"):
    Task("x", "x", (), facts=(Content("a", "1"),) * 3)
  with pytest.raises(ValueError, match="got 0"):
    Task("x", "x", ())


@each_generator
def test_gaming_does_not_pay(level, make):
  """What an agent may do without reading the task: what passes is that a file is there, and that a name is gone."""
  task = make(random.Random(3))
  paths = [getattr(fact, name) for fact in task.facts for name in ("path", "new") if hasattr(fact, name)]
  paths = " ".join(dict.fromkeys([*paths, *(case.script for case in task.cases)]))
  free = sum(isinstance(fact, Exists) for fact in task.facts) * ASSERTIONS // (len(task.facts) + len(task.cases))
  steps = play(
    task,
    "for f in $(find . -type f); do cat $f $f > /tmp/x; cat /tmp/x > $f; done",
    f"rm -rf -- *; for f in {paths}; do mkdir -p $(dirname $f); : > $f; done",
    f"rm -rf -- *; for f in {paths}; do mkdir -p $(dirname $f); ln -s /etc/passwd $f; done",
    "rm -rf -- *",
  )
  passed = [step.info["columns"]["assertions_passed"] for step in steps]
  assert passed == [0, free, 0, 0]


@pytest.mark.parametrize(
  "content, format, settings",
  [
    ("[a]\nx = 1\ny=2\n[b]\nx = 3\n", "ini", {("a", "x"): "1", ("a", "y"): "2", ("b", "x"): "3"}),
    ("[a]\nx = 1\nx = 2\n", "ini", None), ("x = 1\n", "ini", None),
    ("# c\nA=1\n\nB=x=y\n", "env", {("A",): "1", ("B",): "x=y"}), ("A=1\nA=2\n", "env", None), ("A\n", "env", None),
    ('{"a": {"b": 1, "c": [2]}}', "json", {("a", "b"): 1, ("a", "c"): [2]}),
    ('{"a": ', "json", None), ("[" * 60000, "json", None), ('{"a":' * 9000 + "1" + "}" * 9000, "json", None),
    ("9" * 5000, "json", None), (None, "json", None),
  ],
)  # fmt: skip
def test_parses_settings(content, format, settings):
  assert parsed(content, format) == settings


class Files:
  """A folder of the verifier's, in memory: {path: text, or mode}."""

  def __init__(self, **files):
    self.files = files

  def read(self, path, most):
    return self.files[path].encode() if path in self.files else None


@pytest.mark.parametrize(
  "fact, holds, holds_not",
  [
    (Content("a", "x\ny\n"), ["x\ny", "x\ny\n"], ["x", "x\ny\n\n", "x\ny\nz", ""]),
    (Prefix("a", "xy"), ["xy", "xyz\n"], ["x", " xy"]),
    (Line("a", 1, 2, "y"), ["x\ny\n", "\ny"], ["y", "x\ny\nz", "x\ny \n", "y\nx\n"]),
    (Setting("a", "env", ("K",), "1"), ["K=1", "J=2\nK=1\n"], ["K=1 ", "K=2", "", "K=1\nK=1"]),
    (Setting("a", "env", ("K",), None), ["J=1", ""], ["K=", "J"]),
    (Setting("a", "json", ("k",), 1), ['{"k": 1}'], ['{"k": true}', '{"k": 1.0}', '{"k": "1"}', "1"]),
    (Others("a", "env", frozenset({("K",)}), ((("J",), "2"),)), ["J=2", "K=7\nJ=2"], ["J=3", "J=2\nL=1", "", "J"]),
  ],
)
def test_facts(fact, holds, holds_not):
  assert [fact.holds(Files(a=text)) for text in holds] == [True] * len(holds)
  assert [fact.holds(Files(a=text)) for text in holds_not] == [False] * len(holds_not)
  assert not fact.holds(Files())


# --- the episode ------------------------------------------------------------------------------------------------------

WRITE = Task("x/write", "p", (), facts=tuple(Content(name, name) for name in "abcd"), files=(("given/in", "text\n"),))


def test_every_step_is_judged_on_the_one_scale():
  first, second, last = play(WRITE, "cat given/in; echo a > a", "echo b > b; echo c > c", Action("x"))
  assert [said(first), said(second)] == ["text", "[exit 0]"]
  assert [s.outcome for s in (first, second, last)] == [0.25, 0.75, 0.75]
  assert [s.info["columns"]["assertions_passed"] for s in (first, second, last)] == [5, 15, 15]
  assert [s.status for s in (first, second, last)] == ["running", "running", "done"]
  assert list(last.info["record"])[:2] == ["1: a holds 'a'", "2: a holds 'a'"]


def test_a_broken_guard_leaves_nothing():
  task = dataclasses.replace(WRITE, guards=(Content("given/in", "text"),))
  steps = play(task, "echo a > a", "echo > given/in", "echo text > given/in")
  assert [step.outcome for step in steps] == [0.25, 0, 0.25]


def test_several_calls_in_a_turn_run_one_after_the_other():
  (step,) = play(WRITE, Action("", (*call("echo 1 > n; echo one").calls, *call("cat n").calls, Malformed("not JSON"))))
  messages = step.observations[0].messages
  assert [m["content"] for m in messages] == ["one", "1", "error: not JSON"]
  assert {m["role"] for m in messages} == {"tool"}


@pytest.mark.parametrize(
  "wrong, text",
  [
    (ToolCall("sh", {"input": "ls"}), "error: no tool 'sh', only bash"),
    (ToolCall("bash", {"command": "ls"}), "error: bash takes one text, input"),
    (ToolCall("bash", {"input": 1}), "error: bash takes one text, input"),
    (Malformed("no closing tag"), "error: no closing tag"),
    (ToolCall("bash", {"input": "\0"}), "error: a command has at most 32768 bytes and no NUL\n[exit 126]"),
  ],
)
def test_what_is_wrong_with_a_call_goes_back_to_the_model(wrong, text):
  (step,) = play(WRITE, Action("", (wrong,)))
  assert (said(step), step.status, step.outcome) == (text, "running", 0.0)


def test_the_last_turn_is_run_and_truncates():
  *_, last = play(WRITE, "true", "true", "true", "echo a > a", max_turns=4)
  assert (last.status, last.outcome) == ("truncated", 0.25) and "a call in turn 4 of at most 4" in last.cause


def test_a_cut_answer_is_truncated_and_keeps_what_was_done():
  *_, last = play(WRITE, "echo a > a", Action("do", truncated=True))
  assert (last.status, last.outcome) == ("truncated", 0.25)


def test_output_is_cut():
  (step,) = play(WRITE, "seq 1000", shown=64)
  assert "[3829 bytes cut]" in said(step) and len(said(step)) < 100


def test_what_was_killed_is_reported():
  *_, last = play(WRITE, "sleep 9", "sleep 9 & sleep 0.1; echo a > a", DONE, limits={"wall": 0.5})
  assert last.info["reports"] == ("turn 1: killed: longer than 0.5 s", "turn 2: 1 left running, killed")
  assert last.outcome == 0.25


def test_a_sandbox_that_had_to_be_stopped_leaves_no_record_and_a_cause():
  (step,) = play(WRITE, "echo a > a; for i in $(seq 200); do : > f$i; done", limits={"files": 100})
  assert (step.status, step.outcome, step.info["columns"]) == ("truncated", 0.0, {"assertions_passed": -1})
  assert step.cause == "no record of assertions: the sandbox was stopped: more than 100 files"


def test_a_sandbox_that_dies_is_a_failure_and_no_reward(monkeypatch):
  async def dies(self, command, **_):
    raise SandboxGone("the sandbox died")

  monkeypatch.setattr(Sandbox, "run", dies)
  with pytest.raises(SandboxGone):
    play(WRITE, "true")


@pytest.mark.parametrize(
  "record, cause, expected",
  [
    ({"a": True, "b": False}, "", (1, 0.05, "")),
    ({str(i): True for i in range(20)}, "", (20, 1.0, "")),
    ({str(i): True for i in range(35)}, "", (35, 1.75, "")),
    ({str(i): False for i in range(20)}, "", (0, 0.0, "")),
    (None, "it was stopped", (-1, 0.0, "no record of assertions: it was stopped")),
    ({}, "", (-1, 0.0, "record without an assertion")),
  ],
)
def test_scores(record, cause, expected):
  got = score(record, cause)
  assert (got.passed, round(got.outcome, 6), got.cause) == expected


# --- attacks on the verifier ------------------------------------------------------------------------------------------

ONE = Task("x/one", "p", (), facts=(Content("d/a", "a"),))


@pytest.mark.parametrize(
  "command",
  [
    "mkdir d; ln -s /tmp/a d/a; echo a > /tmp/a", "mkdir e; echo a > e/a; ln -s e d", "mkdir d; mkfifo d/a",
    "mkdir d; ln -s /proc/self/root/sandbox/x d/a; echo a > x", "mkdir d; ln -s a d/a", "mkdir d; ln -s /dev/zero d/a",
    "mkdir d; truncate -s 8M d/a", "mkdir -p d/a", "mkdir d; echo a > d/b; chmod 0 d", "echo a > d",
    "mkdir d; perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => \"d/a\", Listen => 1) or die'",
    "mkdir d; for i in $(seq 300); do echo a > d/$(printf \"%0200d\" $i); done",
    "for i in $(seq 300); do mkdir d; cd d; done; echo a > a; cd /sandbox; rm -f d/a",
    "mkdir d; (while :; do rm -f d/a; ln -s /tmp/a d/a; done) & echo a > /tmp/a; sleep 0.2",
  ],
)  # fmt: skip
def test_links_and_special_files_are_not_followed_and_do_not_hang(command):
  step, last = play(ONE, command, DONE)
  assert (step.outcome, last.outcome, last.status) == (0.0, 0.0, "done")


PROGRAM = Task("x/program", "p", (), cases=tuple(Case("f.sh", (str(n),), "x\n", str(n * 7)) for n in (3, 5, 8, 13)))


@pytest.mark.parametrize(
  "program, passed",
  [
    ("echo $(($1*7))", 20), ("read x; [ $x = x ] && echo $(($1*7))", 20), ("echo 21", 5), ("echo $(($1*7)); exit 1", 0),
    ("sleep 9", 0), ("[ $1 = 5 ] && sleep 9; echo $(($1*7))", 5), (":(){ :|:& };:; wait", 0), ("yes", 0),
    ("setsid sleep 9 & echo $(($1*7))", 20), ("echo 21 >> /tmp/seen; cat /tmp/seen", 5),
    ("cat ../*/*.py /sandbox/* /tmp/* | grep -ao '2[1]'", 0), ("kill -9 -1", 0), ("kill -9 $PPID", 0),
    ("for i in $(seq 9999); do : > $i; done; echo $(($1*7))", 0), ("head -c 99999 /dev/zero", 0), ("", 0),
    ("echo $(($1*7)) >&2", 0), ("cat given 2>&1; echo $(($1*7)) | tee -a f.sh", 0),
  ],
)  # fmt: skip
def test_programs_run_on_their_own_and_win_nothing(program, passed, monkeypatch):
  monkeypatch.setattr(verifier, "CASE_WALL", 0.5)
  last = play(PROGRAM, f"cat > f.sh <<'END'\n{program}\nEND" if program else ": > f.sh")[-1]
  assert last.info["columns"] == {"assertions_passed": passed}


@pytest.mark.parametrize(
  "command", ["printf 'a\\0b' > f.sh", "printf '\\377' > f.sh", "ln -s /bin/true f.sh", "head -c 9000 /dev/zero > f.sh"]
)
def test_what_is_no_program_is_not_run(command, monkeypatch):
  started = []
  start = Sandbox.start

  async def counted(*args, **kwargs):
    started.append(args)
    return await start(*args, **kwargs)

  monkeypatch.setattr(Sandbox, "start", counted)
  assert play(PROGRAM, command)[-1].outcome == 0 and len(started) == 1


def test_a_program_is_run_again_only_when_it_changed(monkeypatch):
  ran = []
  case = verifier.Verifier._case

  async def counted(self, *args):
    ran.append(args)
    return await case(self, *args)

  monkeypatch.setattr(verifier.Verifier, "_case", counted)
  steps = play(PROGRAM, "echo 'echo 21' > f.sh", "true", "echo 'echo $(($1*7))' > f.sh", DONE)
  assert [step.outcome for step in steps] == [0.25, 0.25, 1.0, 1.0] and len(ran) == 8


def test_verifying_where_no_sandbox_can_be_had_is_a_failure_and_no_reward(monkeypatch):
  async def none(self, programs):
    raise OSError("no sandbox")

  monkeypatch.setattr(verifier.Verifier, "_try", none)
  with pytest.raises(OSError, match="no sandbox"):
    play(PROGRAM, "echo 'echo 21' > f.sh")


def test_what_the_verifier_knows_is_not_in_the_sandbox():
  task = dataclasses.replace(PROGRAM, cases=tuple(dataclasses.replace(c, output="xyzzy") for c in PROGRAM.cases))
  for command in ("grep -rl xyzzy /sandbox /tmp /etc /proc/*/environ /proc/*/cmdline 2>/dev/null", "env; set"):
    assert "xyzzy" not in said(play(task, command)[-1]).replace(command, "")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "options, message",
  [
    ({"kinds": ("file",)}, "kinds must be some of files, data, programs, config"), ({"kinds": ()}, "kinds"),
    ({"kinds": ("data", "data")}, "kinds"), ({"level": "small"}, "level must be one of full, tiny, got 'small'"),
    ({"max_turns": 1}, "max_turns must be at least 4"), ({"max_turns": 1, "level": "tiny"}, "at least 2"),
    ({"shown": 1}, "shown"), ({"limits": {"ram": 1}}, "limits takes some of memory"), ({"limits": 3}, "limits takes"),
    ({"limits": {"wall": -1}}, "limits.wall must be"),
  ],
)  # fmt: skip
def test_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    Terminal(**options)


def test_a_machine_that_does_not_confine_is_refused_at_once(monkeypatch):
  monkeypatch.setattr(confinement.shutil, "which", lambda name: None)
  confinement.require_confinement.cache_clear()
  with pytest.raises(ValueError, match="needs bwrap, which is not on PATH; install bubblewrap"):
    Terminal()


def test_by_name_and_with_the_options_of_a_config():
  tasks = resolve(Env("terminal", {"kinds": ["data"], "level": "tiny", "limits": {"wall": 3}}))
  assert tasks == Terminal(kinds=("data",), level="tiny", limits=SandboxLimits(wall=3))
  assert tasks.size("train") is None and tasks.task("train", 0).name.startswith("data/")
  with pytest.raises(ValueError, match="split must be"):
    tasks.size("test")


def test_a_demonstration_is_what_an_episode_says():
  tasks = Terminal(level="full", system="You are in a shell.")

  async def one(index):
    messages, tools = tasks.demonstration(index)
    episode, seed = tasks.environment("train", index)
    observation = (await episode.reset(seed))[0]
    assert observation.messages == messages[:2] and observation.tools == tools
    for words, reply in zip(messages[2:-1:2], messages[3:-1:2]):
      function = words["tool_calls"][0]["function"]
      step = await episode.step({0: Action("", (ToolCall(function["name"], function["arguments"]),))})
      assert step.observations[0].messages == (reply,)
    step = await episode.step({0: Action(messages[-1]["content"])})
    await episode.close()
    return step.outcome

  async def several():
    return await asyncio.gather(*map(one, range(4)))

  assert asyncio.run(several()) == [1.0] * 4


def test_the_same_seed_gives_the_same_episode():
  tasks = Terminal(level="tiny")

  async def opening():
    episode, seed = tasks.environment("eval", 5)
    observation = await episode.reset(seed)
    step = await episode.step({0: call("ls -l --time-style=+; head -n 9 *")})
    await episode.close()
    return observation, step

  observation, step = asyncio.run(opening())
  assert (observation, step) == asyncio.run(opening())
  assert step.info["task"].startswith(f"{tasks.kind('eval', 5)}/")


def test_mode_sees_the_content_too():
  class Stub(Files):
    def mode(self, path):
      return 0o640

    def stat(self, path):
      return type("Stat", (), {"st_size": len(self.files[path])})

  assert Mode("a", 0o640, "xx").holds(Stub(a="xx")) and not Mode("a", 0o640, "xx").holds(Stub(a="x"))
  assert Mode("a", 0o600, "xx", 0o700).holds(Stub(a="xx")) and not Mode("a", 0o600, "xx").holds(Stub(a="xx"))


# --- in a rollout -----------------------------------------------------------------------------------------------------


def rollout(tasks, write, index, *, max_turns=4, tool_format="plain"):
  chat = Chat(byte_tokenizer(), tool_format=tool_format)
  environment, seed = tasks.environment("train", index)
  engine = ScriptedEngine(chat.tokenizer, chat.eot, write, capacity=4000)
  limits = Limits(max_turns=max_turns, max_tokens=4000, timeout=60)
  sampling = Sampling(max_tokens=1000)
  run = run_episode(engine, chat, environment, seed, sampling=sampling, limits=limits, key=jax.random.key(0))
  (trajectory,) = asyncio.run(run)
  return trajectory


@pytest.mark.parametrize("tool_format", ["plain", "hermes", "qwen_xml"])
def test_the_demonstrated_words_solve_the_task_in_every_tool_format(tool_format):
  tasks = Terminal(kinds=("files", "data"), level="tiny")
  command = tasks.demonstration(0)[0][1]["tool_calls"][0]["function"]["arguments"]["input"]
  words = write_calls([ToolCall("bash", {"input": command})], tool_format)
  trajectory = rollout(tasks, lambda text, rng: "done" if "[exit 0]" in text else words, 0, tool_format=tool_format)
  assert (trajectory.status, trajectory.outcome) == ("done", 1.0)
  assert trajectory.columns == {"assertions_passed": 20}


def test_rollouts_that_end_in_any_way_have_the_column():
  tasks = Terminal(kinds=("files",), level="tiny")
  ends = [
    rollout(tasks, lambda text, rng: "done", 0),
    rollout(tasks, lambda text, rng: "<bash>true</bash>", 0, max_turns=2),
    rollout(tasks, lambda text, rng: "<bash>yes", 0, max_turns=2),
  ]
  assert [t.status for t in ends] == ["done", "truncated", "truncated"]
  ends = [dataclasses.replace(t, rollout=i) for i, t in enumerate(ends)]
  rollouts = to_rollouts(ends, tokens=4000, turns=4)
  assert rollouts.columns["assertions_passed"].tolist() == [0, 0, 0]


def test_an_episode_that_overruns_its_time_fails_and_leaves_no_process():
  tasks = Terminal(kinds=("files",), level="tiny", limits={"wall": 30})
  environment, seed = tasks.environment("train", 0)
  chat = Chat(byte_tokenizer())
  engine = ScriptedEngine(chat.tokenizer, chat.eot, lambda text, rng: "<bash>setsid sleep 77 & sleep 77</bash>")
  limits, sampling = Limits(max_turns=4, max_tokens=900, timeout=1.0), Sampling(max_tokens=100)
  run = run_episode(engine, chat, environment, seed, sampling=sampling, limits=limits, key=jax.random.key(0))
  (trajectory,) = asyncio.run(run)
  assert trajectory.status == "failed" and "took longer than 1.0 s" in trajectory.cause and trajectory.outcome == 0
  assert not living(environment._sandbox.pid)


def living(pid):
  try:
    os.stat(f"/proc/{pid}")
  except FileNotFoundError:
    return False
  return True
