"""Measures a sweep job by job and maintains its directory: which runs are done, their records, tables and plots."""

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
from lockstep.scaling.plan import Job, Plan, identities_apart
from lockstep.scaling.plot import write_plots
from lockstep.scaling.summarize import Row, run_row, summary_rows

BENCH, LOGS, WORK, PLOTS = "bench.json", "logs", "work", "plots.png"
BEGUN = {".lock", f".{BENCH}.tmp", LOGS}
"""Files that a sweep may have left if it was killed before it wrote ``bench.json``."""


@dataclass
class Ledger:
    """Reads and writes ``bench.json`` and ``logs/``; all other files of the sweep are made from these.

    A job counts as done if ``bench.json`` has the sha256 of its log. A job that was interrupted, or whose log was
    changed, is measured again.

    Attributes:
        path: the sweep's directory.
        identity: :meth:`Plan.identity` of everything in it.
        asked: what may change between sessions: world sizes, repeats and whether the ceiling is measured.
        done: ``error``, ``seconds`` and ``log_sha256``, by job name.
    """

    path: Path
    identity: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def log(self, job: Job) -> Path:
        """Returns the path of a job's records."""
        return self.path / LOGS / f"{job.name}.jsonl"

    def write(self) -> None:
        """Writes ``bench.json`` atomically."""
        replace_text(
            self.path / BENCH,
            json.dumps({"identity": self.identity, "asked": self.asked, "done": self.done}, indent=2) + "\n",
        )

    def begin(self, job: Job) -> None:
        """Removes what an earlier session recorded of a job, before it is measured."""
        self.log(job).unlink(missing_ok=True)
        if self.done.pop(job.name, None) is not None:
            self.write()

    def record(self, job: Job, outcome: Outcome) -> None:
        """Records a job's outcome, be it a success or a failure."""
        facts = {"kind": job.kind, "world_size": job.world_size, "repeat": job.repeat}
        text = "".join(json.dumps(facts | record) + "\n" for record in outcome.records)
        replace_text(self.log(job), text)
        self.done[job.name] = {"error": outcome.error, "seconds": outcome.seconds, "log_sha256": _sha256(text)}
        self.write()

    def outcome(self, job: Job) -> Outcome | None:
        """Returns a job's outcome; None unless it is done and its log is unchanged."""
        entry, log = self.done.get(job.name), self.log(job)
        if entry is None or not log.is_file():
            return None
        text = log.read_text()
        if _sha256(text) != entry["log_sha256"]:
            return None
        return Outcome([json.loads(line) for line in text.splitlines()], entry["error"], entry["seconds"])

    def missing(self, plan: Plan) -> list[Job]:
        """Returns the jobs of a plan that are still to be measured, including those that failed."""
        found = [(job, self.outcome(job)) for job in plan.jobs()]
        return [job for job, outcome in found if outcome is None or outcome.error is not None]


def read_ledger(path: Path) -> Ledger | None:
    """Reads the ledger in a directory; None if there is no readable one."""
    try:
        content = json.loads((path / BENCH).read_text())
        return Ledger(path, content["identity"], content["asked"], content["done"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def asked_by(plan: Plan) -> dict[str, Any]:
    """Returns what may change of a plan between the sessions of a sweep."""
    return {"world_sizes": list(plan.world_sizes), "repeats": plan.repeats, "ceiling": plan.ceiling}


def open_ledger(path: Path, plan: Plan) -> Ledger:
    """Begins or continues a sweep's ledger.

    Raises:
        ValueError: the directory holds other files, or a sweep with another identity.
    """
    identity, ledger = plan.identity(), read_ledger(path)
    if ledger is None:
        if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - BEGUN):
            raise ValueError(f"name: {path} exists already and is no bench; choose another --name")
        ledger = Ledger(path, identity)
    else:
        differing = identities_apart(ledger.identity, identity)
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
    """Returns the newest directory ``<stem>-…`` of the same sweep that isn't finished, or None."""
    identity, asked = plan.identity(), asked_by(plan)
    for path in sorted(runs_dir.glob(f"{stem}-*"), reverse=True):
        ledger = read_ledger(path)
        if ledger and (ledger.identity, ledger.asked) == (identity, asked) and ledger.missing(plan):
            return path
    return None


def write_tables(path: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes ``<name>.json`` and ``<name>.csv``, with ``;`` between the items of a list and nothing for None."""
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
    """Chooses a sweep's directory: the named one, one that the same sweep left unfinished, or a new one."""
    if name is not None:
        return runs_dir / name
    environment = plan.config.env.id.rpartition(":")[2].replace("/", "-")
    stem = f"bench-{environment}-{plan.mode}"
    found = unfinished(runs_dir, stem, plan)
    return found or runs_dir / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def locked_directory(path: Path) -> RunDirectory:
    """Makes a sweep's directory and locks it; raises a one-line ``ValueError`` if it can't, or if it is a file."""
    directory = RunDirectory(path)
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ValueError(f"name: {path} exists already, as a file; choose another --name")
        path.mkdir(parents=True, exist_ok=True)
        directory.lock()
    return directory


def measure_job(job: Job, plan: Plan, ledger: Ledger, progress: Progress) -> Outcome:
    """Measures one job of a sweep, records its outcome, and rewrites the tables."""
    ledger.begin(job)
    outcome = measure(job, plan, ledger.path / WORK, progress)
    ledger.record(job, outcome)
    write_results(plan, ledger, plots=False)
    return outcome


def write_results(plan: Plan, ledger: Ledger, plots: bool = True) -> tuple[list[Row], list[Row]]:
    """Writes both tables, and the plots, of the jobs done so far; returns the tables."""
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
