"""A thread that sends for a tracker: order, limits, failures, and an end that doesn't wait for ever."""

import threading
from itertools import chain

import pytest
from command_line import wait_until

from lockstep.runs.trackers import outbox as outbox_module
from lockstep.runs.trackers.outbox import Outbox

LONG = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", LONG)
    monkeypatch.setattr(outbox_module, "END_SECONDS", LONG)


class Service:
    """Takes items while its door is open; before, it holds up whoever sends."""

    def __init__(self, is_open=True):
        self.calls, self.door, self.reached = [], threading.Event(), threading.Event()
        if is_open:
            self.door.set()

    def send(self, items):
        self.reached.set()
        assert self.door.wait(LONG)
        self.calls.append(list(items))


def test_items_are_sent_in_order_and_together_up_to_a_limit():
    service = Service(is_open=False)
    outbox = Outbox(service.send, most_at_once=4)
    outbox.put(0)
    assert service.reached.wait(LONG)
    for item in range(1, 10):
        outbox.put(item)  # returns though the service holds the first
    service.door.set()
    outbox.finish()
    assert list(chain.from_iterable(service.calls)) == list(range(10))
    assert [len(call) for call in service.calls] == [1, 4, 4, 1]


def test_what_fails_is_raised_at_the_next_item_and_nothing_is_sent_after_it():
    tried = []

    def fail(items):
        tried.extend(items)
        raise ConnectionError("gone")

    outbox = Outbox(fail, most_at_once=1)
    outbox.put(0)

    def has_failed():
        try:
            outbox.put(1)
        except ConnectionError:
            return True
        return False

    wait_until(has_failed, "the failure isn't raised")
    with pytest.raises(ConnectionError, match="gone"):
        outbox.finish()
    assert tried == [0]


def test_a_failure_of_the_last_item_is_raised_at_the_end():
    def fail(_):
        raise ConnectionError("gone")

    outbox = Outbox(fail, most_at_once=1)
    outbox.put(0)
    with pytest.raises(ConnectionError, match="gone"):
        outbox.finish()


@pytest.mark.parametrize(("silent", "most"), [(0.2, LONG), (LONG, 0.2)])
def test_the_end_does_not_wait_for_a_service_that_is_silent(silent, most, monkeypatch):
    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", silent)
    monkeypatch.setattr(outbox_module, "END_SECONDS", most)
    service = Service(is_open=False)
    outbox = Outbox(service.send, most_at_once=1)
    for item in range(3):
        outbox.put(item)
    assert service.reached.wait(LONG)
    with pytest.raises(TimeoutError, match="it is silent or too slow: no answer in time to the last 3 messages"):
        outbox.finish()
    service.door.set()
    wait_until(lambda: service.calls, "what was being sent doesn't arrive")
    assert service.calls == [[0]]


def test_a_service_that_takes_nothing_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(outbox_module, "MOST_WAITING", 3)
    service = Service(is_open=False)
    outbox = Outbox(service.send, most_at_once=1)
    outbox.put(0)
    assert service.reached.wait(LONG)
    for item in range(1, 4):
        outbox.put(item)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="it is silent or too slow: 3 messages wait, which is the limit"):
            outbox.put(4)
    service.door.set()
    wait_until(lambda: service.calls, "what was being sent doesn't arrive")
    assert service.calls == [[0]]


def limits_of(outbox, monkeypatch, then):
    """Notes for how long the outbox waits at its end, and calls ``then`` before each wait."""
    waited, limits = outbox._changed.wait_for, []

    def wait_for(ready, seconds=None):
        if seconds is not None:
            limits.append(seconds)
            then()
        return waited(ready, seconds)

    monkeypatch.setattr(outbox._changed, "wait_for", wait_for)
    return limits


def test_an_item_that_goes_alone_shares_no_call():
    service = Service(is_open=False)
    outbox = Outbox(service.send, most_at_once=4)
    outbox.put(0)
    assert service.reached.wait(LONG)
    for item in range(1, 7):
        outbox.put(item, alone=item in (3, 4))
    service.door.set()
    outbox.finish()
    assert service.calls == [[0], [1, 2], [3], [4], [5, 6]]


def test_the_end_is_more_patient_while_a_slow_item_is_sent(monkeypatch):
    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", LONG / 2)
    service = Service(is_open=False)
    outbox = Outbox(service.send, most_at_once=4)
    outbox.put(0, alone=True, slow=True)
    assert service.reached.wait(LONG)
    outbox.put(1)
    limits = limits_of(outbox, monkeypatch, service.door.set)
    outbox.finish()
    assert service.calls == [[0], [1]]
    assert limits[0] > LONG / 2
    assert set(limits[1:]) <= {LONG / 2}
