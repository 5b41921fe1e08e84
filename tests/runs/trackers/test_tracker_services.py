"""Weights & Biases (offline), Trackio and MLflow (both local): what arrives there, and what a resumed run adds."""

import importlib
import json
import math
import shlex
import sqlite3
import struct
import sys
import time

import numpy as np
import pytest
from command_line import wait_until

from lockstep.config.run import Config, LogConfig
from lockstep.runs.trackers import RunTrackers, Tracker, cut_trackers
from lockstep.runs.trackers.jsonl import last_global_step_of
from lockstep.runs.trackers.service import Ending, TrackedRun, flattened, note_logged

SERVICES = ("wandb", "trackio", "mlflow")


def record(iteration, **more):
    return {"iteration": iteration, "global_step": 100 * iteration, "train/loss": 1 / iteration, **more}


class Wandb:
    """What an offline W&B run has written: the files that ``wandb sync`` sends."""

    def __init__(self, directory):
        self.files = sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"))
        wait_until(lambda: all(self.ended(file) for file in self.files), "W&B doesn't finish its files")
        records = [r for file in self.files for r in self.records(file)]
        self.runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        self.history = {
            r.history.step.num: {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item
            }
            for r in records
            if r.WhichOneof("record_type") == "history"
        }
        self.metrics = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]

    def ended(self, file):
        """Whether a session's last record is there: W&B may write it a little after it has said that it is done."""
        return any(r.WhichOneof("record_type") == "exit" for r in self.records(file))

    @staticmethod
    def records(file):
        """The records of a file: LevelDB's log format, after a header of seven bytes."""
        from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

        data, at, content = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            content += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or its last part
                yield Record.FromString(content)
                content = b""

    def steps(self):
        return [step for file in self.files for r in self.records(file) for step in self._step(r)]

    @staticmethod
    def _step(r):
        return [r.history.step.num] if r.WhichOneof("record_type") == "history" else []


@pytest.fixture
def service(request, monkeypatch, tmp_path):
    """A service that keeps everything in ``tmp_path``; its name."""
    name = request.param
    pytest.importorskip(name)
    for variable in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if name == "trackio":  # its modules take their folder's name on import
        folders = {"TRACKIO_DIR": tmp_path / "trackio", "MEDIA_DIR": tmp_path / "trackio" / "media"}
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "trackio"]:
            for variable, folder in folders.items():
                if hasattr(module, variable):
                    monkeypatch.setattr(module, variable, folder)
    return name


def config(service, **more):
    log = {"project": "balance", "group": "sweep", "tags": ("a", "b"), "tensorboard": False}
    return Config(seed=3, log=LogConfig.model_validate(log | {service: True}), **more)


def open_trackers(run, service, **more):
    if (run / "wandb").is_dir():
        time.sleep(1.1)  # W&B names a session by its second
    return RunTrackers(run, (service,), config=config(service, **more))


def back_to(run, iteration):
    """Back to a checkpoint, as a resumed run begins."""
    note_logged(run, last_global_step_of(run / "metrics.jsonl"))
    cut_trackers(run, iteration, 100 * iteration)


def video(tmp_path):
    path = tmp_path / "step_200.mp4"
    path.write_bytes(b"\0\0\0\x18ftypmp42")
    return path


def arrived(service, tmp_path):
    """Steps of ``train/loss`` with values, videos, parameters and labels, as the service kept them."""
    run = tmp_path / "runs" / "demo"
    if service == "wandb":
        w = Wandb(run)
        parameters = {u.key: json.loads(u.value_json) for r in w.runs for u in r.config.update}
        steps = w.steps()
        assert {r.display_name for r in w.runs} == {"demo"}
        labels = {(r.project, r.run_group, tuple(r.tags)) for r in w.runs}
        videos = [step for step, row in w.history.items() if "eval/video" in row or "eval/video/path" in row]
        losses = [(step, w.history[step]["train/loss"]) for step in steps]
        return losses, videos, parameters["seed"], labels
    if service == "trackio":
        (file,) = (tmp_path / "trackio").glob("*.db")
        with sqlite3.connect(file) as db:
            rows = [(step, json.loads(row)) for step, row in db.execute("select step, metrics from metrics")]
            ((found,),) = db.execute("select config from configs").fetchall()
        found = json.loads(found)
        losses = [(step, row["train/loss"]) for step, row in rows if "train/loss" in row]
        videos = [step for step, row in rows if "eval/video" in row]
        return losses, videos, found["seed"], {("balance", found["_Group"], tuple(found["tags"]))}
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("balance")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    losses = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "train/loss")]
    videos = [int(f.path[-7:-4]) for f in client.list_artifacts(found.info.run_id, "eval/video")]
    tags = tuple(sorted(key for key, value in found.data.tags.items() if value == "true"))
    assert found.info.run_name == "demo"
    return losses, videos, int(found.data.params["seed"]), {("balance", found.data.tags["group"], tags)}


