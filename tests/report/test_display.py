import io
import re

import pytest
from rich.console import Console

from jaxagent.report import display
from jaxagent.report.display import Display, line, list_rollouts, show_rollout
from jaxagent.report.store import to_record
from jaxagent.types import Trajectory

TRAIN = {
  "step": 3, "phase": "train", "loss": 0.01234, "reward/mean": 0.5, "success/mean": 0.25, "logp_gap/max": 1.2e-6,
  "tokens_per_second/rollout": 12345.6, "tokens_per_second/update": 99.0, "time/step": 1.25, "entropy": 0.7,
}  # fmt: skip


def trajectory(**changes) -> Trajectory:
  fields = dict(
    task=17, group=2, rollout=5, tokens=[72, 105, 33, 27, 91, 51], action=[False, False, True, True, False, True],
    turn=[-1, -1, 0, 0, -1, 1], logp_rollout=[0.0] * 6, logp_sampled=[0.0] * 6, turn_reward=[0.125, 0.5], outcome=1.0,
    status="done",
    transcript=[
      {"role": "user", "content": "Hi [bold]"}, {"role": "assistant", "content": "!", "tool_calls": [{"name": "add"}]},
      {"role": "tool", "content": "["}, {"role": "assistant", "content": "3"},
    ],
  )  # fmt: skip
  return Trajectory(**fields | changes)


def consoles():
  plain = Console(file=io.StringIO(), highlight=False, width=30)
  terminal = Console(file=io.StringIO(), highlight=False, force_terminal=True, color_system="standard", width=150)
  return plain, terminal


def decode(ids) -> str:
  return bytes(ids).decode()


@pytest.mark.parametrize(
  "record, total, want",
  [
    (
      TRAIN,
      10,
      "step 3/10  reward 0.500  success 0.250  loss 0.01234  gap 1.2e-06  12,346 tok/s rollout  99 tok/s update  1.2 s",
    ),
    ({"step": 0, "phase": "eval", "eval/success": 0.4, "entropy": 2}, None, "evaluation after step 0:  success 0.4"),
    ({"step": 7, "phase": "sft", "loss": 2.5, "grad_norm": 1.0}, 50, "warm start 7/50  loss 2.5"),
    ({"step": 7, "phase": "sft", "eval/success": 0.3}, 50, "warm start 7/50  success 0.3"),
    ({"step": 1, "phase": "train", "loss": float("nan"), "reward/mean": None}, None, "step 1  loss nan"),
  ],
)  # fmt: skip
def test_a_record_on_one_line(record, total, want):
  assert line(record, total=total) == want


def test_one_plain_line_a_step_where_there_is_no_terminal():
  plain, _ = consoles()
  with Display("runs/quickstart-1", steps=10, console=plain) as screen:
    screen.write(TRAIN)
    screen.warn("a [red]gap[/red]")
  lines = plain.file.getvalue().splitlines()
  assert lines == ["run folder: runs/quickstart-1", line(TRAIN, total=10), "warning: a [red]gap[/red]"]


def test_a_warm_start_has_a_plain_line_every_tenth_step_and_for_each_evaluation():
  plain, _ = consoles()
  with Display("runs/x", steps=2, warm_start=20, console=plain) as screen:
    for step in range(1, 21):
      screen.write({"step": step, "phase": "sft", "loss": 1.0})
    screen.write({"step": 15, "phase": "sft", "eval/success": 0.5})
  lines = [text for text in plain.file.getvalue().splitlines() if text.startswith("warm start")]
  assert [text.split()[2] for text in lines] == ["10/20", "20/20", "15/20"]


def test_a_terminal_gets_a_bar_and_evaluations_above_it():
  _, terminal = consoles()
  with Display("runs/quickstart-1", steps=10, warm_start=4, console=terminal) as screen:
    screen.write({"step": 2, "phase": "sft", "loss": 2.5})
    screen.write(TRAIN)
    screen.write({"step": 3, "phase": "eval", "eval/success": 0.4})
  text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
  assert "2/4" in text and "3/10" in text and "reward 0.500" in text and "12,346 tok/s rollout" in text
  assert "evaluation after step 3/" not in text and "evaluation after step 3:  success 0.4" in text


def test_a_rollout_block_by_block_from_its_messages():
  plain, _ = consoles()
  show_rollout(to_record(trajectory()), console=plain)
  assert plain.file.getvalue().splitlines() == [
    "rollout 5, task 17, group 2: done, outcome 1; 2 turns, 6 tokens, 3 by the policy",
    "── user",
    "Hi [bold]",
    "── policy, turn 0, reward 0.125",
    "!",
    '{"name": "add"}',
    "── tool",
    "[",
    "── policy, turn 1, reward 0.5",
    "3",
  ]


def test_a_rollout_by_its_tokens_with_control_characters_escaped():
  plain, _ = consoles()
  with Display("run", steps=1, decode=decode, console=plain) as screen:
    screen.show(4, [trajectory()])
  lines = plain.file.getvalue().splitlines()[1:]
  assert lines[0] == "a rollout of step 4:"
  assert lines[2:6] == ["── read, 2 tokens", "Hi", "── policy, turn 0, 2 tokens, reward 0.125", r"!\x1b"]
  assert "\x1b" not in plain.file.getvalue()


def test_what_the_policy_wrote_and_what_it_read_differ_in_colour():
  _, terminal = consoles()
  show_rollout(to_record(trajectory(), decode=decode), console=terminal)
  text = terminal.file.getvalue()
  assert "\x1b[2mHi\x1b[0m" in text and "\x1b[32m3\x1b[0m" in text


def test_failures_and_their_cause_are_shown():
  plain, _ = consoles()
  failed = trajectory(status="failed", cause="the sandbox\x07 died", outcome=0.0)
  show_rollout(to_record(failed) | {"row": 4, "valid": False, "reward": 0.25}, console=plain)
  first, second, *_ = plain.file.getvalue().splitlines()
  assert first.startswith("row 4, rollout 5") and "failed, not valid, outcome 0, reward 0.25" in first
  assert second == r"cause: the sandbox\x07 died"


def test_a_list_has_one_line_for_each_rollout():
  plain, _ = consoles()
  empty = trajectory(tokens=[], action=[], turn=[], transcript=[])
  list_rollouts(3, [to_record(trajectory()), to_record(empty)], console=plain)
  lines = plain.file.getvalue().splitlines()
  assert len(lines) == 3 and lines[0] == "step 3: 2 rollouts" and lines[1].endswith("  3")


def test_say_goes_to_stdout_and_warn_to_stderr(capsys):
  display.say("hello")
  display.warn("careful")
  assert capsys.readouterr() == ("hello\n", "warning: careful\n")
