"""Describes each run in a directory as a row, from its files alone: nothing that a run names is imported."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import one_line
from lockstep.runs.checkpoint import STATE, manifest_of, step_of
from lockstep.runs.curves import METRIC, counted, interquartile_mean, is_current
from lockstep.runs.directory import CONFIG, LOCK, SUMMARY
from lockstep.runs.finding import checkpoints_of, is_run, seeds_in, with_name
from lockstep.runs.links import link_in_words
from lockstep.runs.lock import is_held
from lockstep.runs.trackers import METRICS_JSONL

RUNNING, NO_SUMMARY, DAMAGED = "running", "ended without a summary", "damaged"
MOST_BYTES = 1 << 26
"""Largest file that is read whole; no run writes larger ones."""
LAST_BYTES = 1 << 20
"""Bytes at the end of ``metrics.jsonl`` in which the last record is sought."""
LARGEST = 1e300
"""Numbers in files count below this."""


@dataclass(frozen=True)
class Row:
    """One run's row; None where something is unknown.

    Attributes:
        name: that the table shows.
        path: of its directory.
        environment: its id.
        seed: the run's; for a group, the first.
        seeds: their number.
        steps: global steps of each seed; of seeds that differ, the lowest.
        status: as in ``summary.json``, or :data:`RUNNING`, :data:`NO_SUMMARY`, :data:`DAMAGED`.
        final_return: mean of the last hundred episodes; for several seeds, the interquartile mean.
        ranks: their number.
        started: ISO 8601 in UTC.
        size: of all its files, in bytes.
        problem: what is wrong with its files, in one line.
    """

    name: str
    path: str
    environment: str | None = None
    seed: int | None = None
    seeds: int = 1
    steps: int | None = None
    status: str = DAMAGED
    final_return: float | None = None
    ranks: int | None = None
    started: str | None = None
    size: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the row under the names that ``--sort`` and the table use."""
        named = {"return" if name == "final_return" else name: value for name, value in vars(self).items()}
        return {name: value for name, value in named.items() if name != "problem" or value is not None}


def runs_in(places: Sequence[Path]) -> list[Path]:
    """Finds the run directories in ``places``; a place may itself be one. Skips everything else.

    Raises:
        OSError: a directory can't be read.
    """
    found: dict[Path, None] = {}
    for place in places:
        inside = [with_name(place)] if _looks_like_run(place) else sorted(place.iterdir()) if place.is_dir() else []
        found |= dict.fromkeys(path for path in inside if _looks_like_run(path))
    return list(found)


def _looks_like_run(path: Path) -> bool:
    try:
        if not path.is_dir():
            return False
        config = path / CONFIG
        return config.is_symlink() or (config.exists() and not config.is_file()) or is_run(path)
    except OSError:
        return False


def row_of(path: Path, name: str) -> Row:
    """Reads one run; if something is wrong with its files, the row's ``problem`` says so."""
    try:
        return _read(path, name)
    except OSError as error:
        return Row(name, str(path), problem=f"{error.filename or path} can't be read: {error.strerror or error}")
    except UnreadableError as error:
        return Row(name, str(path), size=size_of(path), problem=str(error))


class UnreadableError(Exception):
    """Raised if a file of a run doesn't hold what it should; the message is one line."""


def _read(path: Path, name: str) -> Row:
    config, summary, problem = config_of(path), {}, None
    held = is_held(path / LOCK)
    try:
        summary = {} if held else read_object(path / SUMMARY)
    except FileNotFoundError:
        pass
    except UnreadableError as error:
        problem = str(error)
    found = seeds_in(path)
    seeds, links = ended_seeds(found), [seed for seed in found if seed.is_symlink()]
    status = _text(summary, "status")
    if not seeds or (summary and is_current(summary, seeds)):
        known = _known(path, summary)
    else:
        known = _together([_known(seed, seeds[seed]) for seed in counted(summary, seeds)])
        ends = [end for own in seeds.values() if (end := _text(own, "status")) is not None]
        status = status_of(ends, len(found)) if summary or len(ends) == len(found) else None
    return Row(
        name,
        str(path),
        environment=_text(config, "env", "id"),
        seed=_whole(config, "seed"),
        seeds=len(found) or 1,
        status=RUNNING if held else status or NO_SUMMARY,
        size=size_of(path),
        problem=link_in_words(links[0]) if links and problem is None else problem,
        **{**known, "started": known["started"] or _written(path / CONFIG)},
    )


def config_of(path: Path) -> dict[str, Any]:
    """Reads ``config.json``, or, if it is missing or damaged, the copy in the newest checkpoint.

    Raises:
        UnreadableError: neither can be read.
    """
    try:
        return read_object(path / CONFIG)
    except (OSError, UnreadableError) as error:
        manifests = filter(None, map(manifest_of, checkpoints_of(path)))
        kept = next(manifests, {}).get("config")
        if isinstance(kept, dict):
            return kept
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"{path / CONFIG} can't be read: {error.strerror or error}") from None


