"""What two runs of one config must share, in what they say and in what lies in their files."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.fingerprint import sha256_of
from lockstep.runs.checkpoint import CheckpointError, checkpoints_in, read_checkpoint
from lockstep.runs.directory import CHECKPOINTS, CONFIG, FINGERPRINTS, SUMMARY
from lockstep.runs.trackers import METRICS_CSV, METRICS_JSONL

Reference = tuple[dict[str, Any], set[str]]
"""What comes of an undisturbed run, and what lies in its directory."""

TIMES = "time/"
"""Begins the names of what no two runs share: times, and the number of ranks."""
IN_SUMMARY = ("params_sha256", "state_sha256", "final_return", "episodes", "best_evaluation", "last_evaluation")
BEST = "best_checkpoint"
POLICY_FILE, ARRAYS = "policy.safetensors", "arrays of the newest checkpoint"
ROWS = "rows"
"""Those of ``metrics.jsonl``."""


def result_of(run: Path) -> dict[str, Any]:
    """What two runs of the same config must share: by their summary, and by their files.

    The best checkpoint is among it where evaluations choose it and it is kept: else it depends on which there are, and
    a session may have intervals of its own. Rows come without their times.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or there is none.
        OSError: a file can't be read; ``ValueError`` and ``KeyError``: it holds something else.
    """
    summary, config = (json.loads((run / name).read_text()) for name in (SUMMARY, CONFIG))
    newest = next(iter(checkpoints_in(run / CHECKPOINTS)), None)
    if newest is None:
        raise CheckpointError(f"{run / CHECKPOINTS} holds no checkpoint")
    found = {name: summary.get(name) for name in IN_SUMMARY}
    if config["eval"]["interval"] and config["checkpoint"]["keep_best"]:
        found[BEST] = summary.get(BEST)
    return {
        **found,
        ARRAYS: sha256_of(read_checkpoint(newest).arrays),
        POLICY_FILE: hashlib.sha256((newest / POLICY_FILE).read_bytes()).hexdigest(),
        ROWS: [_timeless(json.loads(line)) for line in _lines(run / METRICS_JSONL)],
        METRICS_CSV: _table(run / METRICS_CSV),
        FINGERPRINTS: [json.loads(line) for line in _lines(run / FINGERPRINTS)],
    }


def _lines(path: Path) -> list[str]:
    """The lines of a file, none where it isn't written."""
    return path.read_text().splitlines() if path.exists() else []


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


def _table(path: Path) -> list[list[str]]:
    """The rows of a table, its head first, without the columns of times."""
    rows = list(csv.reader(_lines(path)))
    kept = [n for n, name in enumerate(rows[0] if rows else []) if not name.startswith(TIMES)]
    return [[row[n] for n in kept] for row in rows]


def differences(run: Path, reference: Reference, temporary: Path) -> list[str]:
    """What tells a finished run from the undisturbed one: what it says, its files, and what it has left."""
    expected, names = reference
    try:
        found = result_of(run)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return [f"what came of it can't be read: {type(error).__name__}: {error}"]
    problems = []
    if found[ARRAYS] != found["state_sha256"]:
        problems.append(f"{ARRAYS} are {found[ARRAYS][:16]}…, and state_sha256 says {found['state_sha256'][:16]}…")
    for name, value in expected.items():
        problems += _difference(name, found.get(name), value)
    files = {path.name for path in run.iterdir()}
    problems += [f"left in the run directory: {name}" for name in sorted(files - names)]
    problems += [f"missing in the run directory: {name}" for name in sorted(names - files)]
    problems += [f"left among the checkpoints: {path.name}" for path in (run / CHECKPOINTS).glob(".*")]
    problems += [f"left in TMPDIR: {path.name}" for path in temporary.glob("lockstep*")]
    return problems


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of what two runs don't share."""
    return [name for name, value in expected.items() if not _same(found.get(name), value)]


def _same(found: object, expected: object) -> bool:
    """By what JSON says of them: NaN is NaN."""
    return json.dumps(found) == json.dumps(expected)


def _difference(name: str, found: Any, expected: Any) -> list[str]:
    if _same(found, expected):
        return []
    if isinstance(expected, list) and isinstance(found, list):
        return [f"{METRICS_JSONL if name == ROWS else name}: {_of_rows(found, expected)}"]
    return [f"{name}: {_short(found)} instead of {_short(expected)}"]


def _of_rows(found: Sequence[Any], expected: Sequence[Any]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} rows instead of {len(expected)}"
    others = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if not _same(a, b)]
    return f"{len(others)} rows differ, the first is number {others[0] + 1}"


def _short(value: object) -> str:
    return f"{value[:16]}…" if isinstance(value, str) and len(value) == 64 else json.dumps(value)
