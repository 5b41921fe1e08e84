import json
import mmap
import threading
import time
from types import SimpleNamespace

import pytest

from lockstep.core import silence
from lockstep.core.life import LINE_BYTES, Life, Part, Sign, shared_pid, shared_signs
from lockstep.core.silence import Relay, Silence, Stillness
from lockstep.core.topology import Topology


class Clock:
    """Seconds that the code under test believes to have passed."""

    def __init__(self):
        self.now = 0.0

    def listen(self, heard, signs, seconds):
        """What is said while these seconds pass, in looks of a tenth of a second; the last answer."""
        said = None
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            said = heard.listen(signs) or said
        return said


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(silence.time, "monotonic", lambda: clock.now)
    return clock


def signs(*counts, waits=(), part=Part.ROLLOUT):
    return [Sign(count, part, rank in waits) for rank, count in enumerate(counts)]


def test_as_long_as_one_rank_makes_progress_nobody_is_silent(clock):
    heard = Silence(0, 10.0)
    for step in range(20):
        assert clock.listen(heard, signs(5, 5, step, waits=(0, 1)), 9.0) is None


def test_the_limit_is_of_the_time_since_the_last_progress(clock):
    heard = Silence(0, 10.0)
    assert clock.listen(heard, signs(1, 1, waits=(0,)), 9.9) is None
    assert clock.listen(heard, signs(1, 2, waits=(0,)), 10.0) is None
    assert clock.listen(heard, signs(1, 2, waits=(0,)), 0.3) == (
        "rank 0 lost its peers: nobody has made progress for 10 s (collective_timeout); "
        "rank 1 was last heard of in a rollout"
    )


def test_where_nobody_waits_nobody_is_held_up(clock):
    heard = Silence(0, 1.0)
    assert clock.listen(heard, signs(1, 1), 100.0) is None
    assert clock.listen(heard, signs(1, 1, waits=(1,)), 0.9) is None
    assert clock.listen(heard, signs(1, 1, waits=(1,)), 0.3) is not None


def test_where_waits_are_not_marked_whoever_does_nothing_is_held_up(clock):
    """Ranks that launch collectives meet them wherever they look at a device next."""
    heard = Silence(0, 10.0, marked=False)
    for step in range(5):
        assert clock.listen(heard, signs(5, step), 9.0) is None
    assert clock.listen(heard, signs(5, 4), 10.3) == (
        "rank 0 has made no progress for 10 s, nor has any other (collective_timeout); it was in a rollout, "
        "rank 1 was last heard of in a rollout"
    )


def test_time_in_which_this_process_is_stopped_does_not_count(clock):
    heard = Silence(0, 10.0)
    clock.listen(heard, signs(1, 1, waits=(0,)), 5.0)
    clock.now += 1000.0
    assert heard.listen(signs(1, 1, waits=(0,))) is None
    assert clock.listen(heard, signs(1, 1, waits=(0,)), 5.0) is not None


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ((0, 1), "rank 2 was last heard of in an evaluation, rank 3 was last heard of in an evaluation"),
        ((0, 1, 2, 3), ", ".join(f"rank {r} was last heard of waiting in an evaluation" for r in (1, 2, 3))),
        ((1, 2, 3), "rank 0 made no progress for 1 s in an evaluation (collective_timeout)"),
    ],
)
def test_those_are_named_who_do_not_wait_for_others(clock, waits, named):
    said = clock.listen(Silence(0, 1.0), signs(1, 1, 1, 1, waits=waits, part=Part.EVALUATION), 2.0)
    assert said is not None
    assert said.endswith(named)


def test_of_many_three_are_named(clock):
    assert str(clock.listen(Silence(0, 1.0), signs(*[1] * 9, waits=(0,)), 2.0)).endswith(", and 5 more")


def test_what_a_process_does_is_counted_and_seen_by_others_of_its_host():
    memory, one, other = mmap.mmap(-1, 2 * LINE_BYTES), Life(), Life()
    one.begin(Part.UPDATE)
    one.share(memory, 0)
    assert shared_pid(memory, 1) == 0
    other.share(memory, 1)
    assert shared_pid(memory, 1) == shared_pid(memory, 0) > 0
    one.progressed()
    other.begin(Part.CHECKPOINT)
    with other.waiting():
        assert shared_signs(memory, 2) == [(2, Part.UPDATE, False), (1, Part.CHECKPOINT, True)]
    assert shared_signs(memory, 2)[1] == (2, Part.CHECKPOINT, False)


def test_who_counts_nothing_does_not_count_waiting():
    life = Life()
    with life.waiting():
        pass
    assert life.sign() == (0, Part.START, False)


def test_ranks_of_several_hosts_hear_of_each_other_through_a_store_that_may_fail(monkeypatch):
    monkeypatch.setattr(silence, "CLOSE_SECONDS", 600.0)
    kept, broken = {}, [True]

    def get():
        if broken[0]:
            raise RuntimeError("the connection is gone")
        return {rank: kept.get(f"lockstep/sign/{rank}", "") for rank in range(3)}

    relay = Relay(Topology(rank=0, world_size=3), 0.001, kept.__setitem__, get)
    try:
        kept["lockstep/sign/2"] = json.dumps(Sign(7, Part.VIDEO, False))
        time.sleep(0.05)
        assert relay.signs()[1:] == [(0, Part.START, False)] * 2
        broken[0] = False
        deadline = time.monotonic() + 600
        while relay.signs()[2] != (7, Part.VIDEO, False) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert relay.signs()[1:] == [(0, Part.START, False), (7, Part.VIDEO, False)]
        assert json.loads(kept["lockstep/sign/0"])[0] == relay.signs()[0].count
    finally:
        relay.close()
    assert not relay._thread.is_alive()
    assert not relay.hangs


def test_a_store_that_does_not_answer_is_known_to_hang(monkeypatch):
    answer, asked = threading.Event(), threading.Event()

    def get():
        asked.set()
        answer.wait()
        return {}

    monkeypatch.setattr(silence, "CLOSE_SECONDS", 0.01)
    relay = Relay(Topology(rank=0, world_size=2), 0.001, lambda name, text: None, get)
    asked.wait()
    assert not relay.hangs  # it may yet come
    relay.close()
    assert relay.hangs
    answer.set()
    relay._thread.join()
    assert not relay.hangs


def test_time_in_which_a_process_is_stopped_is_no_stillness_and_time_in_which_it_computes_is(monkeypatch):
    now = SimpleNamespace(wall=0.0, computed=0.0)
    clocks = SimpleNamespace(monotonic=lambda: now.wall, process_time=lambda: now.computed)
    monkeypatch.setattr(silence, "time", clocks)
    stillness = Stillness(0.5)
    assert stillness.look("sign") == 0.0
    now.wall += 0.25
    assert stillness.look("sign") == 0.25
    now.wall += 100.0  # stopped
    assert stillness.look("sign") == 0.75
    now.wall, now.computed = now.wall + 100.0, now.computed + 99.5  # no other thread could look
    assert stillness.look("sign") == 100.75
    assert stillness.look("other") == 0.0
