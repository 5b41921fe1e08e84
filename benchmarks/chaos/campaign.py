"""A run that is attacked again and again until it is done, and then compared with one that nobody touched."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.disk import small_disk
from benchmarks.chaos.plan import Case, as_row, drawn, world_of
from benchmarks.chaos.session import Session, Told, rows_of

MOST_SESSIONS = 40

Reference = tuple[dict[str, Any], set[str]]
"""What comes of an undisturbed run, and what lies in its directory."""


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
    seed: int
    faults: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def result_of(run: Path) -> dict[str, Any]:
    """What two runs of the same config must share: the agent, and every row but for its times."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "params_sha256": summary["params_sha256"],
        "state_sha256": summary["state_sha256"],
        "rows": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows],
    }


def reference_of(case: Case, directory: Path) -> Reference:
    """Trains a case undisturbed on one rank or device; what comes of it, and what lies in its run directory."""
    words = [*case.command(), *case.worlds[0], "--name", "run", "--runs-dir", str(directory), "--quiet"]
    subprocess.run([sys.executable, "-m", "lockstep", "train", *words], check=True)
    return result_of(directory / "run"), {path.name for path in (directory / "run").iterdir()}


def attack(case: Case, seed: int, kills: int, directory: Path, reference: Reference, with_disk: bool) -> Campaign:
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
    with small_disk(disk) if with_disk else nullcontext(), _timed(campaign, began):
        words = [*case.command(), "--name", "run", "--runs-dir", str(run.parent), "--resume", "auto", "--quiet"]
        for _ in range(MOST_SESSIONS):
            fault = drawn(source, case, with_disk) if len(campaign.faults) < kills else None
            session = Session(case, [*words, *world_of(source, case, fault)], run, temporary)
            told = session.ended() if fault is None else session.attacked(fault)
            while told.fault is not None and not told.fault.ends and not told.problems:
                _note(campaign, told, run, case.steps)
                fault = drawn(source, case, with_disk) if len(campaign.faults) < kills else None
                told = session.ended() if fault is None else session.attacked(fault)
            _note(campaign, told, run, case.steps)
            if told.fault is None or told.problems:
                break
        else:
            campaign.problems.append(f"not done after {MOST_SESSIONS} sessions")
        if not campaign.problems:
            campaign.problems += differences(run, reference, temporary)
    return campaign


@contextmanager
def _timed(campaign: Campaign, began: float) -> Iterator[None]:
    yield
    campaign.seconds = round(time.monotonic() - began, 1)


def _note(campaign: Campaign, told: Told, run: Path, steps: int) -> None:
    campaign.problems += told.problems
    if told.fault is not None:
        lost = max(0, told.rows - newest_checkpoint(run) // steps) if told.fault.ends else 0
        row = as_row(told.fault) | {"iteration": told.rows, "seconds": round(told.seconds, 3), "iterations_lost": lost}
        campaign.faults.append(row | {"code": told.code})


def newest_checkpoint(run: Path) -> int:
    """The global step of the newest checkpoint; 0 without any."""
    return max((int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*")), default=0)


def differences(run: Path, reference: Reference, temporary: Path) -> list[str]:
    """What tells a finished run from the undisturbed one: bits, rows, files."""
    expected, names = reference
    found, problems = result_of(run), []
    for name in ("params_sha256", "state_sha256"):
        if found[name] != expected[name]:
            problems.append(f"{name}: {found[name][:16]}… instead of {expected[name][:16]}…")
    if len(found["rows"]) != len(expected["rows"]):
        problems.append(f"{rows_of(run)} rows instead of {len(expected['rows'])}")
    differing = [n for n, (a, b) in enumerate(zip(found["rows"], expected["rows"], strict=False)) if a != b]
    if differing:
        problems.append(f"{len(differing)} rows differ, the first is number {differing[0] + 1}")
    files = {path.name for path in run.iterdir()}
    problems += [f"left in the run directory: {name}" for name in sorted(files - names)]
    problems += [f"missing in the run directory: {name}" for name in sorted(names - files)]
    problems += [f"left among the checkpoints: {path.name}" for path in (run / "checkpoints").glob(".*")]
    problems += [f"left in TMPDIR: {path.name}" for path in temporary.glob("lockstep*")]
    return problems
