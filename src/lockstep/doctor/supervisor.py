"""Supervises the examined ranks from outside, so that they always end and there is always a verdict."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.process import ERROR_PREFIX, PARENT_VARIABLE, kill_session, say
from lockstep.doctor.watch.side_store import (
    ENDED,
    LEFT,
    STATE,
    VERDICT,
    SideReader,
    rank_directory,
    read_json,
    write_json,
)
from lockstep.launch.supervise import Ranks, forwarding

POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0
VERDICT_SECONDS = 60.0
UNCERTAIN = 6.0
"""Factor on the wait limit if not all ranks that stand still are known to be in a collective."""
STOP = "stop.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: in a ``deadlock``, ``interrupted`` by a signal, or ``stopped`` at its run limit."""

    deadlock: bool = False
    interrupted: bool = False
    stopped: bool = False


class OneRank:
    """Runs the script of one rank as a child of this process, which another launcher started as that rank."""

    def __init__(self, command: Sequence[str], rank: int) -> None:
        self._rank = rank
        self._process = subprocess.Popen(
            command, start_new_session=True, env={**os.environ, PARENT_VARIABLE: str(os.getpid())}
        )

    def exit_codes(self) -> dict[int, int | None]:
        """Returns the exit code by rank, None while it runs."""
        return {self._rank: self._process.poll()}

    def message_file(self, rank: int) -> str:
        """Returns "": such a rank leaves no message."""
        return ""

    def send(self, number: int) -> None:
        """Sends the script a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the script and every process that it started."""
        kill_session(self._process.pid)
        self._process.wait()


class Supervisor:
    """Waits for the ranks that this process started.

    If it ``judges``, it decides when the run stops; otherwise it follows the judging process. The run stops when all
    ranks that still run have waited for others for ``wait_limit`` seconds, or after ``run_limit`` (None: never).
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Path,
        world_size: int,
        *,
        judges: bool,
        wait_limit: float,
        run_limit: float | None,
    ) -> None:
        self._ranks, self._store, self._judges = ranks, store, judges
        self._readers = {rank: SideReader(rank_directory(store, rank)) for rank in range(world_size)}
        self._began, self._wait_limit, self._run_limit = time.monotonic(), wait_limit, run_limit
        self._told: set[int] = set()
        self._stop_at: float | None = None

    def wait(self) -> Outcome:
        """Waits until every rank has ended or the run is to stop, then kills the ranks that are left."""
        with forwarding() as signals:
            signals.go_to(self._ranks)
            try:
                return self._wait(signals.received)
            finally:
                try:
                    self._tell_ends()  # of ranks that ended before they are killed
                finally:
                    self._ranks.kill()

    def _wait(self, received: list[int]) -> Outcome:
        while True:
            self._tell_ends()
            if not self._judges:
                if (self._store / STOP).exists() or (self._store / VERDICT).exists() or self._over_here(received):
                    return Outcome(interrupted=bool(received))
            elif (outcome := self._judged(received)) is not None:
                if outcome.deadlock or self._running():
                    write_json(self._store / STOP, {})
                return outcome
            time.sleep(POLL_SECONDS)

    def _tell_ends(self) -> None:
        """Writes, for each rank of this process that has ended since the last call, its exit code and the time."""
        for rank, code in self._ranks.exit_codes().items():
            if code is not None and rank not in self._told:
                self._told.add(rank)
                path = rank_directory(self._store, rank)
                path.mkdir(parents=True, exist_ok=True)
                write_json(path / ENDED, {"code": code, "at": time.time()})  # wall clock: compared between hosts

    def _over_here(self, received: list[int]) -> bool:
        """Returns whether this process's ranks have ended, or the grace period after a signal is over."""
        codes = self._ranks.exit_codes().values()
        return None not in codes or (bool(received) and self._after(GRACE_SECONDS))

    def _after(self, seconds: float) -> bool:
        """Returns whether this many seconds have passed since the first call of this method."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + seconds
        return time.monotonic() > self._stop_at

    def _running(self) -> list[int]:
        return [rank for rank, reader in self._readers.items() if reader.ended() is None]

    def _judged(self, received: list[int]) -> Outcome | None:
        """Returns how the run ended, or None while it goes on."""
        ended = {rank: reader.ended() for rank, reader in self._readers.items()}
        running = [rank for rank, how in ended.items() if how is None]
        if not running:
            return Outcome(interrupted=bool(received))
        if received and self._after(GRACE_SECONDS):
            return Outcome(interrupted=True)
        if self._run_limit is not None and time.monotonic() - self._began > self._run_limit:
            return Outcome(stopped=True)
        states = [state for rank in running if not (state := self._readers[rank].state()).get("over")]
        if not states and self._after(self._wait_limit):
            return Outcome()  # the scripts are done, but their processes don't end
        certain = all(state.get("certain") for state in states)
        limit = self._wait_limit if certain else UNCERTAIN * self._wait_limit
        if states and min(state.get("waiting") or 0.0 for state in states) > limit:
            return Outcome(deadlock=True)
        failed = any(how["code"] for how in ended.values() if how is not None)
        return Outcome() if failed and self._after(min(GRACE_SECONDS, self._wait_limit)) else None


def await_verdict(store: Path, rank: int) -> int:
    """Waits for the judging process's verdict and returns its exit status, or 1 if none comes within a minute.

    The minute counts from any rank's last sign of life: a rank may go on long after this one ended, with an evaluation.
    """
    deadline, heard = time.monotonic() + VERDICT_SECONDS, 0
    while time.monotonic() < deadline:
        newest = _last_sign(store)
        if newest > heard:
            deadline, heard = time.monotonic() + VERDICT_SECONDS, newest
        verdict: Mapping[str, int] | None = read_json(store / VERDICT)
        if verdict is not None:
            with suppress(OSError):  # rank 0 may have removed it already
                (rank_directory(store, rank) / LEFT).touch()
            _await(lambda: not store.exists())  # a launcher kills the other ranks once one has failed
            return verdict["status"]
        time.sleep(POLL_SECONDS)
    say(f"{ERROR_PREFIX}doctor: rank 0 gave no verdict within {VERDICT_SECONDS:g} s")
    return 1


def _last_sign(store: Path) -> int:
    """Returns when any rank last wrote its state, in nanoseconds of the file system's clock; 0 if none has."""
    newest = 0
    for state in store.glob(f"*/{STATE}"):
        with suppress(OSError):
            newest = max(newest, state.stat().st_mtime_ns)
    return newest


def await_leaving(store: Path, others: Sequence[int]) -> None:
    """Waits until the other ranks have read the verdict, for a few seconds at most."""
    _await(lambda: all((rank_directory(store, rank) / LEFT).exists() for rank in others))


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and not condition():
        time.sleep(POLL_SECONDS)
