"""Writes the result of verifying a run's config to ``verify.json`` in the run's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config.presets import has_preset, with_version
from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.core.files import replace_text, why_unwritten
from lockstep.core.machine import MACHINE_FACTS
from lockstep.launch.resume import check_unchanged, decisive_differences
from lockstep.proof.lengths import first_length
from lockstep.proof.own_rows import check_own_rows
from lockstep.proof.verify import RUNS, Comparison, last_trained
from lockstep.runs.directory import CHECKPOINTS, CONFIG, VERIFY
from lockstep.runs.finding import check_single, is_run, with_name
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.training.own_loss.fingerprint import difference, fingerprint_in
from lockstep.training.own_loss.recorded import facts_of_loss
from lockstep.training.run_history import utc_date
from lockstep.training.schedules import follows_length


def run_of(target: str) -> Path | None:
    """Finds the run to verify, given by its directory, its ``config.json``, or a name in ``runs`` but no preset's.

    Returns:
        The run's directory; None if ``target`` is a config file or an environment.

    Raises:
        ValueError: one line, if ``target`` is a group with one run per seed.
    """
    target = os.path.expanduser(target)
    path = Path(target)
    inside = Path(RUNS, target)
    for place in (path,) if path.exists() or "/" in target or has_preset(with_version(target)) else (inside,):
        if is_run(place):
            check_single(place)
    if path.is_dir() and _has_begun(path):
        return with_name(path)
    if path.name == CONFIG and _has_begun(path.parent):
        return with_name(path.parent)
    if path.exists() or "/" in target or not _has_begun(inside) or has_preset(with_version(target)):
        return None
    return inside


def _has_begun(path: Path) -> bool:
    """Returns whether a directory is a run's, rather than one that only holds a file of that name."""
    return is_run(path) and ((path / METRICS_JSONL).is_file() or (path / CHECKPOINTS).is_dir())


def to_json(results: Sequence[Comparison], config: Config, iterations: int) -> dict[str, Any]:
    """Returns the content of ``verify.json``: date, config, machine, and the result of each world size."""
    facts = last_trained(results).facts
    return {
        "verified": utc_date(),
        "equal": all(result.equal for result in results),
        "iterations": iterations,
        "reduction": config.reduction,
        "world_sizes": [
            {
                "world_size": result.trace.world_size,
                "processes": result.trace.processes,
                "label": result.trace.label,
                "tensors": max(0, len(result.trace.tensors[0]) - 1) if result.trace.tensors else 0,
                "equal": result.equal,
                "difference": result.difference,
                "not_compared": list(result.not_compared),
                "recorded": None if result.trace.recorded is None else str(result.trace.recorded),
            }
            for result in results
        ],
        "machine": {name: facts[name] for name in MACHINE_FACTS if name in facts},
        "config": config.model_dump(mode="json"),
    }


def keep(run: Path, results: Sequence[Comparison], config: Config, iterations: int) -> Path:
    """Writes ``verify.json`` into a run's directory, replacing an earlier one, and returns its path.

    Raises:
        ValueError: one line, if a world size failed, the config or the loss isn't the run's, ``config.json`` was edited
            since the newest checkpoint was written, what was trained has other metrics than the run's first
            iterations, or the file can't be written.
    """
    if failed := [result.trace.label for result in results if result.trace.failed]:
        raise ValueError(f"world size {', '.join(failed)} failed, which says nothing of its bytes")
    stored = stored_config(run, warn=False)
    check_unchanged(run, stored)
    for key, theirs, ours in decisive_differences(stored, config, run):
        theirs, ours = shown_value(theirs, key), shown_value(ours, key)
        raise ValueError(f"{key} is {theirs} in {run} and was {ours} here")
    config = config.model_copy(update={"grpo": stored.grpo})  # the run's own spelling, with which the report compares
    if follows_length(config) and (length := first_length(run, stored, iterations)) != config.total_steps:
        raise ValueError(
            f"total_steps was {length} in these iterations of {run} and {config.total_steps} here, and schedules fall "
            "by it"
        )
    theirs, ours = fingerprint_in(facts_of_loss(run) or {}), fingerprint_in(last_trained(results).loss)
    if theirs is not None and ours is not None and (found := difference(theirs, ours)) is not None:
        raise ValueError(f"ppo.loss: {config.ppo.loss} isn't what {run} was trained with any more: it {found}")
    check_own_rows(run, results, config)
    try:
        replace_text(run / VERIFY, json.dumps(to_json(results, config, iterations), indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{run / VERIFY} can't be written: {why_unwritten(error)}") from None
    return run / VERIFY