def _known(path: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a run's steps, return, ranks and date: from its summary, or from its last metrics and newest checkpoint."""
    if summary:
        return {
            "steps": _whole(summary, "global_step"),
            "final_return": number(summary, "final_return"),
            "ranks": _whole(summary, "world_size"),
            "started": _date(summary),
        }
    last = last_record(path / METRICS_JSONL)
    newest = next((each for each in checkpoints_of(path) if manifest_of(each) is not None), None)
    steps = _whole(last, "global_step")
    return {
        "steps": steps if steps is not None or newest is None else step_of(newest),
        "final_return": number(last, METRIC),
        "ranks": _whole(last, "time/world_size"),
        "started": None if newest is None else _date(object_if_any(newest / STATE)),
    }


def _together(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines what is known of several seeds: the lowest steps, the earliest date, the first's ranks.

    Their return is the interquartile mean of the seeds' returns, None if one of them is unknown. A seed that hasn't
    begun has taken no steps, if others have.
    """
    returns = [known["final_return"] for known in each]
    middle = None if None in returns else float(interquartile_mean(np.array(returns)))
    dates = [known["started"] for known in each if known["started"] is not None]
    taken = [known["steps"] for known in each]
    steps = None if taken == [None] * len(taken) else min(steps or 0 for steps in taken)
    return each[0] | {"steps": steps, "final_return": middle, "started": min(dates, default=None)}


# --- groups ---------------------------------------------------------------------------------------------------------

FINISHED = "finished"


def ended_seeds(seeds: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Reads the summaries of a group's runs, but of links; a run that goes on or was killed has an empty one."""
    own = [seed for seed in seeds if not seed.is_symlink()]
    return {seed: {} if is_held(seed / LOCK) else object_if_any(seed / SUMMARY) for seed in own}


def status_of(seeds: Sequence[str], count: int) -> str:
    """Returns the status of a group of ``count`` runs from the statuses known: finished if all ``count`` are."""
    others = [status for status in seeds if status != FINISHED]
    if others:
        return others[0]
    return FINISHED if len(seeds) == count else f"{len(seeds)} of {count} seeds finished"


# --- files ----------------------------------------------------------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a plain file.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it isn't a plain file, is too large, or doesn't hold a JSON object.
    """
    if path.is_symlink():
        raise UnreadableError(link_in_words(path))
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise UnreadableError(f"{path} is no file")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UnreadableError(f"{path} is larger than any that a run writes")
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise UnreadableError(f"{path} is damaged: it holds no object")
    return found


def object_if_any(path: Path) -> dict[str, Any]:
    """Reads a JSON object as :func:`read_object` does; an empty one if that fails."""
    try:
        return read_object(path)
    except (OSError, UnreadableError):
        return {}


def last_record(path: Path) -> dict[str, Any]:
    """Reads the last whole record of a metrics file; an empty one if there is none."""
    if path.is_symlink() or not path.is_file():
        return {}
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - LAST_BYTES)
        file.seek(start)
        lines = file.read(LAST_BYTES).splitlines()
    for line in reversed(lines[1:] if start else lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn, or being written
        if isinstance(record, dict):
            return record
    return {}


def size_of(path: Path) -> int:
    """Adds up the bytes of all files below a directory; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # removed meanwhile by a run that is being written
    return total


def _written(path: Path) -> str | None:
    """Returns when a file was last written; this stands for the start of a run that doesn't record it."""
    try:
        then = datetime.datetime.fromtimestamp(path.lstat().st_mtime, datetime.UTC)
    except (OSError, OverflowError, ValueError):
        return None
    return then.isoformat(timespec="seconds")


# --- values of files that may hold anything ---------------------------------------------------------------------------


def _text(found: Any, *keys: str) -> str | None:
    """Returns the text at nested keys, without terminal control characters; None if there is none."""
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return printable(found) if isinstance(found, str) else None


def printable(text: str) -> str:
    """Replaces line ends and terminal control characters in a text by ``?``."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _whole(found: Mapping[str, Any], key: str) -> int | None:
    value = found.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(found: Mapping[str, Any], key: str) -> float | None:
    """Returns the finite number of a key, or None."""
    value = found.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
        return None
    return float(value)


def _date(found: Mapping[str, Any]) -> str | None:
    """Returns the date ``started`` in UTC; None if there is none."""
    try:
        then = datetime.datetime.fromisoformat(found.get("started") or "")
        return then.astimezone(datetime.UTC).isoformat(timespec="seconds")
    except (ValueError, TypeError, OverflowError):
        return None


# --- order ----------------------------------------------------------------------------------------------------------

SORTS = ("return", "steps", "date", "name", "size")


def ordered(rows: Iterable[Row], by: str) -> list[Row]:
    """Sorts rows: names ascending, everything else descending (newest first); unknown values come last."""
    rows = sorted(rows, key=lambda row: row.name)
    if by == "name":
        return rows
    field = {"return": "final_return", "date": "started"}.get(by, by)
    known = [row for row in rows if getattr(row, field) is not None]
    return sorted(known, key=lambda row: getattr(row, field), reverse=True) + [row for row in rows if row not in known]
