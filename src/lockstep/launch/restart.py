"""Restarts all ranks if one dies or hangs, from the newest state, on as many ranks as there are places for."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config.run import RunOptions
from lockstep.core.done import Mark
from lockstep.core.errors import KilledError, RunError
from lockstep.core.private import only_we_write
from lockstep.core.process import say
from lockstep.core.temporary import hold, temporary_directory
from lockstep.launch.rank import Assignment
from lockstep.launch.serving.kills import after_restarts, killed_for_memory, time_now
from lockstep.launch.spawn import threads_of
from lockstep.launch.supervise import NOT_BEGUN, Outcome, Server, StopSignals, exit_code, forwarding, watch
from lockstep.runs.checkpoint import (
    STATE,
    CheckpointError,
    checkpoints_in,
    manifest_of,
    problem_with,
    step_of,
)
from lockstep.runs.checkpoint_writer import sync_records, write_directory
from lockstep.runs.directory import CHECKPOINTS, RECORDS
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import last_global_step_of
from lockstep.training.run_history import with_restarts

STOPPED = "stopped by a signal while ranks started again; --resume goes on from the newest checkpoint"
BEGUN = "begun"
LEAST_HOURS = 1e-9
"""What is left of a time limit that has passed: ranks still do one iteration, and write a checkpoint."""


@dataclass(frozen=True)
class State:
    """A state that ranks can resume from; the run's beginning has ``step`` -1 and no ``path``."""

    step: int = -1
    path: Path | None = None

    @property
    def where(self) -> str:
        """Where the state is, in the words of ``summary.json``."""
        if self.path is None:
            return "beginning"
        return "disk" if self.path.parent.name == CHECKPOINTS else "memory"


def newest_state(directories: list[Path], at_most: int | None = None) -> State:
    """Returns the valid state with the highest step in several directories; among equals, that of the first directory.

    ``at_most``: states after this step don't count, because the run is about to remove them.
    """
    paths = [path for directory in directories for path in checkpoints_in(directory)]
    for path in sorted(paths, key=lambda path: step_of(path) or 0, reverse=True):
        step = step_of(path)
        if step is not None and (at_most is None or step <= at_most) and problem_with(path) is None:
            return State(step, path)
    return State()


def prepared(memory: Path, holds: contextlib.ExitStack) -> Path | None:
    """Prepares the directory for the states of ranks that are about to start; None if others could write it.

    It is made again if it is gone, and then held by ``holds``: a user's files in memory are removed on logout.
    """
    with contextlib.suppress(OSError):
        if not memory.exists():
            memory.mkdir(mode=0o700)
            holds.enter_context(hold(memory))
        if only_we_write(memory):
            return memory
    return None


def signature(message: str) -> str:
    """Returns a failure's message without ranks and other numbers, which is the same for equal failures."""
    return re.sub(r"\d+", "#", re.sub(r"^rank \d+:? ", "", message))


@dataclass
class Failures:
    """The failures since there was a newer state; one that occurs twice is the program's own fault."""

    step: int = -1
    seen: set[str] = field(default_factory=set)

    def again(self, message: str, step: int) -> bool:
        """Notes a failure, with ``step`` of the newest state; returns whether it occurred before."""
        if step > self.step:
            self.step = step
            self.seen.clear()
        failure = signature(message)
        again = failure in self.seen
        self.seen.add(failure)
        return again


