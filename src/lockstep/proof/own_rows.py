"""Compares what was trained to verify a run with what the run itself has left: metrics, fingerprints, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.run import Config
from lockstep.core.files import same_json
from lockstep.core.fingerprint import array_digest, sha256_of
from lockstep.core.machine import MACHINE_FACTS
from lockstep.proof.verify import Comparison, Trace, fingerprints_in, leading_rows, metrics_in
from lockstep.runs.checkpoint import checkpoints_in, manifest_of, problem_with, read_checkpoint, step_of
from lockstep.runs.directory import CHECKPOINTS, FINGERPRINTS, SUMMARY
from lockstep.runs.listing import object_if_any
from lockstep.runs.trackers import METRICS_JSONL

COMPARED = ("rollout/", "train/")
"""Metrics that follow from the config; evaluations follow settings that may change, and callbacks add others."""
CHANGED = (
    "with the same config, versions and machine; the environment, the network or other code has changed since, or the "
    "run's files have"
)


def check_own_rows(run: Path, results: Sequence[Comparison], config: Config) -> None:
    """Compares the first world size that was trained with a run's first iterations: metrics, fingerprints, checkpoints.

    A run that ends with others on the same machine, with the same versions and config, was trained with another
    environment or network, which the config only names, or its files were changed. Machine and versions are those of
    the run's first steps, and what a resume added with others isn't compared. Nothing is compared if one of these isn't
    known to be the same, if sums depend on the number of ranks, or if environments began anew. If the run was the
    reference of the results, its metrics and fingerprints were compared already.

    Raises:
        ValueError: one line, if something differs, or a row of ``metrics.jsonl`` before the last is damaged.
    """
    check_newest_checkpoint(run)
    traces = [result.trace for result in results]
    trace = next((each for each in traces if each.recorded is None and each.error is None), None)
    most = 0 if trace is None else _comparable(run, trace, config)
    if trace is None or not most:
        return
    if not any(each.recorded is not None and each.recorded.resolve() == run.resolve() for each in traces):
        _check_metrics(run, trace, most)
        _check_fingerprints(run, trace, most)
    _check_checkpoints(run, trace, most, config)


def check_newest_checkpoint(run: Path) -> None:
    """Raises a one-line ``ValueError`` if a run's newest checkpoint is damaged, or isn't the one of its summary."""
    newest = next((p for p in checkpoints_in(run / CHECKPOINTS) if manifest_of(p) is not None), None)
    if newest is None:
        return
    if (problem := problem_with(newest, required=())) is not None:
        raise ValueError(problem)
    summary = object_if_any(run / SUMMARY)
    said = summary.get("state_sha256")
    if isinstance(said, str) and summary.get("global_step") == step_of(newest):
        found = sha256_of(read_checkpoint(newest).arrays)
        if found != said:
            raise ValueError(f"{newest} holds another state (sha256 {found[:12]}…) than {SUMMARY} names ({said[:12]}…)")


def _comparable(run: Path, trace: Trace, config: Config) -> int:
    """Returns how many of a run's first iterations must be those of a trace; 0 if other things may explain others."""
    summary = object_if_any(run / SUMMARY)
    first, until = summary.get("first_machine"), summary.get("first_machine_until")
    names = [name for name in MACHINE_FACTS if name in trace.facts]
    if config.reduction != "exact" or not isinstance(first, dict) or "lockstep" not in names:
        return 0
    if any(first.get(name) != trace.facts[name] for name in names) or summary.get("restarted_environments"):
        return 0
    most = len(trace.metrics)
    return min(most, until // config.steps_per_iteration) if isinstance(until, int) else most


def _check_metrics(run: Path, trace: Trace, most: int) -> None:
    rows = metrics_in(run)
    for number, (row, metrics) in enumerate(zip(rows[: min(most, leading_rows(rows))], trace.metrics, strict=False), 1):
        for key in (key for key in row if key.startswith(COMPARED) and key in metrics):
            if not same_json(row[key], metrics[key]):
                there = f"iteration {number}: {key} is {row[key]} in {run / METRICS_JSONL}"
                raise ValueError(f"{there} and was {metrics[key]} here, {CHANGED}")


def _check_fingerprints(run: Path, trace: Trace, most: int) -> None:
    rows = fingerprints_in(run)
    pairs = zip(rows[: min(most, leading_rows(rows))], trace.tensors, strict=False)
    for number, (row, tensors) in enumerate(pairs, 1):
        _check_tensors(f"iteration {number} of {run / FINGERPRINTS}", row, tensors)


def _check_checkpoints(run: Path, trace: Trace, most: int, config: Config) -> None:
    for path in checkpoints_in(run / CHECKPOINTS):
        iteration, beside = divmod(step_of(path) or 0, config.steps_per_iteration)
        if beside or not 1 <= iteration <= min(most, len(trace.tensors)) or manifest_of(path) is None:
            continue
        digests = {name: array_digest(array).hex() for name, array in read_checkpoint(path).arrays.items()}
        _check_tensors(str(path), digests, trace.tensors[iteration - 1])


def _check_tensors(where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    names = [name for name in ours if name != "iteration"]
    unlike = [name for name in names if not same_json(theirs.get(name), ours[name])]
    if unlike:
        what = f"{len(unlike)} of {len(names)} tensors, first {unlike[0]}"
        raise ValueError(f"{where} has other bytes than were trained here, in {what}, {CHANGED}")
