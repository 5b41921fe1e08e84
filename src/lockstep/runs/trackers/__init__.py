"""Sends a run's metrics to its own record (JSON lines, CSV) and to the optional trackers.

A metrics record is a flat dict in a fixed order: ``iteration``, ``global_step``, then ``rollout/…``, ``train/…``,
``time/…`` and now and then ``eval/…``. A value is ``None`` or NaN if it is unknown in this iteration.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.redact import shown_url
from lockstep.config.run import Config, LogConfig
from lockstep.core.errors import one_line
from lockstep.core.process import say
from lockstep.runs.trackers.csv import CsvTracker, check_csv, cut_csv, mend_csv
from lockstep.runs.trackers.files import REWRITTEN, PlainRecord, prepare_to_append
from lockstep.runs.trackers.jsonl import JsonlTracker, check_jsonl, cut_jsonl, last_global_step_of
from lockstep.runs.trackers.service import TRACKERS_JSON, TrackedRun, Tracker, close_all, note_logged

METRICS_JSONL = "metrics.jsonl"
METRICS_CSV = "metrics.csv"
TENSORBOARD = "tensorboard"
OWN_FILES = {METRICS_JSONL, METRICS_CSV, TENSORBOARD, TRACKERS_JSON}
"""Names that trackers leave in a run's directory."""


def _tensorboard(run: TrackedRun) -> Tracker:
    from lockstep.runs.trackers.tensorboard import TensorBoardTracker  # slow to import

    return TensorBoardTracker(run.directory / TENSORBOARD)


def _service(name: str, tracker: str, run: TrackedRun) -> Tracker:
    return getattr(importlib.import_module(f"{__name__}.{name}"), tracker)(run)


OPTIONAL_TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": partial(_service, "wandb", "WandbTracker"),
    "trackio": partial(_service, "trackio", "TrackioTracker"),
    "mlflow": partial(_service, "mlflow", "MlflowTracker"),
}
"""Opens each optional tracker for a run, by its name, which is also its key in the config's ``log``."""

