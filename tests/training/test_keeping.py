"""When the state is saved by the clock."""

import pytest

from lockstep.training.due import COST, SOONEST, Keeper
from lockstep.training.stop import KEEP, RUNNING, SAVE, TIME_LIMIT, stops


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_a_clocks_orders_nothing_is_asked(clock):
    keeper = Keeper(None, False, clock)
    clock.now += 1e6
    assert keeper.asks() == RUNNING


def test_checkpoints_are_asked_for_so_many_seconds_after_the_last(clock):
    keeper = Keeper(30.0, False, clock)
    clock.now += 29.9
    assert keeper.asks() == RUNNING
    clock.now += 0.2
    assert keeper.asks() == keeper.asks() == SAVE
    keeper.saved()
    assert keeper.asks() == RUNNING


def test_states_in_memory_are_as_frequent_as_they_are_cheap(clock):
    keeper = Keeper(None, True, clock)
    assert keeper.asks() == RUNNING
    clock.now += SOONEST
    assert keeper.asks() == KEEP
    keeper.kept(3.0)  # the first
    assert keeper.every == SOONEST
    for _ in range(5):
        keeper.kept(0.002)
    assert keeper.every == SOONEST
    keeper.kept(3.0)  # a pause of the machine
    assert keeper.every == SOONEST
    for _ in range(5):
        keeper.kept(0.1)
    assert keeper.every == pytest.approx(0.1 / COST)
    clock.now += 4.9
    assert keeper.asks() == RUNNING
    clock.now += 0.2
    assert keeper.asks() == KEEP
    for _ in range(3):  # most of the last five
        keeper.kept(0.002)
    assert keeper.every == SOONEST


def test_a_checkpoint_on_the_disk_counts_as_a_state_and_goes_first(clock):
    keeper = Keeper(1.0, True, clock)
    clock.now += 0.6
    assert keeper.asks() == KEEP
    keeper.kept(0.0)
    clock.now += 0.6
    assert keeper.asks() == SAVE
    keeper.saved()
    clock.now += 0.4
    assert keeper.asks() == RUNNING


def test_without_room_no_more_are_asked_for(clock):
    keeper = Keeper(None, True, clock)
    keeper.stop_keeping()
    clock.now += 1e6
    assert keeper.asks() == RUNNING


def test_saving_stops_nobody():
    assert [stops(code) for code in (RUNNING, KEEP, SAVE)] == [RUNNING] * 3
    assert [stops(code) for code in (TIME_LIMIT, 143)] == [TIME_LIMIT, 143]
    assert max(RUNNING, KEEP, SAVE, TIME_LIMIT, 143) == 143
    assert KEEP < SAVE < TIME_LIMIT
