"""Sends metrics, config and videos to Trackio: a local dashboard (``trackio show``), or a Space of its variables."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio
from trackio.context_vars import current_run

from lockstep.runs.trackers.service import TrackedRun, Tracker, flattened, metrics_of

SERVICE = "trackio"


class TrackioTracker(Tracker):
    """One Trackio run, kept where Trackio keeps them (``TRACKIO_DIR``); a resumed run goes on under the same id."""

    def __init__(self, run: TrackedRun) -> None:
        self._until = run.logged_until(SERVICE)
        # Trackio knows a run from its first record on.
        known = run.remembered(SERVICE) if self._until >= 0 else {}
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal is the progress display's
            self._run = trackio.init(
                project=known.get("project", run.project),
                name=known.get("name", run.name),
                group=run.config.log.group,
                config=flattened(run.config.model_dump(mode="json")) | {"tags": list(run.config.log.tags or ())},
                resume="must" if known else "never",
                embed=False,
            )
        if known and self._run.id != known["id"]:
            current_run.set(None)
            raise ValueError(f"project {known['project']} has a newer run {known['name']}; this one can't go on there")
        run.remember(SERVICE, {"id": self._run.id, "project": self._run.project, "name": self._run.name})
        self.place = f"trackio show --project {self._run.project}"

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the record's numbers at its ``global_step``."""
        step = int(record["global_step"])
        if step > self._until:
            self._run.log(metrics_of(record), step=step)

    def text(self, tag: str, text: str) -> None:
        """Log markdown at step 0."""
        if self._until < 0:
            self._run.log({tag: trackio.Markdown(text)}, step=0)

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Log an mp4 file, of which Trackio keeps a copy."""
        if global_step > self._until:
            self._run.log({tag: trackio.Video(str(path))}, step=global_step)

    def close(self) -> None:
        """Finish the run: what is queued is written first."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if current_run.get() is self._run:
            current_run.set(None)  # or it is finished, and says so, once more at exit
