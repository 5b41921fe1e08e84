"""Where runs and seeds of a group go in MLflow, with a client in its place that keeps experiments in memory."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from lockstep.config.run import Config
from lockstep.runs.trackers.service import TrackedRun

TRACKER = "lockstep.runs.trackers.mlflow"


class MlflowError(Exception):
    """In the place of ``MlflowException``."""

    error_code = "INTERNAL_ERROR"


class Client:
    """Knows experiments by database; one that another process makes first can't be seen before it is asked for."""

    experiments: ClassVar[dict[str, dict[str, Any]]] = {}
    others: ClassVar[set[str]] = set()
    has: ClassVar[dict[str, float]] = {}
    sent: ClassVar[list[int]] = []
    broken = False

    def __init__(self, uri):
        self.there = self.experiments.setdefault(uri, {})

    def get_experiment_by_name(self, name):
        return self.there.get(name)

    def create_experiment(self, name, artifacts):
        if self.broken:
            raise MlflowError("the disk is full")
        if name in self.others:
            self.there[name] = SimpleNamespace(experiment_id=f"{name} of another", artifacts=artifacts)
            raise MlflowError(f"{name} already exists")
        self.there[name] = SimpleNamespace(experiment_id=name, artifacts=artifacts)
        return name

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(params={}, metrics=self.has))

    def update_run(self, run_id, status):
        if self.broken:
            raise MlflowError("the disk is full")

    def log_batch(self, run_id, **what):
        self.sent.extend(what.get("metrics", ()))

    def set_terminated(self, run_id, status):
        pass


@pytest.fixture
def tracker_module(monkeypatch):
    """The tracker's module, with a client in MLflow's place."""
    names = {"Metric": lambda key, value, time, step: step, "Param": lambda key, value: (key, value), "RunTag": object}
    modules = {
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": names,
        "mlflow.exceptions": {"MlflowException": MlflowError},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, TRACKER, raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(Client, "experiments", {})
    yield importlib.import_module(TRACKER)
    sys.modules.pop(TRACKER, None)  # it holds the client in MLflow's place


@pytest.fixture
def started(tracker_module, monkeypatch):
    """Starts the tracker of a run's directory."""
    monkeypatch.setattr(tracker_module, "_make_database", lambda path: None)
    return lambda directory: tracker_module.MlflowTracker(TrackedRun(directory, Config()))


def directory_of(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_seeds_of_a_group_go_where_single_runs_go(started, tmp_path):
    directory_of(tmp_path / "group")
    for name in ("alone", "group/seed_0", "group/seed_1"):
        assert str(tmp_path / "mlflow.db") in started(directory_of(tmp_path / name)).place
    ((uri, experiments),) = Client.experiments.items()
    assert uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert experiments["lockstep"].artifacts == str(tmp_path / "mlartifacts")


def test_an_empty_variable_is_as_good_as_none(started, tmp_path, monkeypatch):
    """Files for containers and shells often set one that is empty."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert started(directory_of(tmp_path / "run")).place == f"mlflow ui --backend-store-uri {uri}"
    assert Client.experiments[uri]["lockstep"].artifacts == str(tmp_path / "mlartifacts")


def test_a_group_that_has_a_database_of_its_own_keeps_it(started, tmp_path):
    """Older versions made one, and know the runs of its seeds by it."""
    group = directory_of(tmp_path / "group")
    (group / "mlflow.db").touch()
    assert str(group / "mlflow.db") in started(directory_of(group / "seed_0")).place


def test_an_experiment_that_another_seed_has_just_made_is_taken(started, tmp_path, monkeypatch):
    monkeypatch.setattr(Client, "others", {"lockstep"})
    run = directory_of(tmp_path / "run")
    started(run)
    assert TrackedRun(run, Config()).remembered("mlflow") == {"id": "lockstep of another/run"}


def test_an_experiment_that_cannot_be_made_is_an_error(started, tmp_path, monkeypatch):
    monkeypatch.setattr(Client, "broken", True)
    with pytest.raises(MlflowError, match="the disk is full"):
        started(directory_of(tmp_path / "run"))


def test_a_run_that_cannot_go_on_for_another_reason_than_that_it_is_unknown_is_an_error(started, tmp_path, monkeypatch):
    run = directory_of(tmp_path / "run")
    started(run)
    before = TrackedRun(run, Config()).remembered("mlflow")
    monkeypatch.setattr(Client, "broken", True)
    with pytest.raises(MlflowError, match="the disk is full"):
        started(run)
    assert TrackedRun(run, Config()).remembered("mlflow") == before


def test_a_resumed_run_sends_the_steps_that_mlflow_lacks(started, tmp_path, monkeypatch):
    run = TrackedRun(directory_of(tmp_path / "walker"), Config())
    started(run.directory)
    run.remember("mlflow", {"logged_until": 768})  # of the run's own record: a session logged without MLflow
    monkeypatch.setattr(Client, "has", {"global_step": 512.0})
    monkeypatch.setattr(Client, "sent", [])
    tracker = started(run.directory)
    for step in (512, 640, 768, 896):
        tracker.log({"global_step": step})
    tracker.close()
    assert Client.sent == [640, 768, 896]


class Making(Client):
    """Makes a database in the place that it is told, in which ``meanwhile`` happens first."""

    meanwhile = staticmethod(lambda: None)

    def __init__(self, uri):
        super().__init__(uri)
        self.place = Path(uri.removeprefix("sqlite:///"))

    def get_experiment_by_name(self, name):
        self.place.write_text("half")
        self.meanwhile()
        self.place.write_text("whole")


def test_a_database_is_made_whole_and_once(tracker_module, tmp_path, monkeypatch):
    database = tmp_path / "mlflow.db"
    monkeypatch.setattr(tracker_module, "MlflowClient", Making)
    told = []
    monkeypatch.setattr(Making, "meanwhile", lambda self: told.append(database.exists()))
    for _ in range(2):
        tracker_module._make_database(database)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mlflow.db", "whole")]
    assert told == [False]


def test_a_database_whose_maker_fails_is_none(tracker_module, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_module, "MlflowClient", Making)
    monkeypatch.setattr(Making, "meanwhile", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tracker_module._make_database(tmp_path / "mlflow.db")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False], ids=["", "without hard links"])
def test_the_database_of_a_run_beside_this_one_stays(tracker_module, tmp_path, monkeypatch, links):
    def refuse(*_):
        raise PermissionError(1, "no links here")

    database = tmp_path / "mlflow.db"
    monkeypatch.setattr(tracker_module, "MlflowClient", Making)
    if not links:
        monkeypatch.setattr(tracker_module.os, "link", refuse)
        tracker_module._make_database(database)
        assert database.read_text() == "whole"
        database.unlink()
    monkeypatch.setattr(Making, "meanwhile", lambda self: database.write_text("theirs"))
    tracker_module._make_database(database)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mlflow.db", "theirs")]
