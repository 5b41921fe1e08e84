"""Measures a sweep job by job, into a directory of its own, with tables and plots of what is done."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep.runs.curves import can_plot
from lockstep.runs.directory import RunDirectory, writing
from lockstep.scaling.ledger import PLOTS, WORK, Ledger, unfinished, write_tables
from lockstep.scaling.measure import Outcome, Progress, measure
from lockstep.scaling.plan import Job, Plan
from lockstep.scaling.plot import write_plots
from lockstep.scaling.summarize import Row, run_row, summary_rows


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
