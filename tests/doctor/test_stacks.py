"""A rank that waits for others is told from one that computes, sleeps or moves."""

import threading
import time
from itertools import chain, repeat

import pytest

from lockstep.doctor.watch import stacks
from lockstep.doctor.watch.stacks import StillnessClock, own_lines, stands_in, waits_for_work

LOOKS = 6
LAST = 3
PATIENCE = 400
PAUSE = 0.05


def watched(main, clock=None, signs=lambda: 0, waits=False, pause=lambda: time.sleep(PAUSE), **how):
    """What a clock says, looked at from another thread while the main thread runs ``main(over)``.

    A main thread that ``waits`` is looked at until the clock has said so several times: on a busy machine the threads
    that other tests left in this process may compute for longer than a twentieth of the first looks' time. ``pause``
    is what happens between two looks.
    """
    clock, over, said = clock or StillnessClock(), threading.Event(), []

    def look():
        while len(said) < LOOKS or (waits and None in said[-LAST:] and len(said) < PATIENCE):
            pause()
            said.append(clock.look(signs(), **how))
        over.set()

    thread = threading.Thread(target=look)
    thread.start()
    main(over)
    thread.join()
    return said[1:], clock


@pytest.fixture
def waiting_in_threading(monkeypatch):
    """Let a wait for an event stand for one in a collective."""
    monkeypatch.setattr(stacks, "COLLECTIVES", ("threading.py",))


def blocked(over):
    over.wait()


def test_a_blocked_collective_is_waited_in_for_longer_and_longer(waiting_in_threading):
    began = time.monotonic()
    said, clock = watched(blocked, waits=True)
    first, *_, last = said[-LAST:]
    assert said[-LAST:] == sorted(said[-LAST:])
    assert last - first > 0.9 * PAUSE * (LAST - 1)
    assert last < time.monotonic() - began
    assert any("blocked" in line for line in clock.lines)
    assert clock.certain


def test_a_blocked_call_elsewhere_is_no_waiting():
    assert set(watched(blocked)[0]) == {None}
    for how in ({"on_gpu": True}, {"joined": True}):
        said, clock = watched(blocked, waits=True, **how)
        assert said[-1] is not None
        assert not clock.certain


def test_a_call_that_was_woken_once_is_waited_in_from_then_on(monkeypatch):
    counts = chain([7], repeat(8))
    monkeypatch.setattr(stacks, "wakings", lambda: next(counts))
    clock = StillnessClock()
    counts = chain([8, 9, 9], repeat(10))
    said, clock = watched(blocked, clock=clock, waits=True, joined=True)
    assert said[-1] is not None
    assert said[-1] < clock._seconds - PAUSE


def test_a_loop_that_is_nearly_always_in_one_call_is_no_waiting():
    slept = [0]

    def sleeps(over):
        while not over.is_set():
            time.sleep(0.001)
            slept[0] += 1

    def until_it_has_slept():
        before = slept[0]
        while slept[0] < before + 20:
            time.sleep(0.001)

    assert set(watched(sleeps, joined=True, pause=until_it_has_slept)[0]) == {None}


def test_a_rank_of_a_group_that_computes_in_one_call_is_no_waiting():
    def computes(over):
        while not over.is_set():
            sum(range(30_000_000))

    assert set(watched(computes, joined=True, pause=until_it_has_computed)[0]) == {None}


def until_it_has_computed():
    """For a tenth of the longest time that a look counts: on a machine that stood still it hadn't."""
    before = time.process_time()
    while time.process_time() - before < 2 * stacks.IDLE * stacks.LONGEST_TICK:
        time.sleep(PAUSE)


def test_signs_of_life_begin_it_anew(waiting_in_threading):
    count = iter(range(100))
    assert set(watched(blocked, signs=lambda: next(count))[0]) == {None}


def test_a_backward_pass_that_computes_is_no_waiting(monkeypatch):
    monkeypatch.setattr(stacks, "BACKWARD", ("test_stacks.py",))

    def computes(over):
        while not over.is_set():
            sum(range(1000))

    assert set(watched(computes, pause=until_it_has_computed)[0]) == {None}
    assert watched(blocked, waits=True)[0][-1] is not None


def test_a_layer_that_computes_within_the_forward_pass_of_ddp_is_no_waiting(monkeypatch):
    torch = "/x/site-packages/torch/nn/"
    around = [f"{torch}parallel/distributed.py:7 _run_ddp_forward", "/home/me/train.py:9 main"]
    monkeypatch.setattr(stacks, "frame_lines", lambda frame: [f"{torch}modules/rnn.py:3 forward", *around])

    def computes(over):
        while not over.is_set():
            sum(range(30_000_000))

    assert set(watched(computes, pause=until_it_has_computed)[0]) == {None}
    assert watched(blocked, waits=True)[1].certain
    monkeypatch.setattr(stacks, "frame_lines", lambda frame: around)  # which may wait by asking again and again
    assert watched(computes, pause=until_it_has_computed)[1].certain


def test_a_wait_for_work_is_told_by_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("work = begin()\nwork.wait()\n")
    assert waits_for_work([f"{script}:2 <module>"])
    assert not waits_for_work([f"{script}:1 <module>", f"{script}:2 main"])
    assert not waits_for_work([])


def test_a_rank_that_writes_a_sharded_checkpoint_waits_for_nobody(monkeypatch):
    """On a slow disk that is in one call for long; what gathers the ranks' plans is a collective."""
    torch = "/x/site-packages/torch/"
    saving = [f"{torch}distributed/checkpoint/{name}" for name in ("utils.py:8 all_reduce", "logger.py:9 wrapper")]
    writing = [f"{torch}serialization.py:4 save", f"{torch}distributed/checkpoint/filesystem.py:3 _write_item", *saving]
    gathering = [f"{torch}distributed/distributed_c10d.py:7 gather_object", *saving]
    assert stacks.stands_in_collective(gathering)
    assert not stacks.stands_in_collective(writing)
    monkeypatch.setattr(stacks, "frame_lines", lambda frame: writing)
    assert not watched(blocked)[1].certain
    monkeypatch.setattr(stacks, "frame_lines", lambda frame: gathering)
    assert watched(blocked, waits=True)[1].certain


def test_a_rank_that_reports_its_errors_is_in_no_collective_for_that():
    """``@record`` has a frame around the whole script."""
    wrapper = "/x/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py:367 wrapper"
    around = [wrapper, "/home/me/train.py:20 <module>"]
    assert not stacks.stands_in_collective(["/home/me/train.py:9 main", *around])
    gathering = "/x/site-packages/torch/distributed/distributed_c10d.py:7 all_reduce"
    assert stacks.stands_in_collective([gathering, "/home/me/train.py:9 main", *around])


def test_places_are_looked_for_in_the_innermost_frames():
    lines = [*["/x/torch/nn/linear.py:3 forward"] * 9, "/x/site-packages/torch/distributed/rpc/api.py:1 shutdown"]
    assert not stands_in(lines, stacks.COLLECTIVES)
    assert stands_in(lines[5:], stacks.COLLECTIVES)
    assert not stacks.stands_in_collective(lines)
    assert stacks.stands_in_collective(lines[5:])
    assert own_lines(["/x/site-packages/torch/a.py:1 f", "/home/me/train.py:4 main"]) == ["/home/me/train.py:4 main"]