@pytest.mark.parametrize("service", SERVICES, indirect=True)
def test_metrics_config_and_videos_arrive_once_also_after_a_resume(service, tmp_path, capsys):
    run = tmp_path / "runs" / "demo"
    trackers = open_trackers(run, service)
    assert len(trackers.places()) == 1
    assert trackers.places()[0].startswith(f"{service}: ")
    trackers.text("config", "# seed: 3")
    trackers.log(record(1, **{"train/unknown": math.nan, "train/absent": None}))
    trackers.video("eval/video", video(tmp_path), 200)
    trackers.log(record(2, **{"eval/return_mean": np.float64(2.5)}))
    trackers.log(record(3))
    trackers.close()
    remembered = TrackedRun(run, config(service)).remembered(service)
    assert remembered["id"]

    back_to(run, 1)
    trackers = open_trackers(run, service, total_steps=7777)
    trackers.log(record(2))
    trackers.video("eval/video", video(tmp_path), 200)
    trackers.log(record(3))
    trackers.log(record(4))
    trackers.close()
    assert TrackedRun(run, config(service)).remembered(service) == remembered | {"logged_until": 300}

    losses, videos, seed, labels = arrived(service, tmp_path)
    assert [step for step, _ in losses] == [100, 200, 300, 400]
    assert [value for _, value in losses] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-12)
    assert videos == [200]
    assert seed == 3
    assert labels == {("balance", "sweep", ("a", "b"))}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "failed" not in captured.err


@pytest.mark.parametrize("service", ["trackio", "mlflow"], indirect=True)
def test_what_a_service_has_and_the_run_has_lost_arrives_once(service, tmp_path):
    """The run came from a mirror that was behind, or the power failed before its rows were on the disk."""
    run = tmp_path / "runs" / "demo"
    trackers = open_trackers(run, service)
    for iteration in range(1, 6):
        trackers.log(record(iteration))
    trackers.close()
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:3]))
    back_to(run, 2)
    trackers = open_trackers(run, service)
    for iteration in range(3, 7):
        trackers.log(record(iteration))
    trackers.close()
    assert [step for step, _ in arrived(service, tmp_path)[0]] == [100, 200, 300, 400, 500, 600]


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_gets_every_metric_by_a_name_that_it_takes(service, tmp_path, capsys):
    """Of an environment's ``info["metrics"]``, or a callback's."""
    run = tmp_path / "runs" / "demo"
    names = ["distance (m)", "distance [m]", "distance _m_", "höhe: 2", "a//b/./", "../up", "/", "x" * 300, "x" * 301]
    trackers = open_trackers(run, service)
    trackers.log(record(1, **{name: float(n) for n, name in enumerate(names[:1])}))
    trackers.log(record(2, **{name: float(n) for n, name in enumerate(names)}))
    trackers.close()
    assert capsys.readouterr().err == ""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    told = {name: value for name, value in found.data.metrics.items() if name not in record(1)}
    assert told == {
        "distance _m_": 0.0,
        "distance _m__2": 2.0,
        "distance _m__3": 1.0,
        "höhe: 2": 3.0,
        "a/b": 4.0,
        "_/up": 5.0,
        "_": 6.0,
        "x" * 240: 7.0,
        f"{'x' * 240}_2": 8.0,
    }
    history = client.get_metric_history(found.info.run_id, "distance _m_")
    assert [(metric.step, metric.value) for metric in history] == [(100, 0.0), (200, 0.0)]


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_gets_every_setting_and_tag_by_a_name_that_it_takes(service, tmp_path, capsys):
    run = tmp_path / "runs" / "demo"
    ppo = {"loss": "users_losses:weighted", "loss_kwargs": {"weights": {"distance (m)": 1.0, "distance _m_": 2.0}}}
    log = LogConfig.model_validate({"mlflow": True, "tensorboard": False, "tags": ("a (b)", "c", "../d", "t" * 300)})
    for weight in (1.0, 1.0, 3.0):
        ppo["loss_kwargs"]["weights"]["distance (m)"] = weight
        asked = Config.model_validate({"log": log, "ppo": ppo, "network": {"custom": "n:N", "custom_kwargs": {"": 4}}})
        RunTrackers(run, (service,), config=asked).close()
    assert capsys.readouterr().err == ""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    weights = "ppo.loss_kwargs.weights.distance _m_"
    told = found.data.params
    assert (told[weights], told[f"{weights}_2"], told["network.custom_kwargs."]) == ("2.0", "1.0", "4")
    tags = {name: value for name, value in found.data.tags.items() if not name.startswith("mlflow.")}
    names = ("a _b_", "c", "_/d", "t" * 240)
    assert tags == {name: "true" for name in names} | {f"resumed.{weights}_2": "3.0"}


