"""Sends metrics, config and videos to Weights & Biases, online or (``WANDB_MODE=offline``) as files."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.redact import without_secrets
from lockstep.core.files import quoted
from lockstep.runs.trackers.service import Ending, TrackedRun, Tracker, metrics_of

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read on import: no crash reports are sent unasked

import wandb

SERVICE = "wandb"
EXIT_CODES = {Ending.FINISHED: 0, Ending.STOPPED: 255, Ending.FAILED: 1}
"""Tell W&B how a run ended; 255 is its own code for a run that Ctrl-C ends."""


FINISH_SECONDS = 300.0


def _settings() -> wandb.Settings:
    """Returns W&B's settings: the terminal belongs to the progress display, and the end doesn't wait for ever."""
    own = "WANDB_FINISH_TIMEOUT" in os.environ or "finish_timeout" not in wandb.Settings.model_fields
    limit: dict[str, Any] = {} if own else {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
    return wandb.Settings(silent=True, console="off", **limit)


@contextlib.contextmanager
def _shown_words() -> Iterator[None]:
    """Removes secrets from the command line that W&B sees, because W&B sends it."""
    words = sys.argv
    sys.argv = list(without_secrets(words))
    try:
        yield
    finally:
        sys.argv = words


class WandbTracker(Tracker):
    """Logs to one W&B run in the run directory's ``wandb/``; a resumed run keeps its id.

    ``WANDB_MODE``, ``WANDB_BASE_URL`` and the other variables of W&B apply, to what the config leaves open.
    With ``WANDB_MODE=disabled`` nothing is logged or remembered.
    """

    def __init__(self, run: TrackedRun) -> None:
        log, known = run.config.log, run.remembered(SERVICE)
        project = log.project or known.get("project") or os.environ.get("WANDB_PROJECT") or run.project
        with _shown_words():
            self._run = wandb.init(
                project=project,
                entity=log.entity,
                group=log.group,
                tags=list(log.tags) if log.tags else None,
                name=run.name,
                id=known.get("id"),
                resume="allow",
                config=run.settings,
                allow_val_change=True,
                dir=str(run.directory),
                reinit="create_new",
                settings=_settings(),
            )
        self._until: float = math.inf
        if self._run.disabled:
            return
        run.remember(SERVICE, {"id": self._run.id, "project": project})
        # Online, W&B knows what arrived; a killed process may have left the last records unsent.
        self._until = run.logged_until(SERVICE) if self._run.offline else self._run.starting_step - 1
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        local = f"wandb sync {quoted(run.directory / 'wandb')}/offline-run-*"
        self.place = local if self._run.offline else str(self._run.url)

    def log(self, record: Mapping[str, Any]) -> None:
        """Logs the record's numbers at its ``global_step``."""
        step = int(record["global_step"])
        if step > self._until:
            self._run.log(metrics_of(record), step=step)

    def text(self, tag: str, text: str) -> None:
        """Stores markdown among the run's files, as ``<tag>.md``."""
        if not self._run.disabled:
            (Path(self._run.dir) / f"{tag}.md").write_text(text)

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Logs an mp4 file; it shares its step with the record that follows."""
        if global_step > self._until:
            self._run.log({tag: wandb.Video(str(path), format="mp4")}, step=global_step)

    def close(self) -> None:
        """Sends what is queued, and finishes the W&B run."""
        self._run.finish(exit_code=EXIT_CODES[self.ending])
