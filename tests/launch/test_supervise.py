"""Which rank's error the launcher shows, and what of the ranks' own standard error it passes on."""

import io
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.core.done import UNSTOPPED, DoneFile
from lockstep.core.process import REPEAT_SECONDS, started_by_command, write_failure
from lockstep.launch import native_errors
from lockstep.launch.native_errors import NativeErrors
from lockstep.launch.supervise import (
    INTERRUPTED,
    NOT_BEGUN,
    Outcome,
    StopSignals,
    exit_code,
    failure_message,
    forwarding,
    watch,
)


class Ended:
    """Ranks that have ended; ``told`` are the messages of some, and whether another rank's came first."""

    def __init__(self, directory, told):
        self.directory = directory
        for rank, (message, secondary) in told.items():
            content = {"message": {"message": message, "extraInfo": {"secondary": secondary}}}
            (directory / f"rank_{rank}.json").write_text(json.dumps(content))

    def message_file(self, rank):
        return str(self.directory / f"rank_{rank}.json")


@pytest.mark.parametrize(
    ("codes", "told", "shown"),
    [
        ({0: 1, 1: 1}, {0: ("lost its peers", True), 1: ("the motor is gone", False)}, "rank 1: the motor is gone"),
        ({1: -9, 0: 1}, {0: ("rank 0 lost its peers", True)}, "rank 1 was killed by SIGKILL; out of memory?"),
        ({0: 1, 1: -6}, {0: ("rank 0 lost its peers: nobody", True)}, "rank 0 lost its peers: nobody"),
        ({0: 1, 1: -6}, {}, "rank 0 ended with exit code 1"),
        ({1: -6, 0: 1}, {0: ("rank 0 lost its peers: nobody", True)}, "rank 1 was killed by SIGABRT"),
        ({1: -6, 0: -9}, {}, "rank 1 was killed by SIGABRT"),
        ({1: 1}, {1: ("rank 1 made no progress", False)}, "rank 1 made no progress"),
        ({1: 1, 0: 1}, {1: ("rank 1 made no progress", False)}, "rank 1 made no progress"),
    ],
)
def test_the_rank_is_shown_that_failed_of_itself(tmp_path, codes, told, shown):
    assert failure_message(Ended(tmp_path, told), codes) == shown  # pyright: ignore[reportArgumentType]


def test_what_libraries_say_is_passed_on_unless_another_rank_has_failed(capfd):
    errors = NativeErrors()
    writing = [errors.pipe(rank) for rank in range(2)]
    os.write(writing[1], b"a warning\n")
    errors.read(errors.descriptors)
    errors.pass_on()
    assert errors.waits
    assert capfd.readouterr().err == ""  # whether a rank has ended isn't known yet
    errors.pass_on(everything=True)
    assert capfd.readouterr().err == "a warning\n"
    errors.ended(0, -signal.SIGKILL)
    os.write(writing[0], b"my own last words\n")
    os.write(writing[1], b"*** Check failure stack trace: ***\n")
    for descriptor in writing:
        os.close(descriptor)
    errors.close()
    assert capfd.readouterr().err == "my own last words\n"


def test_ranks_that_say_nothing_leave_room_for_those_that_do(capfd):
    errors = NativeErrors()
    writing = [errors.pipe(rank) for rank in range(8)]
    for _ in range(200):  # as a launcher reads all of them again and again
        errors.read(errors.descriptors)
    os.write(writing[3], b"a warning\n")
    errors.read(errors.descriptors)
    for descriptor in writing:
        os.close(descriptor)
    errors.close()
    assert capfd.readouterr().err == "a warning\n"


def test_a_rank_that_is_done_silences_nobody(capfd):
    errors = NativeErrors()
    writing = errors.pipe(1)
    errors.ended(0, 0)
    os.write(writing, b"still here\n")
    os.close(writing)
    errors.close()
    assert capfd.readouterr().err == "still here\n"


