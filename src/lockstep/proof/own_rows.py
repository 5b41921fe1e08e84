"""Compares what was trained to verify a run with the run's own first rows of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.run import Config
from lockstep.core.files import same_json
from lockstep.core.machine import MACHINE_FACTS
from lockstep.proof.verify import Comparison, leading_rows, metrics_in
from lockstep.runs.directory import SUMMARY
from lockstep.runs.listing import object_if_any
from lockstep.runs.trackers import METRICS_JSONL

COMPARED = ("rollout/", "train/")
"""Metrics that follow from the config; evaluations follow settings that may change, and callbacks add others."""


def check_own_rows(run: Path, results: Sequence[Comparison], config: Config) -> None:
    """Compares the metrics of the first world size that was trained with those of a run's first iterations.

    A run that ends with other metrics on the same machine, with the same versions and config, was trained with another
    environment or network, which the config only names. Machine and versions are those of the run's first steps, and
    what a resume added with others isn't compared. Nothing is compared if one of these isn't known to be the same, if
    sums depend on the number of ranks, if environments began anew, or if the run was the reference of the results.

    Raises:
        ValueError: one line, if a metric differs, or a row of ``metrics.jsonl`` before the last is damaged.
    """
    traces = [result.trace for result in results]
    trace = next((each for each in traces if each.recorded is None and each.error is None), None)
    was_reference = any(each.recorded is not None and each.recorded.resolve() == run.resolve() for each in traces)
    if trace is None or was_reference or config.reduction != "exact":
        return
    summary = object_if_any(run / SUMMARY)
    first, until = summary.get("first_machine"), summary.get("first_machine_until")
    names = [name for name in MACHINE_FACTS if name in trace.facts]
    if not isinstance(first, dict) or "lockstep" not in names:
        return
    if any(first.get(name) != trace.facts[name] for name in names):
        return
    if summary.get("restarted_environments"):
        return
    rows = metrics_in(run)
    count = leading_rows(rows)
    if isinstance(until, int):
        count = min(count, until // config.steps_per_iteration)
    for number, (row, metrics) in enumerate(zip(rows[:count], trace.metrics, strict=False), 1):
        for key in (key for key in row if key.startswith(COMPARED) and key in metrics):
            if not same_json(row[key], metrics[key]):
                there = f"iteration {number}: {key} is {row[key]} in {run / METRICS_JSONL}"
                raise ValueError(
                    f"{there} and was {metrics[key]} here, with the same config, versions and machine; the "
                    "environment, the network or other code has changed since"
                )
