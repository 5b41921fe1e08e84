"""Sends metrics, parameters and videos to MLflow: a database beside the runs, or the server in its variables."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.redact import shown_url
from lockstep.core.files import quoted
from lockstep.core.temporary import temporary_directory
from lockstep.runs.trackers.outbox import Outbox
from lockstep.runs.trackers.service import Ending, TrackedRun, Tracker, flattened, metrics_of

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import: nothing is sent unasked

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

SERVICE, DATABASE = "mlflow", "mlflow.db"
UNKNOWN = "RESOURCE_DOES_NOT_EXIST"
MAX_PARAMS = 100  # per request
MAX_VALUE = 6000  # letters of a parameter; MLflow cuts longer ones, with a warning
RECORDS_AT_ONCE = 20  # so few that a request has about as many metrics as MLflow takes, 1000
MAX_NAME = 240  # of the 250 letters allowed; the rest is for the number that makes a name unique
ODD = re.compile(r"[^/\w.\- :]|(?<![^/])\.\.")
STATUS = {Ending.FINISHED: "FINISHED", Ending.STOPPED: "KILLED", Ending.FAILED: "FAILED"}
LAST_SECONDS = 3.0
"""Seconds to wait, after a failure, for MLflow to take the run's status."""
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class MlflowTracker(Tracker):
    """Logs to one MLflow run in the experiment ``log.project``; a resumed run keeps its id if MLflow knows it.

    Without ``MLFLOW_TRACKING_URI``, or if it is empty, metrics go to the SQLite file ``mlflow.db`` beside the run
    directory (for a group's seed, beside the group), and files to ``mlartifacts/`` there. A thread sends everything. A
    server that is away for a short time gets what it missed, by MLflow's own retries; once these are used up, the next
    call raises their error.
    """

    def __init__(self, run: TrackedRun) -> None:
        known, runs_dir = run.remembered(SERVICE), _runs_dir(run)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        local = not uri
        uri = uri or f"sqlite:///{runs_dir / DATABASE}"
        with _quiet_migrations(), _few_retries():
            if local:
                _make_database(runs_dir / DATABASE)
            self._client = MlflowClient(uri)
            if known and self._goes_on(known["id"]):
                self._id = known["id"]
            else:
                experiment = self._experiment(run.project, str(runs_dir / "mlartifacts") if local else None)
                self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
                if known:
                    run.begins_anew(SERVICE, shown_url(uri), known["id"])
        run.remember(SERVICE, {"id": self._id})
        there = self._client.get_run(self._id).data
        self._describe(run, there.params)
        self._names = TakenNames()
        # MLflow knows what it has. The run's own record may end earlier or later: it came from a mirror, the power
        # failed, or a session logged without MLflow.
        self._until = int(there.metrics.get("global_step", -1))
        self.place = f"mlflow ui --backend-store-uri {quoted(uri)}" if local else f"run {self._id}"
        self._outbox: Outbox[Sequence[Metric] | Callable[[], object]] = Outbox(self._send, RECORDS_AT_ONCE)
        self._closed = False

    def _goes_on(self, run_id: str) -> bool:
        """Marks an MLflow run as running again; returns False if MLflow doesn't know it."""
        try:
            self._client.update_run(run_id, "RUNNING")
        except MlflowException as error:
            if error.error_code != UNKNOWN:
                raise
            return False
        return True

    def _experiment(self, name: str, artifacts: str | None) -> str:
        there = self._client.get_experiment_by_name(name)
        if there is not None:
            return there.experiment_id
        try:
            return self._client.create_experiment(name, artifacts)
        except MlflowException:
            there = self._client.get_experiment_by_name(name)
            if there is None:
                raise
            return there.experiment_id  # a run beside this one has made it meanwhile

    def _describe(self, run: TrackedRun, stored: Mapping[str, str]) -> None:
        """Logs parameters and tags; settings that a resumed run changed become tags, as parameters can't change."""
        log = run.config.log
        wanted = _texts(run.settings)
        names = taken_names(wanted)
        new = [Param(names[key], value) for key, value in wanted.items() if names[key] not in stored]
        tags = {key: "true" for key in log.tags or ()} | ({"group": log.group} if log.group else {})
        plain = _texts(run.config.model_dump(mode="json"))  # older versions stored secrets as they are
        tags |= {
            f"resumed.{names[key]}": value
            for key, value in wanted.items()
            if stored.get(names[key], value) not in (value, plain.get(key))
        }
        for first in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + MAX_PARAMS])
        if tags:
            names = taken_names(tags)
            self._client.log_batch(self._id, tags=[RunTag(names[key], value) for key, value in tags.items()])

    def log(self, record: Mapping[str, Any]) -> None:
        """Logs the record's numbers at its ``global_step``."""
        step, now = int(record["global_step"]), int(1000 * time.time())
        if step > self._until:
            values = metrics_of(record)
            self._names.learn(values)
            self._outbox.put([Metric(self._names.of[key], float(value), now, step) for key, value in values.items()])

    def text(self, tag: str, text: str) -> None:
        """Stores markdown as the artifact ``<tag>.md``."""
        self._outbox.put(partial(self._client.log_text, self._id, text, f"{tag}.md"), alone=True, slow=True)

    def video(self, tag: str, path: Path, global_step: int) -> None:
        """Stores an mp4 file, whose name gives the step, as an artifact under the tag."""
        self._outbox.put(partial(self._client.log_artifact, self._id, str(path), tag), alone=True, slow=True)

    def close(self) -> None:
        """Waits a bounded time for what isn't sent yet, and ends the MLflow run; after a failure it tries that once.

        Raises:
            Exception: that with which sending failed.
            TimeoutError: MLflow didn't take everything in time; one line.
        """
        if self._closed:
            return
        self._closed = True
        end = partial(self._client.set_terminated, self._id, STATUS[self.ending])
        try:
            self._outbox.put(end, alone=True)
            self._outbox.finish()
        except Exception:
            self._try_briefly(end)
            raise

    def _try_briefly(self, call: Callable[[], object]) -> None:
        """Makes a call whose errors don't matter, and doesn't wait for it longer than ``LAST_SECONDS``."""

        def make() -> None:
            with contextlib.suppress(Exception):
                call()

        thread = threading.Thread(target=make, name="tracker-end", daemon=True)
        with _few_retries():
            thread.start()
            thread.join(LAST_SECONDS)

    def _send(self, items: Sequence[Sequence[Metric] | Callable[[], object]]) -> None:
        """Makes a call, which comes alone, or sends records in one request."""
        metrics: list[Metric] = []
        for item in items:
            if callable(item):
                item()
            else:
                metrics += item
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)


