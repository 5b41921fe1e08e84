"""Rows of runs, read from directories that hold anything."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from lockstep.runs.directory import RunDirectory
from lockstep.runs.listing import DAMAGED, NO_SUMMARY, RUNNING, Row, ordered, row_of, runs_in
from lockstep.runs.lock import is_held

SUMMARY = {"status": "finished", "global_step": 640, "final_return": 7.5, "world_size": 2}
SUMMARY |= {"started": "2026-01-31T13:00:00+01:00"}
HOLD = """
import sys
from pathlib import Path
from lockstep.runs.directory import RunDirectory
RunDirectory(Path(sys.argv[1])).lock()
print("held", flush=True)
sys.stdin.read()
"""


def make(path, config=None, summary=None, rows=()):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or {"env": {"id": "Game-v0"}, "seed": 3}))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    lines = [{"iteration": n, "global_step": 10 * n, "time/world_size": 4, **row} for n, row in enumerate(rows, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def returns(*values):
    return [{"rollout/episode_return_mean": value} for value in values]


def test_a_finished_run_is_its_summary(tmp_path):
    path = make(tmp_path / "a", summary=SUMMARY, rows=returns(1.0))
    row = row_of(path, "a")
    size = sum(file.stat().st_size for file in path.iterdir())
    assert row == Row("a", str(path), "Game-v0", 3, 1, 640, "finished", 7.5, 2, "2026-01-31T12:00:00+00:00", size)
    assert row.to_json()["return"] == 7.5
    assert "problem" not in row.to_json()


def test_a_run_without_a_summary_is_its_last_record(tmp_path):
    path = make(tmp_path / "a", rows=returns(1.0, 2.5))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "global_st')  # torn
    os.utime(path / "config.json", (0, 0))
    row = row_of(path, "a")
    assert (row.status, row.steps, row.final_return, row.ranks) == (NO_SUMMARY, 20, 2.5, 4)
    assert row.started == "1970-01-01T00:00:00+00:00"
    assert row_of(make(tmp_path / "new"), "new").steps is None


def test_a_checkpoint_says_when_a_run_without_a_summary_began(tmp_path):
    run = make(tmp_path / "a")
    step = run / "checkpoints" / "step_128"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"format": 1, "files": {}}')
    (step / "state.json").write_text('{"started": "2020-02-02T00:00:00+00:00"}')
    assert (row_of(run, "a").started, row_of(run, "a").steps) == ("2020-02-02T00:00:00+00:00", 128)


def test_a_run_is_running_while_its_lock_is_held_and_asking_takes_nothing(tmp_path):
    run = make(tmp_path / "a", summary=SUMMARY)
    (run / ".lock").touch()
    assert row_of(run, "a").status == "finished"  # of a process that is gone
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert [row_of(run, "a").status for _ in range(2)] == [RUNNING] * 2
    holder.communicate()
    assert row_of(run, "a").status == "finished"


def test_asking_in_the_process_that_writes_leaves_it_the_lock(tmp_path):
    directory = RunDirectory(make(tmp_path / "a"))
    directory.lock()
    assert is_held(tmp_path / "a" / ".lock")
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    words = [sys.executable, "-c", code, str(tmp_path / "a" / ".lock")]
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0
    directory.unlock()
    assert not is_held(tmp_path / "a" / ".lock")
    with (tmp_path / "other").open("wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not is_held(tmp_path / "a" / ".lock")


def test_seeds_are_one_row(tmp_path):
    for seed, value in ((5, 1.0), (10, 3.0)):
        make(tmp_path / "many" / f"seed_{seed}", rows=returns(value))
    (tmp_path / "many" / "config.json").write_text('{"env": {"id": "Game-v0"}, "seed": 5}')
    (path,) = runs_in([tmp_path])
    row = row_of(path, "many")
    assert (row.seeds, row.seed, row.steps, row.final_return, row.ranks) == (2, 5, 10, 2.0, 4)
    (tmp_path / "many" / "summary.json").write_text(json.dumps(SUMMARY | {"num_seeds": 2}))
    assert (row_of(path, "many").final_return, row_of(path, "many").seeds) == (7.5, 2)


def end(step, sha, value=1.0, status="finished"):
    """What a seed's summary says of its end."""
    return {"status": status, "global_step": step, "state_sha256": sha, "final_return": value, "world_size": 2}


STOPPED = end(20, "a", 0.5, "stopped by signal 15")


def group_of(path, listed, ends):
    """A group of which the summary lists the seeds ``listed``, and in which each seed's own tells of ``ends``."""
    for seed, own in enumerate(ends):
        make(path / f"seed_{seed}", summary=own, rows=returns(4.0))
    seeds = [{"seed": seed, "directory": f"seed_{seed}"} | found for seed, found in enumerate(listed)]
    (path / "config.json").write_text('{"env": {"id": "Game-v0"}, "seed": 0}')
    (path / "summary.json").write_text(json.dumps(STOPPED | {"final_return": 9.0, "seeds": seeds}))
    row = row_of(path, path.name)
    return row.status, row.steps, row.final_return


