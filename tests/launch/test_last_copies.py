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

    def __init__(self):
        self.copied = []

    def finish(self, seconds):
        os.kill(os.getpid(), signal.SIGTERM)
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
@pytest.mark.parametrize("code", [130, 143])
def test_a_pod_of_a_stopped_run_finishes_copying(code):
    mirror: Any = Told()
    finish_copying(mirror, code, Topology(0, 2, launched=True))
    assert mirror.copied == [LAST_SECONDS]


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(("code", "launched"), [(0, True), (1, True), (143, False)])
def test_others_are_told_for_the_first_time(code, launched):
    mirror: Any = Told()
    with pytest.raises(SystemExit):
        finish_copying(mirror, code, Topology(0, 2, launched=launched))
    assert mirror.copied == []


def test_a_run_that_failed_isnt_waited_for_as_long():
    mirror: Any = Told()
    mirror.finish = mirror.copied.append
    finish_copying(mirror, 1, Topology())
    assert mirror.copied == [FAILED_SECONDS]