def test_last_words_reach_a_reader_who_is_slow(monkeypatch):
    monkeypatch.setattr(native_errors, "LAST_SECONDS", 600.0)
    reading, writing = os.pipe()
    kept = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        errors = NativeErrors()
        rank = errors.pipe(0)
        said = b"x" * (1 << 16) + b"the end\n"  # more than a pipe holds
        heard = bytearray()

        def read():
            while not heard.endswith(b"the end\n"):
                heard.extend(os.read(reading, 1 << 12))

        reader = threading.Thread(target=read)
        os.write(rank, said[: 1 << 15])
        errors.read(errors.descriptors)
        os.write(rank, said[1 << 15 :])
        os.close(rank)
        threading.Timer(0.3, reader.start).start()
        errors.close()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    reader.join(600)
    os.close(reading)
    assert bytes(heard) == said


@pytest.mark.parametrize(("done", "message"), [(True, None), (False, NOT_BEGUN)])
def test_a_signal_that_meets_a_rank_on_its_way_out_stopped_a_run_that_is_written(tmp_path, done, message):
    ranks: Any = Ended(tmp_path, {})
    ranks.exit_codes, ranks.send = lambda: {1: -signal.SIGTERM, 0: 128 + signal.SIGTERM}, lambda number: None
    if done:
        DoneFile(ranks.message_file(0)).tell()
    signals = StopSignals()
    signals.received.append(signal.SIGTERM)
    assert watch(ranks, signals, trains=True).message == message


@pytest.mark.parametrize(
    ("said", "code"), [(UNSTOPPED, 0), (128 + signal.SIGTERM, 128 + signal.SIGTERM), (None, 128 + signal.SIGTERM)]
)
@pytest.mark.parametrize("codes", [{0: 0, 1: 0}, {1: -signal.SIGTERM, 0: 0}])
def test_a_run_that_finished_before_a_signal_ends_as_one_that_finished(tmp_path, said, code, codes):
    """On several ranks as on one, where a signal that comes after the last iteration stops nothing."""
    ranks: Any = Ended(tmp_path, {})
    ranks.exit_codes, ranks.send = lambda: codes, lambda number: None
    for rank in codes:
        if said is not None:
            DoneFile(ranks.message_file(rank)).tell(said)
    signals = StopSignals()
    signals.received.append(signal.SIGTERM)
    outcome = watch(ranks, signals, trains=True)
    assert outcome.message == (NOT_BEGUN if said is None else None)
    assert exit_code(outcome, signals) == code


@pytest.mark.parametrize(
    ("codes", "secondary", "message"),
    [
        ({1: -signal.SIGTERM, 0: 1}, True, NOT_BEGUN),
        ({1: -signal.SIGTERM, 0: 1}, False, "rank 0: said why"),
        ({1: -signal.SIGTERM, 0: -signal.SIGABRT}, None, NOT_BEGUN),
        ({1: -signal.SIGTERM, 0: -signal.SIGSEGV}, None, "rank 1 was killed by SIGTERM"),
        ({1: 0, 0: 1}, True, "said why"),
    ],
)
def test_a_signal_that_finds_one_rank_without_its_handler_stopped_the_others_too(tmp_path, codes, secondary, message):
    """They lose that rank, and say so."""
    ranks: Any = Ended(tmp_path, {})
    ranks.exit_codes, ranks.send = lambda: codes, lambda number: None
    if secondary is not None:
        write_failure(Path(ranks.message_file(0)), "said why", secondary=secondary)
    signals = StopSignals()
    signals.received.append(signal.SIGTERM)
    outcome = watch(ranks, signals)
    assert (outcome.message, outcome.stopped) == (message, message == NOT_BEGUN)


def test_a_rank_that_got_a_signal_twice_while_it_trained_was_interrupted(tmp_path):
    ranks: Any = Ended(tmp_path, {})
    ranks.exit_codes, ranks.send = lambda: {1: 128 + signal.SIGINT, 0: 1}, lambda number: None
    write_failure(Path(ranks.message_file(0)), "lost rank 1", secondary=True)
    write_failure(Path(ranks.message_file(1)), INTERRUPTED, secondary=False)
    signals = StopSignals()
    signals.received.append(signal.SIGINT)
    outcome = watch(ranks, signals)
    assert (outcome.message, outcome.stopped) == (INTERRUPTED, True)


