"""One session of a run that is attacked: from its start to the end of its last process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.disk import fill
from benchmarks.chaos.plan import Case, Fault
from benchmarks.chaos.processes import MARK, marked, roles, send

HANG_SECONDS = 600.0
"""After which a session that should end, or go on, counts as hanging, on a machine that may be busy with much else."""
ORPHAN_SECONDS = 60.0
"""After which a process that is left counts as one that stays; how long it took stands in the table."""
POLL_SECONDS = 0.002
UNBLAMED = ("launcher", "everything")
"""Targets after whose death nobody is left to say a line."""


@dataclass
class Told:
    """What one session came to.

    Attributes:
        fault: that ended it, or None: it ended of itself.
        code: exit code of the command.
        stderr: what it said there.
        rows: of ``metrics.jsonl`` when the fault was done; of the end, where none was.
        seconds: from the deed to the end of the last process.
        problems: what shouldn't be.
    """

    fault: Fault | None
    code: int
    stderr: str
    rows: int
    seconds: float
    problems: list[str] = field(default_factory=list)


def rows_of(run: Path) -> int:
    """Counts the whole lines of a run's metrics."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


class Session:
    """A session under way.

    Args:
        case: that is trained.
        words: of ``lockstep train``.
        run: its run directory.
        temporary: where it may put temporary files.
    """

    def __init__(self, case: Case, words: Sequence[str], run: Path, temporary: Path) -> None:
        self._case, self._run, self._mark = case, run, uuid.uuid4().hex
        self._rows_before = rows_of(run)
        self._said = (temporary.parent / "stderr").open("w+b")
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(temporary)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", *words],
            cwd=temporary.parent, env=environment, stdout=subprocess.DEVNULL, stderr=self._said,
            start_new_session=True,
        )  # fmt: skip
        self._began = time.monotonic()

    def attacked(self, fault: Fault) -> Told:
        """Waits for a fault's moment, does it, and waits for what comes of it; for the end of a run that was faster."""
        try:
            if not self._reaches(fault):
                return self.ended()
        except TimeoutError as error:
            send(marked(self._mark), signal.SIGKILL)
            self._process.wait()
            return Told(None, 0, "", rows_of(self._run), 0.0, [f"{fault.label}: {error}"])
        time.sleep(fault.delay)
        rows, targets = rows_of(self._run), roles(self._mark, self._process.pid)
        victims = targets.get(fault.target, [])
        if fault.kind == "disk":
            return self._starved(fault, rows)
        if not victims or self._process.poll() is not None:
            return self.ended()
        if fault.target in ("rank", "worker"):
            victims = [victims[int(fault.delay * 1e6) % len(victims)]]
        if fault.kind == "pause":
            return self._paused(fault, victims, rows)
        send(victims, signal.SIGTERM if fault.kind == "stop" else signal.SIGKILL)
        return self._judged(fault, rows)

    def ended(self) -> Told:
        """Waits for the end of a session that nobody disturbs any more."""
        told = self._end(None, rows_of(self._run), HANG_SECONDS)
        if told.code != 0:
            told.problems.append(f"ended with exit code {told.code}: {told.stderr[-300:]}")
        told.rows = rows_of(self._run)
        return told

    # --- moments ------------------------------------------------------------------------------------------------

    def _reaches(self, fault: Fault) -> bool:
        """Waits for a fault's moment; False if the session ended before it."""
        if fault.moment == "start-up":
            return self._waits(lambda: time.monotonic() - self._began >= fault.after)
        if not self._waits(lambda: rows_of(self._run) >= self._rows_before + fault.after or self._cut()):
            return False
        if fault.moment == "commit":
            return self._waits(lambda: any((self._run / "checkpoints").glob(".step_*.tmp")), 0.0)
        if fault.moment == "evaluation":
            interval = self._case.eval_interval
            return self._waits(lambda: rows_of(self._run) % interval == interval - 1, 0.0)
        return True

    def _cut(self) -> bool:
        """Notes that the session has cut rows which lie after its checkpoint, so that they count from there."""
        self._rows_before = min(self._rows_before, rows_of(self._run))
        return False

    def _waits(self, condition: Callable[[], bool], poll: float = POLL_SECONDS) -> bool:
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            if self._process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"no iteration in {HANG_SECONDS:.0f} s")
            time.sleep(poll)
        return True

    # --- deeds --------------------------------------------------------------------------------------------------

    def _judged(self, fault: Fault, rows: int) -> Told:
        told = self._end(fault, rows, HANG_SECONDS)
        expected = {"stop": {0, 128 + signal.SIGTERM, -signal.SIGTERM}, "kill": {1, -signal.SIGKILL}, "disk": {1}}
        if told.code == 0 and self._is_finished():
            return told  # it came after the last step, and nothing was left to lose
        if told.code not in expected[fault.kind]:
            told.problems.append(f"{fault.label}: exit code {told.code}: {told.stderr[-300:]}")
        lines = [line for line in told.stderr.splitlines() if not line.startswith("lockstep: warning: ")]
        silent = fault.kind == "kill" and (fault.target in UNBLAMED or told.code == -signal.SIGKILL)
        if not silent and (len(lines) != 1 or not lines[0].startswith("lockstep: ")):
            told.problems.append(f"{fault.label}: not one line: {told.stderr[-600:]!r}")
        return told

    def _is_finished(self) -> bool:
        try:
            return json.loads((self._run / "summary.json").read_text())["status"] == "finished"
        except (OSError, ValueError, KeyError):
            return False

    def _starved(self, fault: Fault, rows: int) -> Told:
        filler = fill(self._run.parents[1])
        try:
            return self._judged(fault, rows)
        finally:
            filler.unlink()

    def _paused(self, fault: Fault, victims: list[int], rows: int) -> Told:
        send(victims, signal.SIGSTOP)
        time.sleep(fault.lasts)
        send(victims, signal.SIGCONT)
        began, after = time.monotonic(), rows_of(self._run)
        while rows_of(self._run) <= after and self._process.poll() is None:
            if time.monotonic() - began > HANG_SECONDS:
                return Told(fault, 0, "", rows, HANG_SECONDS, [f"{fault.label}: hangs since it goes on"])
            time.sleep(POLL_SECONDS)
        return Told(fault, 0, "", rows, time.monotonic() - began)

    def _end(self, fault: Fault | None, rows: int, limit: float) -> Told:
        began, problems = time.monotonic(), []
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            problems.append(f"hangs: no end within {limit:.0f} s")
            code = -1
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        if left:
            problems.append(f"{len(left)} processes after {ORPHAN_SECONDS:.0f} s: {', '.join(left.values())}")
            send(left, signal.SIGKILL)
            self._process.wait()
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        self._said.close()
        return Told(fault, code, text, rows, seconds, problems)
