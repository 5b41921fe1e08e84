"""A run that is attacked again and again until it is done, and then compared with one that nobody touched."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.compared import Reference, differences, result_of
from benchmarks.chaos.disk import small_disk
from benchmarks.chaos.plan import Case, Fault, as_row, drawn, world_of
from benchmarks.chaos.session import Session, Told

MOST_SESSIONS = 40
MOST_DRAWS = 20
"""Of faults whose target isn't there; after so many the session goes on undisturbed."""


@dataclass
class Campaign:
    """What came of one run.

    Attributes:
        case: its name.
        seed: that drew its faults.
        faults: what was done, a row each.
        problems: what shouldn't be, each a promise that broke.
        seconds: that it took.
    """

    case: str
    seed: int | str
    faults: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def reference_of(case: Case, directory: Path) -> Reference:
    """Trains a case undisturbed on one rank or device; what comes of it, and what lies in its run directory."""
    words = [*case.command(), *case.worlds[0], "--name", "run", "--runs-dir", str(directory), "--quiet"]
    subprocess.run([sys.executable, "-m", "lockstep", "train", *words], check=True)
    return result_of(directory / "run"), {path.name for path in (directory / "run").iterdir()}


def attack(case: Case, seed: int | str, kills: int, directory: Path, reference: Reference, with_disk: bool) -> Campaign:
    """Attacks one run.

    Args:
        case: that is trained.
        seed: draws the faults, their moments and the world sizes.
        kills: how many faults there are, at most: fewer if the run is done before.
        directory: an empty one.
        reference: see :func:`reference_of`.
        with_disk: whether the disk may be filled.
    """
    source, campaign, began = random.Random(f"{case.name} {seed}"), Campaign(case.name, seed), time.monotonic()
    disk, temporary = directory / "disk", directory / "tmp"
    disk.mkdir()
    temporary.mkdir()
    run = disk / "runs" / "run"

    def draw(begun: bool) -> Fault | None:
        return drawn(source, case, with_disk, begun) if len(campaign.faults) < kills else None

    with small_disk(disk) if with_disk else nullcontext(), _timed(campaign, began):
        words = [*case.command(), "--name", "run", "--runs-dir", str(run.parent), "--resume", "auto", "--quiet"]
        for _ in range(MOST_SESSIONS):
            fault = draw(begun=False)
            session = Session(case, [*words, *world_of(source, case, fault)], run, temporary)
            told = met(session, fault, draw)
            while told.fault is not None and not told.fault.ends and not told.problems:
                _note(campaign, told, run, case.steps)
                told = met(session, draw(begun=True), draw)
            _note(campaign, told, run, case.steps)
            if told.fault is None or told.problems:
                break
        else:
            campaign.problems.append(f"not done after {MOST_SESSIONS} sessions")
        if not campaign.problems:
            campaign.problems += differences(run, reference, temporary)
    return campaign


def met(session: Session, fault: Fault | None, draw: Callable[[bool], Fault | None]) -> Told:
    """Does a fault to a session, or another one where its target isn't there; without one waits for the end."""
    for _ in range(MOST_DRAWS):
        if fault is None:
            break
        told = session.attacked(fault)
        if told is not None:
            return told
        fault = draw(True)
    return session.ended()


@contextmanager
def _timed(campaign: Campaign, began: float) -> Iterator[None]:
    yield
    campaign.seconds = round(time.monotonic() - began, 1)


def _note(campaign: Campaign, told: Told, run: Path, steps: int) -> None:
    campaign.problems += told.problems
    if told.fault is not None:
        lost = max(0, told.rows - newest_checkpoint(run) // steps) if told.fault.ends else 0
        row = as_row(told.fault) | {"iteration": told.rows, "seconds": round(told.seconds, 3), "iterations_lost": lost}
        campaign.faults.append(row | {"code": told.code, "struck": told.struck})


def newest_checkpoint(run: Path) -> int:
    """The global step of the newest checkpoint; 0 without any."""
    return max((int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*")), default=0)