EXTRAS = {"wandb": ("wandb",), "trackio": ("trackio",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The modules that the extra of a tracker's name installs, by tracker."""


def wanted_trackers(log: LogConfig) -> list[str]:
    """Returns the names of the optional trackers that a config asks for."""
    return [name for name in OPTIONAL_TRACKERS if getattr(log, name)]


def check_trackers(log: LogConfig) -> None:
    """Raises a one-line ``ValueError`` if a package that a tracker needs is missing, with the command to install it."""
    for name in wanted_trackers(log):
        for module in EXTRAS.get(name, ()):
            spec = importlib.util.find_spec(module)
            if spec is None or spec.origin is None:  # no origin: a mere folder, such as ./wandb
                raise ValueError(f"log.{name}: needs the package {module}; pip install 'lockstep-rl[{name}]'")


class RunTrackers(Tracker):
    """Hands a run's records to all of its trackers.

    ``metrics.jsonl`` and ``metrics.csv`` are the run's own record: if one can't be written, ``log`` raises. The others
    are optional: one that fails after the start is dropped with a warning.

    Args:
        directory: the run's.
        names: of the optional trackers, keys of ``available``.
        extra_jsonl: a second ``metrics.jsonl``, which is optional too.
        available: opens each optional tracker.
        config: of the run.
        started: trackers that :func:`start_services` has started; those in ``names`` are taken out of it.
        is_new: whether the run begins, so that records in ``extra_jsonl`` are another run's, and refused.

    Raises:
        ValueError: a tracker can't start; one line.
    """

    def __init__(
        self,
        directory: Path,
        names: Iterable[str] = ("tensorboard",),
        extra_jsonl: Path | None = None,
        available: Mapping[str, Callable[[TrackedRun], Tracker]] = OPTIONAL_TRACKERS,
        config: Config | None = None,
        started: dict[str, Tracker] | None = None,
        is_new: bool = False,
    ) -> None:
        self._directory, started = directory, {} if started is None else started
        run = TrackedRun(directory, config or Config())
        self._required: dict[str, Tracker] = {}
        self._optional: dict[str, Tracker] = {}
        try:
            with _starting("jsonl"):
                self._required["jsonl"] = JsonlTracker(directory / METRICS_JSONL)
            with _starting("csv"):
                self._required["csv"] = CsvTracker(directory / METRICS_CSV)
            if extra_jsonl is not None:
                with _starting("extra jsonl"):
                    if is_new and extra_jsonl.is_file() and extra_jsonl.stat().st_size:
                        raise ValueError(
                            f"{extra_jsonl} already holds another run's records; give another path or remove it"
                        )
                    self._optional["extra jsonl"] = JsonlTracker(extra_jsonl)
            for name in names:
                with _starting(name):
                    if name not in available:
                        raise ValueError(f"there is no such tracker; choose from {', '.join(sorted(available))}")
                    self._optional[name] = started.pop(name, None) or available[name](run)
        except ValueError:
            self.close()
            raise

    def log(self, record: Mapping[str, Any]) -> None:
        """Hands ``record`` to every tracker; raises an ``OSError`` if the run's own record can't be written."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Hands records to every tracker, in order; raises an ``OSError`` if the run's own record can't be written.

        If there is a service, records go one by one. So the run's own record, which tells a resumed run what services
        were handed, is at most one record ahead of that.
        """
        if len(records) > 1 and not all(tracker.writes_files for tracker in self._optional.values()):
            for record in records:
                self.log_all([record])
            return
        plain = [PlainRecord.of(record) for record in records]
        for name, tracker in self._required.items():
            try:
                tracker.log_all(plain)
            except OSError as error:
                path = str(self._directory / f"metrics.{name}")
                raise OSError(error.errno, error.strerror, path) from error
        self._try_optional(lambda tracker: tracker.log_all(plain))

    def text(self, tag: str, text: str) -> None:
        """Hands ``text`` to the optional trackers; only for a new run, or they would have it twice."""
        self._try_optional(lambda tracker: tracker.text(tag, text))

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Hands an mp4 file to the optional trackers."""
        self._try_optional(lambda tracker: tracker.video(tag, path, global_step))

    def places(self) -> list[str]:
        """Returns a line for each tracker outside the run directory, which says where to look at it."""
        return [f"{name}: {tracker.place}" for name, tracker in self._optional.items() if tracker.place]

    def close(self) -> None:
        """Closes every tracker; a second call does nothing.

        Raises:
            OSError: the run's own record can't be finished (the others are closed all the same).
        """
        for tracker in self._optional.values():
            tracker.ending = self.ending
        self._try_optional(lambda tracker: tracker.close(), then="metrics.jsonl has every record")
        required, self._optional, self._required = self._required, {}, {}
        with ExitStack() as stack:
            for tracker in required.values():
                stack.callback(tracker.close)

    def _try_optional(
        self, action: Callable[[Tracker], None], then: str = "it is switched off, training goes on"
    ) -> None:
        """Calls ``action`` with each optional tracker; drops one that fails, with a warning that says what follows."""
        for name, tracker in list(self._optional.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._optional[name]
                say(f"tracker {name} failed: {_reason(error)}; {then}")
                with suppress(Exception):
                    tracker.close()


def start_services(
    directory: Path,
    config: Config,
    extra_jsonl: Path | None = None,
    records: Iterable[str] = (),
    last_iteration: int = 0,
) -> dict[str, Tracker]:
    """Starts the tracking services, and checks that the run's records can be cut and written.

    Everything that may refuse does so here, before a resumed run loses anything. How far services were sent is noted
    here too, because the records are cut later.

    Args:
        directory: the run's.
        config: of the run.
        extra_jsonl: a second ``metrics.jsonl``.
        records: names of the run's other JSON lines files.
        last_iteration: the one that the run resumes from.

    Returns:
        The services' trackers, by name.

    Raises:
        ValueError: one can't start, or a file is damaged; one line.
    """
    note_logged(directory, last_global_step_of(directory / METRICS_JSONL))
    check_csv(directory / METRICS_CSV, last_iteration)
    for path in (*(directory / name for name in (METRICS_JSONL, *records)), *([extra_jsonl] if extra_jsonl else [])):
        check_jsonl(path, last_iteration)
    run, started = TrackedRun(directory, config), dict[str, Tracker]()
    if extra_jsonl is not None:
        with _starting("extra jsonl"):
            prepare_to_append(extra_jsonl)
    try:
        for name in wanted_trackers(config.log):
            if name in EXTRAS:
                with _starting(name):
                    started[name] = OPTIONAL_TRACKERS[name](run)
    except ValueError:
        close_all(started)
        raise
    return started


def cut_trackers(directory: Path, last_iteration: int, last_global_step: int, extra_jsonl: Path | None = None) -> None:
    """Removes what a run's files hold after a checkpoint; raises a ``ValueError`` if one is damaged before its end.

    If ``metrics.csv`` lacks rows of ``metrics.jsonl``, it gets them back, with a warning.
    """
    rows = cut_jsonl(directory / METRICS_JSONL, last_iteration)
    table = cut_csv(directory / METRICS_CSV, last_iteration)
    if (said := mend_csv(directory / METRICS_CSV, directory / METRICS_JSONL, table, rows)) is not None:
        say(f"lockstep: warning: {said}")
    if extra_jsonl is not None:
        cut_jsonl(extra_jsonl, last_iteration)
    for folder in (directory, directory / TENSORBOARD):
        for leftover in folder.glob(f"{REWRITTEN}*"):  # of a writer that was killed here
            leftover.unlink(missing_ok=True)
    if (directory / TENSORBOARD).is_dir():
        from lockstep.runs.trackers.tensorboard import cut_tensorboard

        cut_tensorboard(directory / TENSORBOARD, last_global_step)


@contextmanager
def _starting(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        switch = f"; --log.no-{name} goes on without it" if name in OPTIONAL_TRACKERS else ""
        raise ValueError(f"tracker {name} cannot start: {_reason(error)}{switch}") from error


def _reason(error: Exception) -> str:
    """Returns an error in one line, with its class if the message alone says little (``KeyError: 'loss'``).

    Services quote the URL that they were given, which may have a password in it.
    """
    text = shown_url(one_line(error))
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
