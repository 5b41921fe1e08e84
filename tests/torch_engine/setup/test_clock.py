"""The clock of a rank's iterations: every moment belongs to one part, or to a collective."""

import itertools

import pytest
import torch
from small_runs import alone, small_config

from lockstep.torch_engine.distributed.ordered import Traffic
from lockstep.torch_engine.setup import clock as module
from lockstep.torch_engine.setup.clock import Clock, peak_memory


class Times:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def times(monkeypatch):
    found = Times()
    monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def communicator():
    return alone(small_config())


def spend(times, communicator, seconds, *collectives):
    """Let time go by, some of it in collectives that send 10 bytes and receive 30 each."""
    times.now += seconds
    communicator.durations += collectives
    sent, received = communicator.traffic
    communicator.traffic = Traffic(sent + 10 * len(collectives), received + 30 * len(collectives))


def test_laps_by_hand(times, communicator):
    communicator.durations, communicator.traffic = [50.0], Traffic(1000, 1000)  # of the set-up: in no iteration
    clock = Clock(communicator)
    spend(times, communicator, 3.0)
    clock.lap("rollout")
    spend(times, communicator, 10.0, 1.0, 2.0)
    clock.lap("learn")
    spend(times, communicator, 1.0)
    clock.lap("learn")
    laps, durations = clock.finish()
    assert (laps.rollout, laps.learn, laps.other, laps.total) == (3.0, 8.0, 0.0, 14.0)
    assert (durations, laps.bytes_sent, laps.bytes_received, laps.ended) == ([1.0, 2.0], 20, 60, 114.0)


def test_what_comes_after_an_iteration_belongs_to_the_next(times, communicator):
    clock = Clock(communicator)
    spend(times, communicator, 2.0)
    clock.lap("rollout")
    clock.finish()
    spend(times, communicator, 5.0, 4.0)  # the gather of the metrics, and logging
    clock.lap("other")
    spend(times, communicator, 2.0)
    clock.lap("rollout")
    laps, durations = clock.finish()
    assert (laps.rollout, laps.other, laps.total, durations) == (2.0, 1.0, 7.0, [4.0])
    assert (laps.bytes_sent, laps.bytes_received) == (10, 30)


def test_the_parts_and_the_collectives_are_the_whole(times, communicator):
    clock = Clock(communicator)
    parts = ["other", "rollout", "learn"]
    for number, part in zip(range(9), itertools.cycle(parts)):
        spend(times, communicator, 1.5**number, 0.25 * number)
        clock.lap(part)
    laps, durations = clock.finish()
    assert laps.rollout + laps.learn + laps.other + sum(durations) == pytest.approx(laps.total)


def test_time_that_no_lap_names_shows_as_a_gap(times, communicator):
    """The negative of the above: the total is measured apart from the parts."""
    clock = Clock(communicator)
    spend(times, communicator, 3.0)
    clock.lap("rollout")
    spend(times, communicator, 2.0)
    laps, _ = clock.finish()
    assert laps.total - laps.rollout - laps.learn - laps.other == 2.0


@pytest.mark.long  # it takes as much memory as this process has ever had
def test_peak_memory_stays_when_memory_is_given_back():
    before = peak_memory(torch.device("cpu"))["peak_memory_mb"]
    ballast = torch.ones(64 * 2**20 // 4 + int(before) * 2**20 // 4)  # more than the peak so far, whatever is free
    during = peak_memory(torch.device("cpu"))["peak_memory_mb"]
    del ballast
    after = peak_memory(torch.device("cpu"))["peak_memory_mb"]
    assert during >= before + 60
    assert after > during - 8  # the kernel counts in steps
    assert peak_memory(torch.device("cpu"))["peak_gpu_memory_mb"] == 0.0


def test_memory_is_read_only_where_it_is_asked_for(communicator):
    assert Clock(communicator).finish()[0].peak_memory_mb == 0.0
    assert Clock(communicator, thorough=True).finish()[0].peak_memory_mb > 10.0
