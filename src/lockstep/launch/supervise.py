"""Watches the ranks of a run on this machine: passes signals on to all of them, and ends all if one fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.core.done import UNSTOPPED, DoneFile
from lockstep.core.process import (
    ERROR_PREFIX,
    EXIT_FAILURE,
    EXIT_USER_ERROR,
    UNDONE,
    handling_stop_signals,
    is_passed_on,
    killed_by,
    read_failure,
    say,
    show_cursor,
)
from lockstep.core.temporary import temporary_directory

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
INTERRUPTED = "interrupted at once; --resume goes on from the last checkpoint, if there is one"
NOT_BEGUN = "stopped by a signal before training began"


class Ranks(Protocol):
    """Rank processes that an engine's launcher started."""

    def exit_codes(self) -> dict[int, int | None]:
        """Returns ranks' exit codes in the order in which they ended; None while a rank runs."""
        ...

    def message_file(self, rank: int) -> str:
        """Returns the file in which a failing rank leaves its message."""
        ...

    def send(self, number: int) -> None:
        """Sends a signal to every running rank."""
        ...

    def kill(self) -> None:
        """Ends every rank at once, and what started them."""
        ...


class RestartableRanks(Ranks, Protocol):
    """Rank processes that others can replace."""

    def end(self) -> None:
        """Ends every rank at once; others can be started afterwards."""
        ...


class Server(Protocol):
    """Starts rank processes, any number of times.

    Attributes:
        closed: whether it can't start any more.
    """

    closed: bool

    def start(
        self, nproc: int, log_dir: Path, *, assignment: str | None, environment: Mapping[str, str] | None
    ) -> RestartableRanks:
        """Starts ranks; see :meth:`lockstep.launch.spawn.RankServer.start`."""
        ...

    def close(self) -> None:
        """Ends every rank."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a run ended.

    Attributes:
        message: why they failed, or were interrupted; None if all ended well.
        stopped: whether a stop signal to the launcher is the reason.
        bad_input: whether the first rank that failed refused its input, before training.
        killed: whether SIGKILL ended a rank or its server, as happens when memory runs out.
        said: what rank 0 said when it was done: ``UNSTOPPED``, as no stop signal came in time, or the exit status for
            the signal that stopped it, which may have been sent to a rank alone; 0 if it said nothing.
    """

    message: str | None = None
    stopped: bool = False
    bad_input: bool = False
    killed: bool = False
    said: int = 0


class StopSignals:
    """Passes stop signals on to ranks, including those that came before the ranks started; the second Ctrl-C kills.

    Ranks that replace others get earlier signals too. Each rank gets every signal once, even though the handler may run
    between any two steps of this class.

    Attributes:
        received: the signals' numbers, in the order in which they came.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._ranks: Ranks | None = None
        self._sent, self._interrupted = 0, 0.0
        self._sends = self._may_interrupt = False

    def go_to(self, ranks: Ranks) -> None:
        """Passes on to ``ranks`` what came, and what will come."""
        self._sends = True  # keeps the handler from sending
        self._ranks, self._sent = ranks, 0
        self._sends = False
        self._pass_on()

    def leave(self) -> None:
        """Stops passing signals on, because the ranks have ended."""
        self._ranks = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets a second Ctrl-C end the block, which may wait for long, by a ``KeyboardInterrupt``."""
        self._may_interrupt = True
        try:
            self._interrupt()
            yield
        finally:
            self._may_interrupt = False

    def _interrupt(self) -> None:
        if self.received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def _pass_on(self) -> None:
        while self._ranks is not None and self._sent < len(self.received):
            self._sends = True  # the loop sees what comes meanwhile
            try:
                self._send_rest(self._ranks)
            finally:
                self._sends = False

    def _send_rest(self, ranks: Ranks) -> None:
        while self._sent < len(self.received):
            before, number = self.received[: self._sent], self.received[self._sent]
            self._sent += 1
            if number == signal.SIGINT and number in before:
                ranks.kill()
            ranks.send(number)

    def __call__(self, number: int, _frame: object) -> None:
        """Handles a signal."""
        if number == signal.SIGINT:
            if number not in self.received:
                self._interrupted = time.monotonic()
            elif is_passed_on(self._interrupted):
                return
        self.received.append(number)
        if not self._sends:
            self._pass_on()
        if self._may_interrupt and number == signal.SIGINT:
            self._interrupt()


@contextmanager
def forwarding() -> Iterator[StopSignals]:
    """Handles stop signals for ranks while the block runs."""
    signals = StopSignals()
    with handling_stop_signals(signals):
        yield signals


def supervise(
    start: Callable[[Path], RestartableRanks],
    interrupted: str = INTERRUPTED,
    not_begun: str = NOT_BEGUN,
    trains: bool = False,
) -> int:
    """Starts ranks and waits for them; shows the error of one rank, once.

    Args:
        start: starts them, given a directory for their messages.
        interrupted: the message if a second Ctrl-C killed them.
        not_begun: the message if a stop signal ended them before they handled signals.
        trains: whether ranks say when they are done, so that exit code 0 alone doesn't mean so.

    Returns:
        0 if all ended well, ``128 + n`` if signal ``n`` stopped the run, 2 if training ranks refused their input, else
        1.
    """
    with temporary_directory() as directory, forwarding() as signals:
        with signals.interruptible():
            ranks = start(directory)
        try:
            return exit_code(watch(ranks, signals, interrupted, not_begun, trains), signals)
        finally:
            ranks.kill()
            ranks.end()  # ranks on Ray still have last words to pass on


