"""Reads a run's files even if some are missing or damaged: a page about the rest is better than none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.keys import validate
from lockstep.config.run import Config
from lockstep.launch.resume import edited_settings
from lockstep.runs.checkpoint import STATE
from lockstep.runs.curves import counted, is_current
from lockstep.runs.directory import CHECKPOINTS, CONFIG, LOCK, SUMMARY, TIMING, VERIFY
from lockstep.runs.finding import checkpoints_of, seeds_in
from lockstep.runs.links import link_in_words
from lockstep.runs.listing import LARGEST, MOST_BYTES, Row, UnreadableError, config_of, printable, read_object, row_of
from lockstep.runs.lock import is_held
from lockstep.runs.plot import Records, records_of
from lockstep.runs.trackers import METRICS_JSONL

MOST_WHOLE = 2**63
OF_A_RESULT = (
    *("status", "iteration", "global_step", "num_seeds", "final_return", "final_return_interval", "seeds"),
    *("wall_time", "steps_per_second"),
)
"""Keys of a group's summary that no longer hold once one of its seeds was trained further by itself."""
RESPELT = ("grpo.reference",)
"""Settings with several spellings; telling them apart takes more than the run's files."""


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run say.

    Attributes:
        name: the run's name on the page.
        row: the run's row in ``lockstep list``.
        config: ``config.json``; empty if it can't be read.
        summary: ``summary.json``; empty if it can't be read, or while the run goes on; without :data:`OF_A_RESULT` if
            a seed was trained further since.
        records: the records of ``metrics.jsonl``, one list for each of ``seeds``.
        seeds: the files of each seed, if there are several; seeds that are links are left out.
        counted: those of ``seeds`` that the result is of: failed ones aren't.
        timing: rows of ``timing.jsonl``.
        verification: ``verify.json``; None if there is none.
        environment: the environment's description in the newest checkpoint, of several seeds the first that has one;
            empty if there is none.
        edited: the first setting that was edited in ``config.json`` since the newest checkpoint was written, in words;
            None if there is none.
        problems: what couldn't be read or was edited, one line each.
    """

    name: str
    path: Path
    row: Row
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[Records]
    seeds: list[RunFiles] = field(default_factory=list)
    counted: list[RunFiles] = field(default_factory=list)
    timing: Records = field(default_factory=list)
    verification: dict[str, Any] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    edited: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def first(self) -> RunFiles:
        """The run itself; of several seeds, the first counted one that has records, which stands for the others."""
        return next((seed for seed in self.counted if any(seed.records)), next(iter(self.seeds), self))


def read_run(path: Path, name: str, is_seed: bool = False) -> RunFiles:
    """Reads a run; if it has several seeds, each of them too, unless it ``is_seed`` itself."""
    row, problems = row_of(path, name), []
    found = [] if is_seed else seeds_in(path)
    links = [entry for entry in (*found, path / CHECKPOINTS) if entry.is_symlink()]  # they may lead to others' runs
    problems += [printable(link_in_words(link)) for link in links]
    seeds = [read_run(seed, seed.name, is_seed=True) for seed in found if seed not in links]
    try:
        config = config_of(path)
    except (OSError, UnreadableError) as error:
        config = {}
        problems.append(printable(str(error)))
    edited = _edited(path, config)
    if edited is not None:
        problems.append(edited)
    summary = {} if is_held(path / LOCK) else _object(path / SUMMARY, problems) or {}
    ends = {seed.path: seed.summary for seed in seeds}
    paths = counted(summary, ends)
    if not is_current(summary, ends):
        summary = {key: value for key, value in summary.items() if key not in OF_A_RESULT}
    own = [] if seeds else _records(path, problems)
    return RunFiles(
        printable(name),
        path,
        row,
        config,
        summary,
        [records for seed in seeds for records in seed.records] if seeds else [own],
        seeds,
        [seed for seed in seeds if seed.path in paths],
        _rows(path / TIMING, problems),
        _object(path / VERIFY, problems),
        next((seed.environment for seed in seeds if seed.environment), _environment(path)),
        edited,
        [*problems, *(f"{seed.name}: {problem}" for seed in seeds for problem in seed.problems)],
    )


def _edited(path: Path, config: dict[str, Any]) -> str | None:
    """Says which setting was edited since the newest checkpoint was written; None also if a config is invalid."""
    if (path / CHECKPOINTS).is_symlink():
        return None
    try:
        stored = validate(Config, config, str(path / CONFIG), stored=True)
        found = (words for key, _, _, words in edited_settings(path, stored) if key not in RESPELT)
        return next(map(printable, found), None)
    except ValueError:
        return None


def _object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(unreadable(path, error))
    except UnreadableError as error:
        problems.append(printable(str(error)))
    return None


def unreadable(path: Path, error: OSError) -> str:
    """Says in one line that a file can't be read, as the run's row does."""
    return printable(f"{error.filename or path} can't be read: {error.strerror or error}")


def _records(path: Path, problems: list[str]) -> Records:
    """Reads the metrics of a run; none if the file is missing, a link or damaged."""
    file = path / METRICS_JSONL
    if file.is_symlink() or not file.is_file():
        problems.append(printable(link_in_words(file) if file.is_symlink() else f"{path} has no {METRICS_JSONL}"))
        return []
    try:
        return [_drawable(record) for record in records_of(path)]
    except OSError as error:
        problems.append(unreadable(file, error))
    except ValueError as error:
        problems.append(printable(str(error)).removeprefix("plot: "))
    return []


def _drawable(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record without whole numbers of 2⁶³ or more in magnitude, and others that :func:`number` leaves out."""

    def is_number(value: int | float) -> bool:
        return abs(value) < (MOST_WHOLE if isinstance(value, int) else LARGEST)

    return {key: value for key, value in record.items() if not isinstance(value, int | float) or is_number(value)}


def _rows(path: Path, problems: list[str]) -> Records:
    """Reads the objects of a JSON Lines file; skips lines that aren't objects."""
    try:
        if path.is_symlink() or not path.is_file():
            return []
        if path.stat().st_size > MOST_BYTES:
            problems.append(f"{printable(str(path))} is left out: it is larger than {MOST_BYTES:,} bytes")
            return []
        lines = path.read_bytes().splitlines()
    except OSError as error:
        problems.append(unreadable(path, error))
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a line that was written only in part
        if isinstance(row, dict):
            found.append(row)
    return found


def _environment(path: Path) -> dict[str, Any]:
    """Reads the environment's description from the newest checkpoint."""
    for checkpoint in checkpoints_of(path)[:1]:
        found = (_object(checkpoint / STATE, []) or {}).get("environment")
        return found if isinstance(found, dict) else {}
    return {}


# --- values of files that may hold anything ---------------------------------------------------------------------------


def objects(found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the objects in the list of a key; empty if there is no list."""
    value = found.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
