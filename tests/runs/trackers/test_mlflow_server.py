"""MLflow's server while a run trains: one that is slow, one that dies, one that comes back."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from command_line import wait_until

from lockstep.config.run import Config, LogConfig
from lockstep.runs.trackers import RunTrackers
from lockstep.runs.trackers import outbox as outbox_module
from lockstep.runs.trackers.service import Ending

pytest.importorskip("mlflow")
from lockstep.runs.trackers import mlflow as mlflow_module

LONG = 600.0


class MlflowServer(ThreadingHTTPServer):
    """Answers what a tracker asks; holds metrics at a door while that is closed, and refuses everything once dead.

    Attributes:
        steps: of the records that have arrived.
        statuses: that the run was given.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.steps, self.statuses, self.refused = [], [], 0
        self.door, self.reached, self.dead = threading.Event(), threading.Event(), False
        self.door.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, what, content):
        run = {"info": {"run_id": "abc", "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/x"}, "data": {}}
        if what == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "1", "name": "lockstep", "lifecycle_stage": "active"}}
        if what == "runs/update":
            self.statuses.append(content["status"])
            return {"run_info": run["info"]}
        if what == "runs/log-batch" and content.get("metrics"):
            self.reached.set()
            assert self.door.wait(LONG)
            self.steps += sorted({metric["step"] for metric in content["metrics"]})
        return {"run": run}


class Answers(BaseHTTPRequestHandler):
    server: MlflowServer

    def log_message(self, *_):
        pass

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.server.dead:
            self.server.refused += 1
            self.close_connection = True
            return
        told = json.dumps(self.server.answer(self.path.split("?")[0].split("/mlflow/")[-1], content)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def do_GET(self):
        self.do_POST()


@pytest.fixture
def server(monkeypatch):
    server = MlflowServer()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", LONG)
    monkeypatch.setattr(mlflow_module, "LAST_SECONDS", LONG)
    yield server
    server.door.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def trackers(server, tmp_path):
    log = LogConfig.model_validate({"mlflow": True, "tensorboard": False})
    return RunTrackers(tmp_path, ("mlflow",), config=Config(log=log))


def log(trackers, *iterations):
    for iteration in iterations:
        trackers.log({"iteration": iteration, "global_step": 100 * iteration, "train/loss": 1.0})


def rows(tmp_path):
    return len((tmp_path / "metrics.jsonl").read_text().splitlines())


def test_training_goes_on_while_the_server_is_slow_and_everything_arrives(server, trackers, tmp_path, capsys):
    server.door.clear()
    log(trackers, 1)
    assert server.reached.wait(LONG)
    log(trackers, *range(2, 50))
    assert rows(tmp_path) == 49
    assert server.steps == []
    server.door.set()
    trackers.ending = Ending.FINISHED
    trackers.close()
    assert server.steps == [100 * iteration for iteration in range(1, 50)]
    assert server.statuses == ["FINISHED"]
    assert capsys.readouterr().err == ""


def test_a_server_that_dies_costs_one_warning(server, trackers, tmp_path, capsys, monkeypatch):
    log(trackers, 1)
    wait_until(lambda: server.steps == [100], "the first record doesn't arrive")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server.dead = True
    log(trackers, 2)
    written, said = 2, ""

    def warned():
        nonlocal written, said
        written += 1
        log(trackers, written)
        said += capsys.readouterr().err
        return "tracker mlflow failed" in said

    wait_until(warned, "nothing is said of the server")
    refused = server.refused
    assert refused
    log(trackers, written + 1)
    trackers.close()
    said += capsys.readouterr().err
    assert said.count("tracker mlflow failed: ") == 1
    assert said.rstrip().endswith("; it is switched off, training goes on")
    assert rows(tmp_path) == written + 1
    assert (server.steps, server.statuses, server.refused) == ([100], [], refused)


def test_a_run_that_ends_while_the_server_is_silent_does_not_wait_for_it(
    server, trackers, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", 0.2)
    server.door.clear()
    log(trackers, 1, 2, 3)
    assert server.reached.wait(LONG)
    trackers.close()
    assert capsys.readouterr().err.endswith("messages; metrics.jsonl has every record\n")
    assert rows(tmp_path) == 3
    assert server.statuses == ["FAILED"]


def test_a_server_that_comes_back_gets_what_it_missed(server, trackers, capsys):
    server.dead = True
    log(trackers, 1, 2)
    wait_until(lambda: server.refused, "the server isn't asked")
    server.dead = False
    log(trackers, 3)
    trackers.close()
    assert server.steps == [100, 200, 300]
    assert "tracker mlflow failed" not in capsys.readouterr().err


def test_a_run_ends_at_a_server_that_failed_once_and_is_well_again(server, trackers, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server.dead = True
    log(trackers, 1)
    wait_until(lambda: trackers._optional["mlflow"]._outbox._error, "nothing fails")
    server.dead = False
    trackers.ending = Ending.FINISHED
    trackers.close()
    assert server.statuses == ["FINISHED"]
    assert capsys.readouterr().err.endswith("; metrics.jsonl has every record\n")


def test_a_run_does_not_wait_for_a_server_that_hangs_after_a_failure(server, trackers, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_module, "LAST_SECONDS", 0.1)
    server.dead = True
    log(trackers, 1)
    wait_until(lambda: trackers._optional["mlflow"]._outbox._error, "nothing fails")
    server.dead, hangs = False, threading.Event()
    monkeypatch.setattr(server, "answer", lambda what, content: hangs.wait() and {})
    trackers.close()  # comes back
    hangs.set()


def test_the_end_is_patient_while_a_video_is_sent(server, trackers, tmp_path, capsys, monkeypatch):
    tracker, sent, door = trackers._optional["mlflow"], [], threading.Event()

    def send(_, path, tag):
        assert door.wait(LONG)
        sent.append(tag)

    monkeypatch.setattr(outbox_module, "SILENT_SECONDS", LONG / 2)
    monkeypatch.setattr(outbox_module, "END_SECONDS", LONG)
    monkeypatch.setattr(tracker._client, "log_artifact", send)
    waited, limits = tracker._outbox._changed.wait_for, []

    def wait_for(ready, seconds=None):
        if seconds is not None:
            limits.append(seconds)
            if tracker._outbox._is_slow():
                door.set()
        return waited(ready, seconds)

    log(trackers, 1)
    wait_until(lambda: server.steps == [100], "the record doesn't arrive")
    trackers.video("eval", tmp_path / "step_100.mp4", 100)
    monkeypatch.setattr(tracker._outbox._changed, "wait_for", wait_for)
    trackers.ending = Ending.FINISHED
    trackers.close()
    assert max(limits) > LONG / 2
    assert (sent, server.statuses) == (["eval"], ["FINISHED"])
    assert capsys.readouterr().err == ""