def watch(
    ranks: Ranks,
    signals: StopSignals,
    interrupted: str = INTERRUPTED,
    not_begun: str = NOT_BEGUN,
    trains: bool = False,
) -> Outcome:
    """Waits for ranks and passes stop signals on to them; see :func:`supervise`."""
    received = signals.received
    signals.go_to(ranks)
    with _done_files(ranks, trains) as done:
        codes, early = _wait(ranks, done)
        said = done[0].told() if 0 in done else 0
    well = Outcome(said=said)
    if not early and not any(codes.values()):
        return well
    message = failure_message(ranks, codes, early)
    asked = bool(received) and _ended_by(received[0], ranks, codes)
    if asked and said:
        return well  # the signal met a rank at its exit, when all was written
    if received.count(signal.SIGINT) > 1:
        message = interrupted
    elif asked:
        message = interrupted if _interrupted(received[0], ranks, codes) else not_begun
    stopped = bool(received) and message in (interrupted, not_begun)
    bad_input = trains and _first_code(ranks, codes) == EXIT_USER_ERROR
    return Outcome(message, stopped, bad_input, -signal.SIGKILL in codes.values())


def _ended_by(number: int, ranks: Ranks, codes: Mapping[int, int | None]) -> bool:
    """Tells whether a stop signal ended the ranks: each of them, or some, and the others because they lost those."""
    others = {rank: code for rank, code in codes.items() if code not in (0, -number, 128 + number)}
    if not others:
        return True
    if not any(code in (-number, 128 + number) for code in codes.values()):
        return False
    told = {rank: read_failure(ranks.message_file(rank)) for rank in others}
    return all(
        code in (None, -signal.SIGABRT) if (failure := told[rank]) is None else failure[1]
        for rank, code in others.items()
    )


def _interrupted(number: int, ranks: Ranks, codes: Mapping[int, int | None]) -> bool:
    """Tells whether a rank that a signal ended says so itself: it trained, and got the signal once more."""
    told = [read_failure(ranks.message_file(rank)) for rank, code in codes.items() if code == 128 + number]
    return any(failure is not None and not failure[1] for failure in told)


@contextmanager
def _done_files(ranks: Ranks, trains: bool) -> Iterator[dict[int, DoneFile]]:
    """Opens the files in which training ranks say that they are done, before a cleanup can remove them."""
    files = {rank: DoneFile(ranks.message_file(rank)) for rank in ranks.exit_codes()} if trains else {}
    try:
        yield files
    finally:
        for file in files.values():
            file.close()


def _first_code(ranks: Ranks, codes: Mapping[int, int | None]) -> int | None:
    """Returns the exit code of the first rank that failed by itself; None if all failed because of another."""
    told = {rank: read_failure(ranks.message_file(rank)) for rank, code in codes.items() if code}
    return next((codes[rank] for rank, failure in told.items() if failure is None or not failure[1]), None)


def exit_code(outcome: Outcome, signals: StopSignals) -> int:
    """Prints what failed, if anything did; returns the launcher's exit code."""
    signalled = 128 + signals.received[0] if signals.received else 0
    if outcome.message is None:
        return 0 if outcome.said == UNSTOPPED else signalled or outcome.said
    show_cursor()
    say(f"{ERROR_PREFIX}{outcome.message}")
    if outcome.stopped:
        return signalled
    return EXIT_USER_ERROR if outcome.bad_input else EXIT_FAILURE


def _wait(ranks: Ranks, done: Mapping[int, DoneFile]) -> tuple[dict[int, int | None], list[int]]:
    """Waits until all ranks have ended, or some seconds after the first failed: others may be writing a checkpoint.

    Returns:
        Exit codes in the order in which the ranks ended, as the first failure is the one to report; and the training
        ranks (with files in ``done``) that ended with 0 before they were done.
    """
    deadline: float | None = None
    while True:
        codes = ranks.exit_codes()
        early = [rank for rank, code in codes.items() if code == 0 and rank in done and not done[rank].told()]
        if all(code is not None for code in codes.values()):
            return codes, early
        if deadline is None and (early or any(codes.values())):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return codes, early
        time.sleep(POLL_SECONDS)


def failure_message(ranks: Ranks, codes: dict[int, int | None], early: Sequence[int] = ()) -> str:
    """Returns the message of the first rank that failed by itself, or how it ended; ``early`` ended with 0 too soon."""
    told = {rank: read_failure(ranks.message_file(rank)) for rank in codes}
    failed = [(rank, code, told[rank]) for rank, code in codes.items() if code]
    for rank, _, failure in failed:
        if failure and not failure[1]:
            named = len(codes) == 1 or failure[0].startswith(f"rank {rank} ")
            return failure[0] if named else f"rank {rank}: {failure[0]}"
    for rank in early:
        return f"rank {rank} {UNDONE}"
    told_why = False
    for rank, code, failure in failed:  # in the order of their ends
        told_why = told_why or failure is not None
        if failure is None and code == -signal.SIGABRT and told_why:
            continue  # JAX's processes abort when they miss the one that said why
        if failure is None and code < 0:
            return f"rank {rank} {killed_by(-code)}"
        if failure is None:
            return f"rank {rank} ended with exit code {code}"
    return next((failure[0] for failure in told.values() if failure), "a rank failed without a message")