def told_ending(service, tmp_path):
    """How the service says that the run has ended."""
    if service == "wandb":
        (file,) = Wandb(tmp_path / "runs" / "demo").files
        return [r.exit.exit_code for r in Wandb.records(file) if r.WhichOneof("record_type") == "exit"][-1]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run.info.status


@pytest.mark.parametrize(
    ("service", "ending", "told"),
    [
        ("wandb", Ending.FINISHED, 0),
        ("wandb", Ending.STOPPED, 255),
        ("wandb", None, 1),
        ("mlflow", Ending.FINISHED, "FINISHED"),
        ("mlflow", Ending.STOPPED, "KILLED"),
        ("mlflow", None, "FAILED"),
    ],
    indirect=["service"],
)
def test_a_service_is_told_how_the_run_ended_and_lets_it_go_on(service, ending, told, tmp_path):
    run = tmp_path / "runs" / "demo"
    trackers = open_trackers(run, service)
    trackers.log(record(1))
    if ending is not None:
        trackers.ending = ending
    trackers.close()
    assert told_ending(service, tmp_path) == told
    if service == "mlflow":
        trackers = open_trackers(run, service)
        assert told_ending(service, tmp_path) == "RUNNING"
        trackers.ending = Ending.FINISHED
        trackers.close()
        assert told_ending(service, tmp_path) == "FINISHED"


@pytest.mark.parametrize("service", SERVICES, indirect=True)
def test_what_is_secret_in_a_config_is_sent_nowhere(service, tmp_path, monkeypatch):
    words = ["lockstep", "train", "--env.kwargs.api_key", "geheim", "--env.kwargs.name", "offen"]
    monkeypatch.setattr(sys, "argv", words)  # which W&B sends
    more = {"env": {"id": "tasks:Mine-v0", "kwargs": {"api_key": "geheim", "name": "offen"}}}
    trackers = open_trackers(tmp_path / "runs" / "demo", service, **more, checkpoint={"mirror": "ftp://me:geheim@h/r"})
    trackers.log(record(1))
    trackers.close()
    if service == "wandb":
        Wandb(tmp_path / "runs" / "demo")  # once all is written
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    assert b"offen" in kept
    assert b"ftp://***@h/r" in kept
    assert b"geheim" not in kept
    assert sys.argv == words


