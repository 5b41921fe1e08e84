"""Defines the interface of trackers, and what a tracker knows of its run, whose ids at services the directory keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.core.files import replace_text
from lockstep.core.process import say
from lockstep.runs.trackers.files import PlainRecord

TRACKERS_JSON = "trackers.json"
DEFAULT_PROJECT = "lockstep"


class Ending(Enum):
    """How a session of a run ended."""

    FINISHED = auto()
    STOPPED = auto()
    """By a signal; it may be resumed later."""
    FAILED = auto()


class Tracker:
    """The interface of trackers; this one does nothing, for all ranks except the one that writes.

    Attributes:
        place: where to look at the tracker, in one line, if that is outside the run directory.
        writes_files: whether it writes files of the run, and takes several records at once.
        ending: how the run ended, which ``close`` tells a service; failed unless set otherwise.
    """

    place: str | None = None
    writes_files = False
    ending = Ending.FAILED

    def log(self, record: Mapping[str, Any]) -> None:
        """Takes one metrics record."""

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes metrics records, in order; trackers that write files write them all at once."""
        for record in records:
            self.log(record)

    def text(self, tag: str, text: str) -> None:
        """Stores markdown, such as the run's config, under ``tag``."""

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Stores an mp4 file under ``tag`` at ``global_step``, before that step's record is logged."""

    def places(self) -> list[str]:
        """Returns lines that say where to look at trackers."""
        return []

    def close(self) -> None:
        """Finishes; nothing is logged afterwards."""


def close_all(trackers: dict[str, Tracker]) -> None:
    """Closes the trackers of a run that fails, ignores their errors, and empties the dict."""
    while trackers:
        with contextlib.suppress(Exception):
            trackers.popitem()[1].close()


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it: named after its directory.

    ``trackers.json`` in the directory holds the run's ids at each service, under which a resumed run continues, and the
    last step that was sent there.
    """

    directory: Path
    config: Config

    @property
    def group(self) -> Path | None:
        """The directory of the group of seeds that the run belongs to; None if it belongs to none."""
        path = self.directory.resolve()
        one_of_several = path.name.startswith("seed_") and (path.parent / "config.json").is_file()
        return path.parent if one_of_several else None

    @property
    def name(self) -> str:
        """The run's name; for a seed of a group, ``<group>-seed_<n>``."""
        path, group = self.directory.resolve(), self.group
        return path.name if group is None else f"{group.name}-{path.name}"

    @property
    def settings(self) -> dict[str, Any]:
        """The run's config as JSON, without secrets, because others may read it."""
        return shown_value(self.config.model_dump(mode="json"))

    @property
    def project(self) -> str:
        """The project (MLflow: experiment) that the run belongs to."""
        return self.config.log.project or DEFAULT_PROJECT

    def remembered(self, service: str) -> dict[str, Any]:
        """Reads what :meth:`remember` stored for a service; empty if the run is new to it."""
        return dict(_read(self.directory).get(service, {}))

    def remember(self, service: str, facts: Mapping[str, Any]) -> None:
        """Stores this run's ids at a service."""
        memory = _read(self.directory)
        memory[service] = memory.get(service, {}) | dict(facts)
        _write(self.directory, memory)

    def begins_anew(self, service: str, where: str, known: str) -> None:
        """Warns that a service doesn't know the run any more, and forgets what it was sent."""
        say(
            f"lockstep: warning: tracker {service}: {where} doesn't know the run {known}, which this one had there "
            "before it was moved; a new one begins, with the steps from here on"
        )
        self.remember(service, {"logged_until": -1})

    def logged_until(self, service: str) -> int:
        """Returns the last global step that the service was sent before a resume, or -1.

        Services can't take records back. A resumed run repeats the steps after its checkpoint with the same values, so
        that what was sent isn't sent again.
        """
        return int(self.remembered(service).get("logged_until", -1))


def note_logged(directory: Path, last_global_step: int | None) -> None:
    """Notes for every service of a run the last step it was sent, before the run's own record is cut."""
    memory = _read(directory)
    if last_global_step is None or not memory:
        return
    for facts in memory.values():
        facts["logged_until"] = max(facts.get("logged_until", -1), last_global_step)
    _write(directory, memory)


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys; lists and mappings called ``kwargs`` stay values."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and key != "kwargs":
            out |= flattened(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def metrics_of(record: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns the finite numbers of a metrics record."""
    return {key: value for key, value in PlainRecord.of(record).items() if isinstance(value, (int, float))}


def _read(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / TRACKERS_JSON
    if not path.is_file():
        return {}
    try:
        memory = json.loads(path.read_text())
    except ValueError:
        memory = None
    if not isinstance(memory, dict) or not all(isinstance(facts, dict) for facts in memory.values()):
        raise ValueError(f"{path} is damaged; remove it, and the services start this run anew")
    return memory


def _write(directory: Path, memory: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / TRACKERS_JSON, json.dumps(memory, indent=2) + "\n")
