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
from typing import TypeVar

from benchmarks.chaos.disk import fill
from benchmarks.chaos.lines import expected_line, problem_of
from benchmarks.chaos.moments import Aim, commits_in, evaluation_of
from benchmarks.chaos.plan import Case, Fault
from benchmarks.chaos.processes import MARK, Processes, marked, send
from lockstep.runs.directory import CHECKPOINTS

HANG_SECONDS = 600.0
"""After which a session that should end, or go on, counts as hanging, on a machine that may be busy with much else."""
ORPHAN_SECONDS = 60.0
"""After which a process that is left counts as one that stays; how long it took stands in the table."""
POLL_SECONDS = 0.002
COMMIT_SECONDS = 0.05
"""Between looks whether a session that is waited for still runs."""

T = TypeVar("T")


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
        struck: whether the fault met the commit or the evaluation that it was aimed at; None: nobody can tell.
    """

    fault: Fault | None
    code: int
    stderr: str
    rows: int
    seconds: float
    problems: list[str] = field(default_factory=list)
    struck: bool | None = None


@dataclass(frozen=True)
class Deed:
    """A fault that is about to be done.

    Attributes:
        fault: what kind.
        victims: process ids that get its signal.
        line: what must be said of it, see :func:`expected_line`.
        aim: what it is aimed at.
    """

    fault: Fault
    victims: Sequence[int]
    line: str | None
    aim: Aim


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

    def attacked(self, fault: Fault) -> Told | None:
        """Waits for a fault's moment, does it, and waits for what comes of it; for the end of a run that was faster.

        None: what it is aimed at isn't there, and nothing was done.
        """
        try:
            if not self._begins(fault):
                return self.ended()
            found = Processes.of(self._mark, self._process.pid)
            victims = fault.one_of(found.of_role(fault.target))
            if not victims and fault.kind != "disk":
                return None
            line = self._expected(fault, found, victims)
            aim = self._reached(fault, found, victims)
        except TimeoutError as error:
            send(marked(self._mark), signal.SIGKILL)
            self._process.wait()
            return Told(None, 0, "", rows_of(self._run), 0.0, [f"{fault.label}: {error}"])
        if aim is None:
            return self.ended()
        time.sleep(fault.delay * aim.longest)
        if self._process.poll() is not None:
            return self.ended()
        return self._done(Deed(fault, victims, line, aim))

    def ended(self) -> Told:
        """Waits for the end of a session that nobody disturbs any more."""
        told = self._end(None, rows_of(self._run), HANG_SECONDS)
        if told.code != 0:
            told.problems.append(f"ended with exit code {told.code}: {told.stderr[-300:]}")
        told.rows = rows_of(self._run)
        return told

    # --- moments ------------------------------------------------------------------------------------------------

    def _begins(self, fault: Fault) -> bool:
        """Waits until a fault's moment may come; False if the session ended before."""
        if fault.moment == "start-up":
            return bool(self._waits(lambda: time.monotonic() - self._began >= fault.after))
        return bool(self._waits(lambda: rows_of(self._run) >= self._rows_before + fault.after or self._cut()))

    def _reached(self, fault: Fault, found: Processes, victims: Sequence[int]) -> Aim | None:
        """Waits for a fault's moment, with all that takes long done before; None if the session ended before it."""
        if fault.moment == "commit":
            with commits_in(self._run / CHECKPOINTS) as commits:
                return self._waits(lambda: commits.next(COMMIT_SECONDS), 0.0)
        if fault.moment != "evaluation":
            return Aim()
        evaluation = evaluation_of(found, victims)
        if evaluation is not None:
            return evaluation if self._waits(evaluation.struck, 0.0) else None
        last = (rows_of(self._run) // self._case.eval_interval + 1) * self._case.eval_interval - 1
        return Aim() if self._waits(lambda: rows_of(self._run) >= last, 0.0) else None

    def _cut(self) -> bool:
        """Notes that the session has cut rows which lie after its checkpoint, so that they count from there."""
        self._rows_before = min(self._rows_before, rows_of(self._run))
        return False

    def _waits(self, condition: Callable[[], T], poll: float = POLL_SECONDS) -> T | None:
        """The first true value of a condition; None if the session ended before it."""
        deadline = time.monotonic() + HANG_SECONDS
        while not (value := condition()):
            if self._process.poll() is not None:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no iteration in {HANG_SECONDS:.0f} s")
            time.sleep(poll)
        return value

    # --- deeds --------------------------------------------------------------------------------------------------

    def _expected(self, fault: Fault, found: Processes, victims: Sequence[int]) -> str | None:
        """What must be said of a fault, if it ends the session."""
        if not fault.ends:
            return None
        return expected_line(fault, found, victims, self._run, self._case.workers_of_a_rank)

    def _done(self, deed: Deed) -> Told:
        """Does it, at once, and waits for what comes of it."""
        kind = deed.fault.kind
        if kind == "disk":
            return self._starved(deed)
        send(deed.victims, {"stop": signal.SIGTERM, "pause": signal.SIGSTOP}.get(kind, signal.SIGKILL))
        struck, rows = deed.aim.struck(), rows_of(self._run)
        told = self._paused(deed, rows) if kind == "pause" else self._judged(deed, rows)
        told.struck = deed.aim.struck() if deed.fault.is_final else struck
        return told

    def _judged(self, deed: Deed, rows: int) -> Told:
        fault = deed.fault
        told = self._end(fault, rows, HANG_SECONDS)
        expected = {"stop": {128 + signal.SIGTERM}, "disk": {1}}
        if told.code in (0, -signal.SIGTERM) and self._is_finished():
            return told  # it came after the last step, and nothing was left to lose
        killed = {-signal.SIGKILL} if self._process.pid in deed.victims else {1}
        if told.code not in expected.get(fault.kind, killed):
            told.problems.append(f"{fault.label}: exit code {told.code}: {told.stderr[-300:]}")
        if (problem := problem_of(told.stderr, deed.line)) is not None:
            told.problems.append(f"{fault.label}: {problem}")
        return told

    def _is_finished(self) -> bool:
        try:
            return json.loads((self._run / "summary.json").read_text())["status"] == "finished"
        except (OSError, ValueError, KeyError):
            return False

    def _starved(self, deed: Deed) -> Told:
        filler = fill(self._run.parents[1])
        struck, rows = deed.aim.struck(), rows_of(self._run)
        try:
            told = self._judged(deed, rows)
        finally:
            filler.unlink()
        told.struck = struck
        return told

    def _paused(self, deed: Deed, rows: int) -> Told:
        fault = deed.fault
        time.sleep(fault.lasts)
        send(deed.victims, signal.SIGCONT)
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
