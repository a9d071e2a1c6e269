"""Signals stop a run only where nothing is lost."""

import os
import signal

import pytest

from jaxagent.training.interrupt import Interrupt, Interrupted
from jaxagent.training.phases import OutOfMemory, Phases


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_a_safe_place(number):
  with Interrupt() as interrupt:
    os.kill(os.getpid(), number)
    with pytest.raises(Interrupted, match=signal.Signals(number).name):
      interrupt.check()


def test_a_signal_is_raised_at_once_where_it_is_allowed():
  with Interrupt() as interrupt, pytest.raises(Interrupted), interrupt.allowed():
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("not reached")


def test_a_second_signal_is_raised_anywhere():
  with Interrupt(), pytest.raises(Interrupted):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("not reached")


def test_handlers_are_put_back():
  before = signal.getsignal(signal.SIGTERM)
  with Interrupt():
    assert signal.getsignal(signal.SIGTERM) != before
  assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")])
@pytest.mark.parametrize("phase, knob", [("rollout", "rollout.slots"), ("update", "training.microbatch_rows")])
def test_running_out_of_memory_names_the_phase_and_the_knob(error, phase, knob):
  with pytest.raises(OutOfMemory, match=f"{phase}.*{knob}"), Phases()(phase):
    raise error


def test_other_errors_pass():
  with pytest.raises(RuntimeError, match="something else"), Phases()("update"):
    raise RuntimeError("something else")


def test_phases_add_up():
  phases = Phases()
  for _ in range(2):
    with phases("a"):
      pass
  with phases("b"):
    pass
  assert set(phases.metrics()) == {"time/a", "time/b"} and all(s >= 0 for s in phases.seconds.values())