@pytest.mark.parametrize(
    ("listed", "ends", "told"),
    [
        ((STOPPED, STOPPED), (STOPPED, STOPPED), ("stopped by signal 15", 20, 9.0)),  # by the group's summary
        ((STOPPED, STOPPED), (end(640, "b", 1.0), end(640, "c", 3.0)), ("finished", 640, 2.0)),
        ((STOPPED, STOPPED), (STOPPED, end(640, "c", 3.5)), ("stopped by signal 15", 20, 2.0)),
        ((STOPPED, STOPPED), (end(20, "other", 1.0), STOPPED), ("stopped by signal 15", 20, 0.75)),  # of another agent
        ((STOPPED, STOPPED), (end(640, "b", 2.0), None), ("1 of 2 seeds finished", 10, 3.0)),  # one goes on
    ],
)
def test_a_group_of_which_a_seed_was_trained_further_by_itself_is_what_its_seeds_are(tmp_path, listed, ends, told):
    assert group_of(tmp_path / "many", listed, ends) == told


def test_a_seed_that_failed_counts_once_it_has_caught_up_by_itself(tmp_path):
    last = end(640, "b", 3.0)
    assert group_of(tmp_path / "failed", (STOPPED,), (STOPPED, None))[1:] == (20, 9.0)
    assert group_of(tmp_path / "before", (STOPPED,), (STOPPED, end(10, "z")))[1:] == (20, 9.0)
    assert group_of(tmp_path / "after", (last,), (last, end(640, "c", 5.0), None)) == (
        "2 of 3 seeds finished",
        640,
        4.0,
    )


def test_a_group_that_was_killed_is_finished_once_each_of_its_seeds_is(tmp_path):
    for name, ends, status in (
        ("all", (end(640, "b", 1.0), end(640, "c", 3.0)), "finished"),
        ("one", (end(640, "b", 1.0), None), NO_SUMMARY),
    ):
        group_of(tmp_path / name, (), ends)
        (tmp_path / name / "summary.json").unlink()
        assert row_of(tmp_path / name, name).status == status


@pytest.mark.parametrize(("rows", "steps"), [((3, 1, 2), 10), ((3, 2, 0), 0), ((0, 0), None)])
def test_seeds_that_are_not_equally_far_have_the_steps_that_all_have(tmp_path, rows, steps):
    for seed, count in enumerate(rows):
        make(tmp_path / "many" / f"seed_{seed}", rows=returns(*[1.0] * count))
    (tmp_path / "many" / "config.json").write_text('{"env": {"id": "Game-v0"}, "seed": 0}')
    row = row_of(tmp_path / "many", "many")
    assert (row.steps, row.final_return) == (steps, 1.0 if steps else None)


def test_what_is_no_run_is_left_out(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "file").touch()
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    assert runs_in([tmp_path]) == [a, b]
    assert runs_in([b]) == [b]
    assert runs_in([tmp_path / "pictures", tmp_path / "nothing"]) == []


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{torn", "config.json is damaged"),
        ("config.json", "[1]", "holds no object"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
        ("config.json", b"\xff\xfe{", "config.json is damaged"),
        ("summary.json", "", "summary.json is damaged"),
    ],
)
def test_a_damaged_file_is_a_problem_of_one_line(tmp_path, file, content, words):
    path = make(tmp_path / "a", summary=SUMMARY)
    (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    row = row_of(path, "a")
    assert row.problem is not None
    assert words in row.problem
    assert "\n" not in row.problem
    assert row.status == (DAMAGED if file == "config.json" else NO_SUMMARY)


@pytest.mark.parametrize("file", ["config.json", "summary.json", ".lock", "metrics.jsonl"])
def test_a_pipe_is_not_waited_for(tmp_path, file):
    path = make(tmp_path / "a")
    (path / file).unlink(missing_ok=True)
    os.mkfifo(path / file)
    problem = row_of(path, "a").problem
    assert problem == (f"{path / file} is no file" if file in ("config.json", "summary.json") else None)


def test_values_that_make_no_sense_are_unknown_and_nothing_steers_the_terminal(tmp_path):
    odd = {"status": "done\x1b[2J\n", "global_step": "x", "final_return": 1e999, "world_size": True, "started": "soon"}
    path = make(tmp_path / "a", {"env": {"id": "a\x1b]0;b"}, "seed": [1]}, odd)
    row = row_of(path, "a")
    assert (row.environment, row.status) == ("a?]0;b", "done?[2J?")
    assert [row.seed, row.steps, row.final_return, row.ranks] == [None] * 4


def test_the_order_is_highest_and_newest_first_and_unknown_last():
    rows = [
        Row("b", "b", steps=5, final_return=None, started="2026-01-01T00:00:00+00:00", size=3),
        Row("a", "a", steps=9, final_return=-1.0, started=None, size=1),
        Row("c", "c", steps=None, final_return=4.0, started="2026-02-01T00:00:00+00:00", size=2),
    ]
    expected = {"name": "abc", "return": "cab", "steps": "abc", "date": "cba", "size": "bca"}
    assert {by: "".join(row.name for row in ordered(rows, by)) for by in expected} == expected
