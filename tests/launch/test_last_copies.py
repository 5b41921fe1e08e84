"""What a stopped run copies last is copied whole, whoever is told to go meanwhile."""

import os
import signal
from typing import Any

import pytest

from lockstep.core.topology import Topology
from lockstep.launch.start import finish_copying
from lockstep.runs.mirror.copier import FAILED_SECONDS, LAST_SECONDS


class Told:
    """A mirror that is told to go while it copies."""

    def __init__(self, *numbers):
        self.copied, self.numbers = [], numbers

    def finish(self, seconds):
        for number in self.numbers:
            os.kill(os.getpid(), number)
        self.copied.append(seconds)


@pytest.fixture
def ends():
    """Ends this process, as it were, by SIGTERM's default."""
    before = signal.getsignal(signal.SIGTERM)

    def end(number, frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    yield
    assert signal.getsignal(signal.SIGTERM) is end
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("code", [0, 1, 130, 143])
def test_the_last_copy_is_finished(code, launched):
    mirror: Any = Told(signal.SIGTERM, signal.SIGTERM)
    finish_copying(mirror, code, Topology(0, 2, launched=launched))
    assert mirror.copied == [FAILED_SECONDS if code == 1 else LAST_SECONDS]


@pytest.mark.parametrize(("code", "launched"), [(0, False), (143, False), (130, True)])
def test_the_second_ctrl_c_ends_the_last_copy(code, launched):
    mirror: Any = Told(signal.SIGINT)
    finish_copying(mirror, code, Topology(0, 2, launched=launched))
    assert mirror.copied == [LAST_SECONDS]
    mirror = Told(signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        finish_copying(mirror, code, Topology(0, 2, launched=launched))
    assert mirror.copied == []


def test_a_ctrl_c_after_the_one_that_stopped_the_run_ends_the_last_copy():
    mirror: Any = Told(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        finish_copying(mirror, 130, Topology())
    assert mirror.copied == []


def test_a_run_that_failed_isnt_waited_for_as_long():
    mirror: Any = Told()
    mirror.finish = mirror.copied.append
    finish_copying(mirror, 1, Topology())
    assert mirror.copied == [FAILED_SECONDS]
