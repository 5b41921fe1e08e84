"""Sends metrics, config and videos to Trackio: a local dashboard (``trackio show``), or the Space in its variables."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio
from trackio import utils
from trackio.context_vars import current_run
from trackio.run import Run

from lockstep.core.files import quoted
from lockstep.runs.trackers.service import TrackedRun, Tracker, flattened, metrics_of

SERVICE = "trackio"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Environment variables that send runs to a server."""


class TrackioTracker(Tracker):
    """Logs to one Trackio run, in ``TRACKIO_DIR`` or at its server; a resumed run keeps its id if Trackio knows it."""

    def __init__(self, run: TrackedRun) -> None:
        self._until = run.logged_until(SERVICE)
        # Trackio doesn't know a run before its first record.
        known = run.remembered(SERVICE) if self._until >= 0 else {}
        try:
            self._run = _init(run, known.get("project", run.project), known.get("name", run.name), bool(known))
        except ValueError as error:
            if not known or any(os.environ.get(name) for name in REMOTE) or "does not exist" not in str(error):
                raise  # a server that doesn't answer gives this error for every run
            run.begins_anew(SERVICE, str(utils.TRACKIO_DIR), known["id"])
            self._until, known = -1, {}
            self._run = _init(run, run.project, run.name, resume=False)
        if known and self._run.id != known["id"]:
            current_run.set(None)
            raise ValueError(f"project {known['project']} has a newer run {known['name']}; this one can't go on there")
        if known:  # the run's own record may end earlier if it came from a mirror, or if the power failed
            self._until = max(self._until, getattr(self._run, "_next_step", 0) - 1)
        run.remember(SERVICE, {"id": self._run.id, "project": self._run.project, "name": self._run.name})
        self.place = f"trackio show --project {quoted(self._run.project)}"

    def log(self, record: Mapping[str, Any]) -> None:
        """Logs the record's numbers at its ``global_step``."""
        step = int(record["global_step"])
        if step > self._until:
            self._run.log(metrics_of(record), step=step)

    def text(self, tag: str, text: str) -> None:
        """Logs markdown at step 0."""
        if self._until < 0:
            self._run.log({tag: trackio.Markdown(text)}, step=0)

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Logs an mp4 file, of which Trackio keeps a copy."""
        if global_step > self._until:
            self._run.log({tag: trackio.Video(str(path))}, step=global_step)

    def close(self) -> None:
        """Writes what is queued, and finishes the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if current_run.get() is self._run:
            current_run.set(None)  # otherwise Trackio finishes it again at exit, with a message


def _init(run: TrackedRun, project: str, name: str, resume: bool) -> Run:
    log = run.config.log
    with contextlib.redirect_stdout(io.StringIO()):  # the terminal belongs to the progress display
        return trackio.init(
            project=project,
            name=name,
            group=log.group,
            config=flattened(run.settings) | {"tags": list(log.tags or ())},
            resume="must" if resume else "never",
            embed=False,
        )