def test_wandb_does_not_wait_for_ever_at_the_end(monkeypatch):
    pytest.importorskip("wandb")
    settings = importlib.import_module("lockstep.runs.trackers.wandb")._settings
    assert (settings().finish_timeout, settings().finish_timeout_raises) == (300.0, True)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "7")
    assert settings().finish_timeout != 300.0


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_wandb_has_the_global_step_as_its_axis_and_one_id_for_all_sessions(service, tmp_path):
    run = tmp_path / "demo"
    for iterations in ([1, 2], [3]):
        trackers = open_trackers(run, service)
        for iteration in iterations:
            trackers.log(record(iteration))
        trackers.close()
    found = Wandb(run)
    assert len(found.files) == 2
    assert len({r.run_id for r in found.runs}) == 1
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in found.metrics}
    assert axes["*"] == "global_step"
    assert found.history[200]["global_step"] == 200
    assert "train/unknown" not in found.history[200]


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_takes_no_long_setting_for_one_that_a_resume_has_changed(service, tmp_path, caplog):
    run = tmp_path / "runs" / "demo"
    for _ in range(2):
        env = {"id": "tasks:Mine-v0", "kwargs": {"places": list(range(5000))}}
        open_trackers(run, service, env=env).close()
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
        found = dict(database.execute("select key, value from params union select key, value from tags"))
    assert found["env.kwargs"].startswith("{'places': [0, 1, ")
    assert not [key for key in found if key.startswith("resumed.")]
    assert not [told for told in caplog.messages if "truncated" in told]


@pytest.mark.parametrize("service", SERVICES, indirect=True)
def test_the_command_that_shows_a_tracker_can_be_copied(service, tmp_path):
    run = tmp_path / "my runs" / "demo"
    trackers = RunTrackers(run, (service,), config=Config.model_validate({"log": {service: True, "project": "a b"}}))
    last = {
        "wandb": f"{run}/wandb/offline-run-*",
        "trackio": "a b",
        "mlflow": f"sqlite:///{tmp_path}/my runs/mlflow.db",
    }
    assert shlex.split(trackers.places()[0])[-1] == last[service]
    trackers.close()


@pytest.fixture
def wandb_reads(monkeypatch):
    """A function that sets variables of W&B, which reads them once in a process."""
    wandb = pytest.importorskip("wandb")

    def read(**variables):
        wandb.teardown()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield read
    wandb.teardown()


def log_to(run, **log):
    RunTrackers(run, ("wandb",), config=Config.model_validate({"log": {"wandb": True, **log}})).close()


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_wandb_takes_from_its_variables_what_the_config_leaves_open(service, tmp_path, wandb_reads):
    wandb_reads(WANDB_PROJECT="theirs", WANDB_TAGS="a,b", WANDB_RUN_GROUP="sweep")
    log_to(tmp_path / "open")
    log_to(tmp_path / "given", project="mine", tags=["c"])
    told = [Wandb(tmp_path / name).runs[0] for name in ("open", "given")]
    assert [(run.project, sorted(run.tags)) for run in told] == [("theirs", ["a", "b"]), ("mine", ["c"])]
    assert [run.run_group for run in told] == ["sweep", "sweep"]


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_wandb_that_is_disabled_does_nothing_and_warns_of_nothing(service, tmp_path, wandb_reads, capsys):
    wandb_reads(WANDB_MODE="disabled")
    trackers = open_trackers(tmp_path / "demo", service)
    trackers.text("config", "# words")
    trackers.video("eval", video(tmp_path), 100)
    trackers.log(record(1))
    assert not trackers.places()
    trackers.close()
    assert not (tmp_path / "demo" / "trackers.json").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("service", ["trackio"], indirect=True)
def test_trackio_does_not_go_on_in_another_run_of_the_same_name(service, tmp_path):
    for run in (tmp_path / "here" / "demo", tmp_path / "there" / "demo"):
        trackers = open_trackers(run, service)
        trackers.log(record(1))
        trackers.close()
        back_to(run, 1)
    with pytest.raises(ValueError, match="tracker trackio cannot start: project balance has a newer run demo"):
        open_trackers(tmp_path / "here" / "demo", service)
    open_trackers(tmp_path / "there" / "demo", service).close()