@pytest.mark.parametrize(("said", "code"), [(UNSTOPPED, 0), (128 + signal.SIGINT, 128 + signal.SIGINT)])
def test_a_signal_to_one_rank_alone_stops_the_run_and_its_status_says_so(tmp_path, said, code):
    """A supervisor takes status 0 for a run that is done."""
    ranks: Any = Ended(tmp_path, {})
    ranks.exit_codes, ranks.send = lambda: {0: 0, 1: 0}, lambda number: None
    for rank in range(2):
        DoneFile(ranks.message_file(rank)).tell(said)
    signals = StopSignals()
    assert exit_code(watch(ranks, signals, trains=True), signals) == code


def exited(tmp_path, *done, gone=False):
    """Ranks that end with 0 while they are watched, those named once they are done; then their directory is gone."""
    ranks: Any = Ended(tmp_path, {})
    files = {rank: DoneFile(ranks.message_file(rank)) for rank in range(2)}
    looks = itertools.count()

    def exit_codes():
        if next(looks) == 0:
            return {0: None, 1: None}
        if gone:
            shutil.rmtree(tmp_path)
        for rank in done:
            files[rank].tell()
        return {0: 0, 1: 0}

    ranks.exit_codes = exit_codes
    return ranks


@pytest.mark.parametrize("gone", [False, True])
def test_ranks_are_known_to_be_done_whoever_tidies_up_temporary_files(tmp_path, gone):
    assert watch(exited(tmp_path, 0, 1, gone=gone), StopSignals(), trains=True).message is None


@pytest.mark.parametrize("gone", [False, True])
def test_a_rank_that_ends_with_0_before_it_is_done_failed(tmp_path, gone):
    message = watch(exited(tmp_path, 0, gone=gone), StopSignals(), trains=True).message
    assert message is not None
    assert message.startswith("rank 1 ended with exit code 0 before the run was done")


def listeners(*coming):
    """Ranks to which signals are sent, and what reaches them; while the first is, others come."""
    sent, waiting = [], list(coming)

    def send(number):
        sent.append(number)
        while waiting:
            signal.raise_signal(waiting.pop(0))

    ranks: Any = SimpleNamespace(send=send, kill=lambda: sent.append("kill"))
    return ranks, sent


def test_a_signal_that_comes_while_another_is_passed_on_reaches_ranks_once():
    ranks, sent = listeners(signal.SIGINT)
    with forwarding() as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.go_to(ranks)
    assert sent == [signal.SIGTERM, signal.SIGINT]


def test_the_second_interrupt_kills_wherever_it_comes():
    ranks, sent = listeners(signal.SIGINT)
    with forwarding() as signals:
        signals.go_to(ranks)
        signal.raise_signal(signal.SIGINT)
    assert sent == [signal.SIGINT, "kill", signal.SIGINT]
    others, heard = listeners()
    signals.go_to(others)  # they get what came before them, too
    assert heard == [signal.SIGINT, "kill", signal.SIGINT]


def test_an_interrupt_that_is_passed_on_as_well_kills_no_rank(monkeypatch):
    now, (ranks, sent) = [1000.0], listeners()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    started_by_command.set()
    try:
        with forwarding() as signals:
            signals.go_to(ranks)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert sent == [signal.SIGINT]
            now[0] += 2 * REPEAT_SECONDS
            signal.raise_signal(signal.SIGINT)
    finally:
        started_by_command.clear()
    assert sent == [signal.SIGINT, "kill", signal.SIGINT]


def interrupt_twice():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)


def test_the_second_interrupt_ends_what_may_wait_for_long_and_nothing_else():
    with forwarding() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        entered = False
        with pytest.raises(KeyboardInterrupt), signals.interruptible():
            entered = True
        assert not entered
        signal.raise_signal(signal.SIGINT)
    with forwarding() as signals, pytest.raises(KeyboardInterrupt), signals.interruptible():
        interrupt_twice()
    assert signals.received == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("message", [None, "rank 0 was killed by SIGKILL"])
def test_the_cursor_that_a_killed_rank_has_hidden_is_shown_again(monkeypatch, message):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert exit_code(Outcome(message), StopSignals()) == (0 if message is None else 1)
    assert terminal.getvalue() == ("" if message is None else "\x1b[?25h")
