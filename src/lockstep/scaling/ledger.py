"""Measures a sweep job by job, and keeps its directory: which runs are done, their records, tables and plots."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.redact import shown_value
from lockstep.core.files import replace_text
from lockstep.runs.curves import can_plot
from lockstep.runs.directory import RunDirectory, writing
from lockstep.scaling.measure import Outcome, Progress, measure
from lockstep.scaling.plan import Job, Plan, differences
from lockstep.scaling.plot import write_plots
from lockstep.scaling.summarize import Row, run_row, summary_rows

BENCH, LOGS, WORK, PLOTS = "bench.json", "logs", "work", "plots.png"
BEGUN = {".lock", f".{BENCH}.tmp", LOGS}
"""What a sweep that was killed before it wrote its first word may have left."""


@dataclass
class Ledger:
    """``bench.json`` and ``logs/``: everything else in the directory is made of these two.

    A run counts as done once ``bench.json`` says so with the sha256 of its log: what an interrupted sweep left half
    done, or somebody changed, is measured again.

    Attributes:
        path: the sweep's directory.
        identity: :meth:`Plan.identity` of everything in it.
        asked: world sizes, repeats and whether the ceiling is measured: what may change between sessions.
        done: by job name: ``error``, ``seconds`` and ``log_sha256``.
    """

    path: Path
    identity: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def log(self, job: Job) -> Path:
        """A job's records."""
        return self.path / LOGS / f"{job.name}.jsonl"

    def write(self) -> None:
        """Write ``bench.json``, whole or not at all."""
        replace_text(
            self.path / BENCH,
            json.dumps({"identity": self.identity, "asked": self.asked, "done": self.done}, indent=2) + "\n",
        )

    def begin(self, job: Job) -> None:
        """A job is about to be measured: what was measured before is gone."""
        self.log(job).unlink(missing_ok=True)
        if self.done.pop(job.name, None) is not None:
            self.write()

    def record(self, job: Job, outcome: Outcome) -> None:
        """A job is done, well or not."""
        facts = {"kind": job.kind, "world_size": job.world_size, "repeat": job.repeat}
        text = "".join(json.dumps(facts | record) + "\n" for record in outcome.records)
        replace_text(self.log(job), text)
        self.done[job.name] = {"error": outcome.error, "seconds": outcome.seconds, "log_sha256": _sha256(text)}
        self.write()

    def outcome(self, job: Job) -> Outcome | None:
        """Reads what came of a job, if it is done and its log is as it was written."""
        entry, log = self.done.get(job.name), self.log(job)
        if entry is None or not log.is_file():
            return None
        text = log.read_text()
        if _sha256(text) != entry["log_sha256"]:
            return None
        return Outcome([json.loads(line) for line in text.splitlines()], entry["error"], entry["seconds"])

    def missing(self, plan: Plan) -> list[Job]:
        """Lists what of a plan is still to be measured; what failed is, too."""
        found = [(job, self.outcome(job)) for job in plan.jobs()]
        return [job for job, outcome in found if outcome is None or outcome.error is not None]


def read_ledger(path: Path) -> Ledger | None:
    """The ledger in a directory, or None if there is none that can be read."""
    try:
        content = json.loads((path / BENCH).read_text())
        return Ledger(path, content["identity"], content["asked"], content["done"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def asked_by(plan: Plan) -> dict[str, Any]:
    """Takes of a plan what may change between the sessions of a sweep."""
    return {"world_sizes": list(plan.world_sizes), "repeats": plan.repeats, "ceiling": plan.ceiling}


def open_ledger(path: Path, plan: Plan) -> Ledger:
    """The ledger of a sweep, begun or continued; a ``ValueError`` if the directory is something else's or another's."""
    identity, ledger = plan.identity(), read_ledger(path)
    if ledger is None:
        if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - BEGUN):
            raise ValueError(f"name: {path} exists already and is no bench; choose another --name")
        ledger = Ledger(path, identity)
    else:
        differing = differences(ledger.identity, identity)
        if differing:
            key, theirs, ours = differing[0]
            theirs, ours = shown_value(theirs, key), shown_value(ours, key)
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise ValueError(
                f"name: bench {path} was measured with {key} {theirs} and this is {ours}{more}; choose another --name"
            )
    ledger.asked = asked_by(plan)
    (path / LOGS).mkdir(parents=True, exist_ok=True)
    ledger.write()
    return ledger


def unfinished(runs_dir: Path, stem: str, plan: Plan) -> Path | None:
    """The newest directory ``<stem>-…`` of the very same sweep that wasn't finished."""
    identity, asked = plan.identity(), asked_by(plan)
    for path in sorted(runs_dir.glob(f"{stem}-*"), reverse=True):
        ledger = read_ledger(path)
        if ledger and (ledger.identity, ledger.asked) == (identity, asked) and ledger.missing(plan):
            return path
    return None


def write_tables(path: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """``<name>.json``, and ``<name>.csv`` with ``;`` between the items of a list and nothing for None."""
    replace_text(path / f"{name}.json", json.dumps(list(rows), indent=2, allow_nan=False) + "\n")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: ";".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    replace_text(path / f"{name}.csv", text.getvalue())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sweep_directory(plan: Plan, name: str | None, runs_dir: Path) -> Path:
    """Chooses a sweep's directory: the one named, the one that the same sweep left unfinished, or a new one."""
    if name is not None:
        return runs_dir / name
    environment = plan.config.env.id.rpartition(":")[2].replace("/", "-")
    stem = f"bench-{environment}-{plan.mode}"
    found = unfinished(runs_dir, stem, plan)
    return found or runs_dir / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def locked_directory(path: Path) -> RunDirectory:
    """Makes a sweep's directory and locks it; a one-line ``ValueError`` if it can't be made, or is somebody's."""
    directory = RunDirectory(path)
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ValueError(f"name: {path} exists already, as a file; choose another --name")
        path.mkdir(parents=True, exist_ok=True)
        directory.lock()
    return directory


def measure_job(job: Job, plan: Plan, ledger: Ledger, progress: Progress) -> Outcome:
    """Measures one job of a sweep, keeps its outcome, and writes the tables anew."""
    ledger.begin(job)
    outcome = measure(job, plan, ledger.path / WORK, progress)
    ledger.record(job, outcome)
    write_results(plan, ledger, plots=False)
    return outcome


def write_results(plan: Plan, ledger: Ledger, plots: bool = True) -> tuple[list[Row], list[Row]]:
    """Writes both tables and the plots of what is done of a plan; returns the tables."""
    outcomes = [(job, ledger.outcome(job)) for job in plan.jobs()]
    rows = [run_row(job, plan, outcome) for job, outcome in outcomes if outcome is not None]
    summary = summary_rows(rows, plan)
    if rows:
        write_tables(ledger.path, "per_run", rows)
    write_tables(ledger.path, "summary", summary)
    if plots and can_plot():
        title = f"{plan.config.env.id}: {plan.mode} scaling, {plan.repeats} repeats"
        write_plots(ledger.path / PLOTS, title, rows, summary)
    return rows, summary