@pytest.mark.parametrize("service", ["trackio", "mlflow"], indirect=True)
def test_a_run_that_was_moved_away_from_its_services_begins_anew_there(service, tmp_path, capsys):
    before = tmp_path / "before" / "demo"
    trackers = open_trackers(before, service)
    for iteration in (1, 2, 3):
        trackers.log(record(iteration))
    trackers.close()
    known = TrackedRun(before, config(service)).remembered(service)["id"]
    run = tmp_path / "runs" / "demo"
    run.parent.mkdir()
    before.rename(run)
    if service == "trackio":
        (tmp_path / "trackio").rename(tmp_path / "trackio of another machine")
    back_to(run, 1)
    trackers = open_trackers(run, service)
    trackers.log(record(2))
    trackers.close()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"lockstep: warning: tracker {service}: ")
    assert f"doesn't know the run {known}, which this one had there before it was moved; a new one begins" in warning
    remembered = TrackedRun(run, config(service)).remembered(service)
    assert remembered["id"] != known
    assert remembered["logged_until"] == -1
    back_to(run, 2)
    trackers = open_trackers(run, service)  # and goes on there from now on
    trackers.log(record(3))
    trackers.close()
    assert TrackedRun(run, config(service)).remembered(service) == remembered | {"logged_until": 200}
    assert [step for step, _ in arrived(service, tmp_path)[0]] == [200, 300]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("service", ["trackio"], indirect=True)
def test_a_trackio_server_that_may_be_silent_is_not_taken_for_one_without_the_run(service, tmp_path, monkeypatch):
    trackers = open_trackers(tmp_path / "demo", service)
    trackers.log(record(1))
    trackers.close()
    back_to(tmp_path / "demo", 1)
    import trackio

    def fail(**_):
        raise ValueError("Run 'demo' does not exist in project 'balance'")

    monkeypatch.setattr(trackio, "init", fail)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"exist in project 'balance'; --log\.no-trackio goes on without it"):
        open_trackers(tmp_path / "demo", service)


@pytest.mark.parametrize("service", ["trackio"], indirect=True)
def test_a_service_that_cannot_start_stops_the_run_in_one_line(service, tmp_path, monkeypatch):
    import trackio

    def fail(**_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(trackio, "init", fail)
    with pytest.raises(ValueError, match="tracker trackio cannot start: no route to host") as info:
        open_trackers(tmp_path / "demo", service)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("service", ["trackio"], indirect=True)
def test_a_service_that_fails_later_warns_once(service, tmp_path, monkeypatch, capsys):
    trackers = open_trackers(tmp_path / "demo", service)
    monkeypatch.setattr("trackio.run.Run.log", lambda *_, **__: 1 / 0)
    for iteration in (1, 2):
        trackers.log(record(iteration))
    trackers.close()
    assert capsys.readouterr().err == (
        "tracker trackio failed: ZeroDivisionError: division by zero; it is switched off, training goes on\n"
    )
    assert len((tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()) == 2


# ---- what a run remembers


def test_a_run_remembers_each_service_and_how_far_it_came(tmp_path):
    run = TrackedRun(tmp_path, Config())
    assert run.remembered("wandb") == {}
    assert run.logged_until("wandb") == -1
    note_logged(tmp_path, 500)
    assert list(tmp_path.iterdir()) == []
    run.remember("wandb", {"id": "abc"})
    run.remember("mlflow", {"id": "def"})
    assert (run.remembered("wandb"), run.logged_until("wandb")) == ({"id": "abc"}, -1)
    note_logged(tmp_path, 500)
    note_logged(tmp_path, 300)  # a second resume from further back
    note_logged(tmp_path, None)
    run.remember("trackio", {"id": "ghi"})
    assert [run.logged_until(name) for name in SERVICES] == [500, -1, 500]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"wandb": "abc"}', '{"wandb": {"logged_until": "500"}}', pytest.param("[" * 100_000, id="deep")],
)
def test_a_damaged_memory_is_named(tmp_path, content):
    (tmp_path / "trackers.json").write_text(content)
    with pytest.raises(ValueError, match=r"trackers\.json is damaged; remove it"):
        TrackedRun(tmp_path, Config()).remembered("wandb")


def test_settings_are_flattened_with_dots_but_for_the_environments_arguments():
    flat = flattened(Config.model_validate({"env": {"id": "A-v0", "kwargs": {"g": {"x": 1}}}}).model_dump(mode="json"))
    assert flat["env.kwargs"] == {"g": {"x": 1}}
    assert flat["ppo.clip_range"] == 0.2
    assert not any(isinstance(value, dict) for key, value in flat.items() if key != "env.kwargs")


def test_ranks_that_do_not_write_have_no_tracker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trackers = Tracker()
    trackers.video("eval/video", tmp_path / "a.mp4", 1)
    assert trackers.places() == []
    assert list(tmp_path.iterdir()) == []
