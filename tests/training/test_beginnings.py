"""A session that can't begin, after a run was there: it leaves all of it."""

import errno
import os

import pytest
from fake_session import FakeSession

from lockstep.core.errors import RunError
from lockstep.runs import trackers
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.training.recorder import Recorder, record_training
from lockstep.training.stop import FINISHED


def loop(session: FakeSession, recorder: Recorder) -> int:
    for _ in range(3):
        recorder.log(session.advance())
        recorder.save_checkpoint()
    return FINISHED


def session_of(run, **log):
    session = FakeSession(checkpoint={"interval": 1, "keep_last": 9}, log={"tensorboard": False, **log})
    return lambda checkpoint: record_training(run, 0.0, checkpoint, lambda: session, lambda _: ["begun"], loop)


def refuse(_):
    raise OSError("no login")


@pytest.fixture
def finished(tmp_path):
    """A run that has finished; what is in its files."""
    run = RunDirectory(tmp_path / "run", quiet=True)
    run.path.mkdir()
    session_of(run)(None)

    def content():
        return {path: path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}

    assert "summary.json" in {path.name for path in content()}
    return run, content


def damage(name, text):
    return lambda path: (path / name).write_text(text + (path / "metrics.jsonl").read_text())


@pytest.mark.parametrize(
    ("log", "first", "said"),
    [
        ({"wandb": True}, lambda _: None, "tracker wandb cannot start: no login"),
        ({"jsonl": "/proc/nowhere/second.jsonl"}, lambda _: None, "tracker extra jsonl cannot start"),
        ({}, damage("metrics.jsonl", "no record\n"), "line 1 is no metrics record"),
        ({}, damage("metrics.csv", "no table\n"), "no column named iteration"),
        ({}, damage("fingerprints.jsonl", "no record\n"), "fingerprints.jsonl: line 1 is no metrics record"),
    ],
    ids=["service", "second record", "metrics", "table", "fingerprints"],
)
def test_who_cant_begin_leaves_checkpoints_rows_config_and_summary(finished, monkeypatch, log, first, said):
    run, content = finished
    monkeypatch.setitem(trackers.OPTIONAL_TRACKERS, "wandb", refuse)
    first(run.path)
    before = content()
    with pytest.raises(ValueError, match=said):
        session_of(run, **log)(Checkpoint({}, {}, {}))
    assert content() == before


def test_a_torn_second_record_is_cut_and_a_service_that_was_started_is_closed(finished, tmp_path, monkeypatch):
    run, _ = finished
    second, closed = tmp_path / "second.jsonl", []
    second.write_text('{"iteration": 1, "global_step": 128}\n{"iteration": 2, "glo')
    session = FakeSession(log={"tensorboard": False, "wandb": True, "jsonl": str(second)})

    class Service(trackers.Tracker):
        def close(self):
            closed.append(self)

    monkeypatch.setitem(trackers.OPTIONAL_TRACKERS, "wandb", lambda _: Service())
    session.iteration, session.global_step = 1, 128
    record_training(run, 0.0, Checkpoint({}, {}, {}), lambda: session, lambda _: [], lambda *_: FINISHED)
    assert second.read_text() == '{"iteration": 1, "global_step": 128}\n'
    assert len(closed) == 1
    monkeypatch.setattr(RunDirectory, "cut_after", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record_training(run, 0.0, Checkpoint({}, {}, {}), lambda: session, lambda _: [], lambda *_: FINISHED)
    assert len(closed) == 2


def test_a_full_disk_while_rows_are_cut_is_said_in_one_line(finished, monkeypatch):
    run, _ = finished
    file = str(run.path / "metrics.jsonl")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    monkeypatch.setattr("lockstep.runs.directory.cut_trackers", full)
    with pytest.raises(RunError) as caught:
        session_of(run)(Checkpoint({}, {}, {}))
    assert str(caught.value) == f"{file} can't be written: the disk is full"


def test_who_begins_removes_what_comes_later_and_the_summary(finished, monkeypatch):
    run, content = finished
    told = []

    class Service(trackers.Tracker):
        def log(self, record):
            told.append(record["iteration"])

    monkeypatch.setitem(trackers.OPTIONAL_TRACKERS, "wandb", lambda _: Service())
    session = FakeSession(log={"tensorboard": False, "wandb": True})

    def look(session, recorder):
        names = {path.name for path in content()}
        assert "summary.json" not in names
        assert (run.path / "metrics.jsonl").read_text() == ""
        assert not list(run.checkpoints.iterdir())
        recorder.log(session.advance())
        return FINISHED

    record_training(run, 0.0, Checkpoint({}, {}, {}), lambda: session, lambda _: [], look)
    assert told == [1]
