"""Ranks of several hosts meet anew every time, whatever a killed run of the same names has left."""

import json
import subprocess
import threading
from contextlib import contextmanager

import pytest
from command_line import command, surroundings, wait_until

from lockstep.core.topology import Topology
from lockstep.doctor import meeting
from lockstep.doctor.meeting import common_store
from lockstep.doctor.watch.side_store import rank_directory, write_json

STAYS = "import pathlib, sys, time\npathlib.Path(sys.argv[0]).with_suffix('.began').touch()\ntime.sleep(3600)\n"
FAILS = "raise KeyError('nothing')"


@contextmanager
def ranks(cwd, script):
    """Two ranks of a script under the doctor, each as the only one of its host."""
    started = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "first-host"}
        words = command("doctor", "--directory", cwd, "--json", "-", f"{script}_{rank}.py")
        pipe = subprocess.PIPE
        environment = surroundings("meeting", place)
        started.append(subprocess.Popen(words, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_run_is_not_judged_by_what_a_killed_one_of_the_same_names_left(tmp_path):
    for rank in range(2):
        (tmp_path / f"stays_{rank}.py").write_text(STAYS)
        (tmp_path / f"fails_{rank}.py").write_text(FAILS)
    with ranks(tmp_path, "stays"):
        wait_until(lambda: len(list(tmp_path.glob("*.began"))) == 2, "the first run's scripts don't begin")
    left = [path.parent for path in tmp_path.rglob("rank_1")]
    assert left
    for store in left:
        write_json(store / "verdict.json", {"status": 0})
        write_json(store / "stop.json", {})
        for rank in range(2):
            write_json(rank_directory(store, rank) / "ended.json", {"code": 0, "at": 1.0})
    with ranks(tmp_path, "fails") as processes:
        said = [process.communicate(timeout=600) for process in processes]
        assert [process.returncode for process in processes] == [2, 2], said  # not the old verdict's 0
    assert "raised KeyError: 'nothing'" in json.loads(said[0][0])["reason"]
    assert not list(tmp_path.glob("lockstep-*"))


def test_who_comes_first_and_an_old_question_change_nothing(tmp_path):
    topologies = [Topology(rank, 2, 0, 1, launched=True, master_addr="first-host") for rank in range(2)]
    place = meeting._place(tmp_path, topologies[0])
    write_json(place / "asks_1.json", {"word": "old"})
    write_json(place / "told_1.json", {"word": "old", "store": "run-old"})
    rank_directory(place / "run-old", 1).mkdir(parents=True)
    stores = {}

    def join():
        with common_store(tmp_path, topologies[1]) as store:
            stores[1] = store

    other = threading.Thread(target=join)
    other.start()
    wait_until(lambda: json.loads((place / "asks_1.json").read_text())["word"] != "old", "rank 1 doesn't ask")
    with common_store(tmp_path, topologies[0]) as stores[0]:
        other.join()
        assert stores[0] == stores[1] != place / "run-old"
        assert not (place / "run-old").exists()
    assert not place.exists()


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch, rank, missing):
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.2)
    topology = Topology(rank, 2, 0, 1, launched=True, master_addr="first-host")
    line = rf"directory: rank {missing} did not come to .* all hosts share"
    with pytest.raises(ValueError, match=line), common_store(tmp_path, topology):
        pass


def test_a_job_of_slurm_is_a_run_of_its_own(tmp_path, monkeypatch):
    topology = Topology(0, 2, 0, 1, launched=True, master_addr="first-host")
    places = set()
    for job in ("1", "2"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", "0")
        places.add(meeting._place(tmp_path, topology))
    assert len(places) == 2


def test_what_a_killed_run_of_one_host_left_is_removed_by_the_next(tmp_path):
    here = Topology(0, 1, 0, 1, launched=True, master_addr="127.0.0.1")
    assert here.on_one_host
    left = tmp_path / f"{meeting.PREFIX}{meeting.of_this_host()}doctor-0-of-another-launcher"
    elsewhere = tmp_path / f"{meeting.PREFIX}another-host-doctor-0-of-another-launcher"
    for place in (left, elsewhere):
        place.mkdir()
        with meeting.hold(place):
            pass
    with common_store(tmp_path, here) as store:
        assert store.is_dir()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [elsewhere]