class TakenNames:
    """Gives metrics, parameters or tags names that MLflow accepts; one other name makes it refuse a whole request.

    Attributes:
        of: MLflow's names, all different, by the original ones.
    """

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Adds names; of those added together, acceptable ones keep their name, and others may get a number."""
        new = [(name, plain_name(name)) for name in names if name not in self.of]
        for name, plain in sorted(new, key=lambda pair: pair[0] != pair[1]):
            taken, wanted, number = set(self.of.values()), plain, 1
            while wanted in taken:
                number += 1
                wanted = f"{plain}_{number}"
            self.of[name] = wanted


def taken_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of :class:`TakenNames`, by the original ones, for names that are all known at once."""
    taken = TakenNames()
    taken.learn(names)
    return taken.of


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings as parameters; a part of a long value, which MLflow would cut itself."""
    return {key: str(value)[:MAX_VALUE] for key, value in flattened(settings).items()}


def plain_name(name: str) -> str:
    """Replaces characters that MLflow doesn't accept by ``_``, and makes the name a plain relative path."""
    parts = ODD.sub("_", name)[:MAX_NAME].split("/")
    return "/".join(part for part in parts if part not in ("", ".")) or "_"


def _runs_dir(run: TrackedRun) -> Path:
    """Returns the directory of a run's database; a group keeps a database that an older version made inside it."""
    group = run.group
    if group is None or (group / DATABASE).is_file():
        return run.directory.resolve().parent
    return group.parent


def _make_database(path: Path) -> None:
    """Makes MLflow's database, if it is missing, whole or not at all.

    MLflow makes it in many steps. Runs that begin side by side would mix these up, and a process that is killed
    meanwhile would leave a part of it, with which no run can start.
    """
    if path.exists():
        return
    with temporary_directory(within=path.parent) as directory:
        made = directory / DATABASE
        MlflowClient(f"sqlite:///{made}").get_experiment_by_name("Default")
        try:
            os.link(made, path)
        except FileExistsError:  # a run beside this one has made it meanwhile
            return
        except OSError:  # no hard links here
            if not path.exists():
                made.replace(path)


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """Reduces MLflow's retries, so that an unreachable server holds up a run's beginning or end for seconds only."""
    if RETRIES in os.environ:
        yield
        return
    os.environ[RETRIES] = "2"
    try:
        yield
    finally:
        os.environ.pop(RETRIES, None)


@contextlib.contextmanager
def _quiet_migrations() -> Iterator[None]:
    """Silences MLflow's report on creating a database, which has a line for each step."""
    with contextlib.ExitStack() as stack:
        for logger in (logging.getLogger("mlflow"), logging.getLogger("alembic")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)
        yield