class Restarts:
    """Trains an assignment, and restarts its ranks at most ``options.max_restarts`` times.

    Args:
        assignment: of the first start.
        server: starts ranks.
        another: makes a server that replaces one that has died.
        places: returns how many ranks there are places for; called before each restart.
        hold_on: raises a ``RunError`` if another process has taken the run while no rank had it.
        early: when servers were killed before this one, and what was said; each counts as a restart.

    Attributes:
        fewer: by how many the ranks are fewer than the places, because ranks were killed for memory.
    """

    def __init__(
        self,
        assignment: Assignment,
        server: Server,
        another: Callable[[], Server],
        places: Callable[[], int],
        hold_on: Callable[[], None] = lambda: None,
        early: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._assignment, self._server, self._another, self._places = assignment, server, another, places
        self._hold_on, self._early = hold_on, early
        self._failures, self._rows = Failures(), list[dict[str, Any]]()
        self.fewer, self._began = 0, time.monotonic()
        self._holds = contextlib.ExitStack()
        self._begun = False  # the last ranks
        self._has_cut = False  # what comes after the state that was asked for

    def train(self, nproc: int) -> int:
        """Trains on ``nproc`` ranks at first; returns the launcher's exit code.

        However this ends, the newest state is then on disk.
        """
        with forwarding() as signals, temporary_directory(in_memory=True) as memory, self._holds:
            try:
                return self._train(nproc, memory, signals)
            except BaseException:  # a second Ctrl-C while ranks start, too
                try:
                    self._server.close()
                finally:
                    self._save(self._newest(memory))
                raise

    def _train(self, nproc: int, memory: Path, signals: StopSignals) -> int:
        state, ranks, first = State(), nproc, self._newest(memory)
        beginning, trained = max(first.step, 0), False
        self._rows += [self._row(when, why, first, nproc, nproc) for when, why in self._early]
        while True:
            kills = killed_for_memory()
            outcome = self._attempt(memory, state, ranks, signals)
            if (why := outcome.message) is None:
                return exit_code(outcome, signals)
            for_memory = outcome.killed and killed_for_memory() > kills
            self.fewer += for_memory
            done, state, before = self._done(), self._newest(memory), ranks
            trained |= max(done, state.step) > beginning
            if trained:  # it was good enough to train with: a device or a server has failed since
                outcome = replace(outcome, bad_input=False)
            with signals.interruptible():
                ranks = self.ranks(nproc)
            own = for_memory or not outcome.killed
            over = why if signals.received else self._over(outcome, state, own, ranks < before) or self._taken()
            if over is not None:
                self._save(state)
                return exit_code(replace(outcome, message=over), signals)
            self._note(why, state, before, ranks, done)

    def _done(self) -> int:
        """Returns the global step that the last ranks logged last; 0 if they ended before they began."""
        return last_global_step_of(self._assignment.path / METRICS_JSONL) or 0 if self._begun else 0

    def _over(self, outcome: Outcome, state: State, own: bool, fewer: bool) -> str | None:
        """Says why ranks aren't restarted after a failure; None if they are, unless a signal asks for an end.

        Args:
            outcome: the failure.
            state: the newest one.
            own: whether the program itself may have failed. SIGKILL comes from outside, at any time and any number of
                times, unless the kernel sends it for memory.
            fewer: whether fewer ranks would start.
        """
        most, message = self._assignment.options.max_restarts, outcome.message or ""
        if outcome.bad_input:  # before anything was trained
            return message
        if own and self._failures.again(message, state.step) and not fewer:
            return f"{message} (twice without a newer state in between, so it isn't started again)"
        if len(self._rows) == most:
            return after_restarts(message, most)
        return None

    def _taken(self) -> str | None:
        """Says why the run isn't this launcher's any more; None if it is."""
        try:
            self._hold_on()
        except RunError as error:
            return str(error)
        except OSError:  # if that can't be told, ranks say what is wrong
            return None
        return None

    def _attempt(self, memory: Path, state: State, ranks: int, signals: StopSignals) -> Outcome:
        """Starts ranks from a state, and waits until they have ended."""
        facts = replace(self._assignment.facts, restarts=tuple(self._rows))
        kept = prepared(memory, self._holds)
        mine = replace(self._assignment, options=self.options_left(), memory=kept, facts=facts)
        if state.path is not None:
            mine = replace(mine, states=state.path.parent, resume_from=state.path.name)
        self._begun = False
        with temporary_directory() as logs, contextlib.closing(Mark(logs / BEGUN)) as mark:
            mine = replace(mine, begun=logs / BEGUN)
            try:
                with signals.interruptible():
                    if self._server.closed:
                        self._server = self._another()
                    threads = threads_of(mine.config.threads)
                    served = self._server.start(ranks, logs, assignment=mine.to_json(), environment=threads)
            except RunError as error:
                self._server.close()
                return Outcome(str(error), killed=isinstance(error, KilledError))
            try:
                not_begun = STOPPED if len(self._rows) > len(self._early) else NOT_BEGUN
                return watch(served, signals, not_begun=not_begun, trains=True)
            except RunError as error:
                return Outcome(str(error))
            finally:
                signals.leave()
                served.end()
                self._begun = mark.told() > 0
                self._has_cut |= self._begun

    def _save(self, state: State) -> None:
        """Writes a state that is only in memory to disk, with the restarts so far, for later sessions."""
        if state.path is None or state.where == "disk":
            return
        manifest, run = manifest_of(state.path), self._assignment.path
        if manifest is None:
            return
        facts = {name: fact for name, fact in manifest.items() if name not in ("format", "files")}
        try:
            files = {name: (state.path / name).read_bytes() for name in manifest["files"]}
            files[STATE] = with_restarts(files[STATE], self._rows)
            self._hold_on()
            sync_records([run / name for name in RECORDS])
            write_directory(run / CHECKPOINTS / state.path.name, files, facts)
        except (OSError, CheckpointError, RunError) as error:
            say(f"lockstep: warning: the state in memory is lost: {error}")

    def options_left(self) -> RunOptions:
        """Returns the options for the next ranks, with what is left of ``max_hours``."""
        options = self._assignment.options
        if options.max_hours is None:
            return options
        left = options.max_hours - (time.monotonic() - self._began) / 3600
        return options.model_copy(update={"max_hours": max(left, LEAST_HOURS)})

    def _newest(self, memory: Path) -> State:
        """Returns the newest state; on disk, only up to the one that was asked for until ranks have begun with it."""
        asked, at_most = self._assignment.resume_from, None
        if asked not in (None, "latest") and not self._has_cut:
            at_most = int(str(asked).removeprefix("step_"))
        found = newest_state([memory] if only_we_write(memory) else [])
        on_disk = newest_state([self._assignment.path / CHECKPOINTS], at_most)
        return found if found.step > on_disk.step else on_disk  # which of the two is scored, and needn't be written

    def ranks(self, nproc: int) -> int:
        """Returns how many ranks to start: ``nproc``, or, if a range was asked for, as many as there are places for."""
        options = self._assignment.options
        if options.nproc_range is None:
            return nproc
        least, most = options.nproc_range
        return max(least, min(self._places(), most) - self.fewer)

    def _row(self, when: str, why: str, state: State, before: int, after: int, again: int = 0) -> dict[str, Any]:
        return {
            "time": when,
            "why": why,
            "ranks_before": before,
            "ranks_after": after,
            "from": state.where,
            "iteration": max(state.step, 0) // self._assignment.config.steps_per_iteration,
            "iterations_again": again,
        }

    def _note(self, why: str, state: State, before: int, after: int, done: int) -> None:
        """Prints a line that all ranks restart, and keeps a row about it for the summary."""
        config = self._assignment.config
        again = max(0, done - max(state.step, 0)) // config.steps_per_iteration
        self._rows.append(self._row(time_now(), why, state, before, after, again))
        place = {"memory": "in memory", "disk": "on the disk", "beginning": "the beginning"}[state.where]
        iteration, first = self._rows[-1]["iteration"], (why.splitlines() or ["a rank failed without a message"])[0]
        say(
            f"lockstep: restart {len(self._rows)} of {self._assignment.options.max_restarts}: {first}; "
            f"{after} rank{'' if after == 1 else 's'} from iteration {iteration:,} ({place}), {again:,} done again"
        )
