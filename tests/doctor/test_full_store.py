"""A disk that is full where the doctor writes: the script doesn't notice, and the report says what is missing."""

import errno
import json
import os
from pathlib import Path

import pytest

from lockstep.doctor.judge.traces import read_traces
from lockstep.doctor.watch import watcher
from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideReader, SideWriter
from lockstep.doctor.watch.watcher import Watcher


@pytest.fixture
def full(monkeypatch):
    """Lets every file of the store take so many letters more, of all that is written."""
    original, rooms = Path.open, []

    def open_full(path, mode="r", *words, **more):
        file = original(path, mode, *words, **more)
        if not rooms or path.name != "events.jsonl" or "a" not in mode:
            return file
        write = file.write

        def write_some(text):
            done, rooms[0] = text[: rooms[0]], max(0, rooms[0] - len(text))
            write(done)
            file.flush()
            if len(done) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(text)

        file.write = write_some
        return file

    monkeypatch.setattr(Path, "open", open_full)
    return rooms.append


def test_a_script_ends_well_though_its_last_can_not_be_written(tmp_path, full, monkeypatch):
    monkeypatch.setattr(watcher.os, "_exit", os._exit)  # is set back
    monkeypatch.setattr(watcher.os, "register_at_fork", lambda **_: None)
    watched = Watcher(SideWriter(tmp_path, 0), Schedule(1, 1))
    watched.start()
    full(0)
    watched.end(None)
    (trace,) = read_traces(tmp_path, [0])
    assert trace.lost
    assert trace.state["over"]


def test_nothing_is_written_behind_what_did_not_fit(tmp_path, full):
    writer = SideWriter(tmp_path, 0)
    writer.add({"kind": "first"})
    writer.flush()
    full(5)
    writer.add({"kind": "second"})
    writer.flush()
    full(0)
    writer.add({"kind": "third"})
    writer.flush()
    assert [event["kind"] for event in SideReader(writer.path).events()] == ["first"]
    writer.state({"seconds": 1.0})
    assert SideReader(writer.path).state() == {"seconds": 1.0, "lost": True}


def test_a_line_that_another_one_has_joined_is_broken_and_no_more(tmp_path):
    writer = SideWriter(tmp_path, 0)
    whole = json.dumps({"kind": "whole"}) + "\n"
    (writer.path / "events.jsonl").write_text(whole + whole[:7] + whole + whole + whole[:5])
    assert [event["kind"] for event in SideReader(writer.path).events()] == ["whole", "broken", "whole"]
