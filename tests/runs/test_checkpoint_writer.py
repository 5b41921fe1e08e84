import errno
import json
import os
import threading

import numpy as np
import pytest

from lockstep.runs import checkpoint_writer
from lockstep.runs.checkpoint import (
    CheckpointError,
    checkpoints_in,
    find_checkpoint,
    pack,
    problem_with,
    step_of,
    to_files,
)
from lockstep.runs.checkpoint_writer import CheckpointWriter, aside_of, commit, sync_records, write_directory
from lockstep.runs.pruning import Pruner


def files_of(step):
    return to_files({"policy/w": np.full(3, step, np.float32)}, {0: pack({"x": np.ones(2)})}, {"iteration": step})


def steps_in(directory):
    return sorted(step_of(path) or 0 for path in checkpoints_in(directory))


def write_all(directory, scores, keep_last=3, keep_best=True):
    writer = CheckpointWriter(directory, keep_last, keep_best)
    for step, score in scores:
        writer.save(step, files_of(step), score)
    writer.wait()
    return writer


def leftovers(directory):
    return [path.name for path in directory.glob(".*")]


# ---- committing


def test_what_is_saved_is_there_after_waiting_and_nothing_else_is(tmp_path):
    write_all(tmp_path, [(10, 1.0)])
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]
    assert problem_with(tmp_path / "step_10") is None
    assert find_checkpoint(tmp_path).state == {"iteration": 10}
    assert json.loads((tmp_path / "step_10" / "manifest.json").read_text())["score"] == 1.0


@pytest.mark.parametrize("fails", ["step_1", "kept.txt", "fsync"])
def test_what_was_moved_aside_is_put_back_if_its_successor_fails(tmp_path, monkeypatch, fails):
    path = commit(tmp_path, 1, files_of(1), None)
    (path / "kept.txt").write_text("mine")
    (path / "other.txt").write_text("also mine")
    keep, rename, synced = ["other.txt", "kept.txt"], type(path).rename, checkpoint_writer.sync_path

    def renamed(one, target):
        if target.name == fails and one.parent.name in (tmp_path.name, ".step_1.old") and one.suffix != ".old":
            raise OSError(errno.EIO, "Input/output error")
        return rename(one, target)

    def sync(where):
        if fails == "fsync" and where == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        return synced(where)

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "rename", renamed)
        patch.setattr(checkpoint_writer, "sync_path", sync)
        with pytest.raises(CheckpointError, match="earlier checkpoints are untouched"):
            write_directory(path, files_of(2), {}, keep)
    assert find_checkpoint(tmp_path).state == {"iteration": 1}
    assert {(path / name).read_text() for name in keep} == {"mine", "also mine"}
    assert leftovers(tmp_path) == []
    write_directory(path, files_of(2), {}, keep)
    assert find_checkpoint(tmp_path).state == {"iteration": 2}
    assert (path / "kept.txt").read_text() == "mine"


def test_an_older_one_aside_does_not_replace_what_is_there(tmp_path, monkeypatch):
    commit(tmp_path, 1, files_of(1), None).rename(aside_of(tmp_path / "step_1"))
    path = commit(tmp_path, 1, files_of(2), None)
    commit(tmp_path, 3, files_of(3), None).rename(aside_of(path))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_synced", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "")))
        with pytest.raises(CheckpointError, match="the disk is full"):
            write_directory(path, files_of(4), {})
    assert find_checkpoint(tmp_path).state == {"iteration": 2}


def test_what_a_crash_has_left_aside_is_back_in_its_place_at_the_next_start(tmp_path):
    for step in (1, 2):
        commit(tmp_path, step, files_of(step), None).rename(aside_of(tmp_path / f"step_{step}"))
    commit(tmp_path, 2, files_of(7), None)
    CheckpointWriter(tmp_path, 3, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert find_checkpoint(tmp_path, "1").state == {"iteration": 1}
    assert find_checkpoint(tmp_path, "2").state == {"iteration": 7}


def test_a_valid_checkpoint_of_the_step_stays_and_a_damaged_one_is_replaced(tmp_path):
    path = commit(tmp_path, 1, files_of(1), None)
    commit(tmp_path, 1, files_of(2), None)
    assert find_checkpoint(tmp_path).state == {"iteration": 1}
    (path / "state.json").write_text("{}")
    commit(tmp_path, 1, files_of(3), None)
    assert find_checkpoint(tmp_path).state == {"iteration": 3}


def test_a_torn_temporary_directory_is_ignored_and_removed_by_the_next_writer(tmp_path, capsys):
    commit(tmp_path, 1, files_of(1), None)
    torn = tmp_path / ".step_2.12345.tmp"
    (torn / "envs").mkdir(parents=True)
    (torn / "policy.safetensors").write_bytes(b"half of i")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints_in(tmp_path) == [tmp_path / "step_1"]
    assert find_checkpoint(tmp_path).state == {"iteration": 1}
    assert capsys.readouterr().err == ""
    assert torn.is_dir()
    CheckpointWriter(tmp_path, keep_last=3, keep_best=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_1"]


# ---- pruning


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(1, False, [5]), (2, False, [4, 5]), (1, True, [2, 5]), (2, True, [2, 4, 5]), (9, True, [1, 2, 3, 4, 5])],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, keep_best, kept):
    write_all(tmp_path, [(1, 1.0), (2, 9.0), (3, None), (4, 2.0), (5, 3.0)], keep_last, keep_best)
    assert steps_in(tmp_path) == kept
    assert all(problem_with(path) is None for path in checkpoints_in(tmp_path))


def test_the_best_goes_when_a_better_one_comes(tmp_path):
    write_all(tmp_path, [(1, 5.0), (2, 1.0), (3, 6.0), (4, 1.0), (5, 2.0)], keep_last=1)
    assert steps_in(tmp_path) == [3, 5]


def test_without_scores_nothing_is_best(tmp_path):
    write_all(tmp_path, [(1, None), (2, None)], keep_last=1)
    assert steps_in(tmp_path) == [2]


def test_pruning_leaves_other_things_alone(tmp_path):
    commit(tmp_path, 1, files_of(1), None)
    commit(tmp_path, 2, files_of(2), None)
    (tmp_path / "step_old").mkdir()
    Pruner(tmp_path, keep_last=1, keep_best=False)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_old"]


def test_a_damaged_newer_one_never_costs_the_one_just_written(tmp_path):
    """A run whose newest checkpoint was damaged resumes from an older one and may stop before it gets there again."""
    write_all(tmp_path, [(100, None), (300, None)], keep_last=2)
    (tmp_path / "step_300" / "policy.safetensors").write_bytes(b"")
    assert find_checkpoint(tmp_path, warn=False).path == tmp_path / "step_100"
    write_all(tmp_path, [(200, None)], keep_last=1)
    assert find_checkpoint(tmp_path, warn=False).path == tmp_path / "step_200"


def test_a_damaged_manifest_of_another_checkpoint_fails_no_save(tmp_path):
    write_all(tmp_path, [(1, 1.0)])
    (tmp_path / "step_1" / "manifest.json").write_text("[]")
    write_all(tmp_path, [(2, 2.0)])
    assert find_checkpoint(tmp_path, warn=False).path == tmp_path / "step_2"


# ---- in the background


def test_saving_goes_on_in_the_background_and_one_at_a_time(tmp_path, monkeypatch):
    may_go, under_way, most = threading.Event(), [], []

    def slow_commit(*arguments):
        under_way.append(1)
        most.append(len(under_way))
        assert may_go.wait(600)
        try:
            return commit(*arguments)
        finally:
            under_way.pop()

    monkeypatch.setattr(checkpoint_writer, "commit", slow_commit)
    writer = CheckpointWriter(tmp_path, 3, True)
    writer.save(1, files_of(1), None)  # comes back although it can't be done
    assert steps_in(tmp_path) == []
    may_go.set()
    writer.save(2, files_of(2), None)  # waits for the first
    assert 1 in steps_in(tmp_path)
    writer.wait()
    assert steps_in(tmp_path) == [1, 2]
    assert most == [1, 1]


def test_what_is_saved_is_what_the_arrays_were_when_it_was_asked_for(tmp_path):
    weights = np.ones(3, np.float32)
    files = to_files({"policy/w": weights}, {}, {})
    weights[:] = 2
    writer = CheckpointWriter(tmp_path, 3, True)
    writer.save(1, files, None)
    writer.wait()
    np.testing.assert_array_equal(find_checkpoint(tmp_path).arrays["policy/w"], np.ones(3))


# ---- when it can't be written


def assert_one_line_about(error, path):
    assert "\n" not in str(error)
    assert str(path) in str(error)
    assert "earlier checkpoints are untouched" in str(error)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "checkpoints", 3, True)
    writer.save(1, files_of(1), None)
    with pytest.raises(CheckpointError) as caught:
        writer.wait()
    assert_one_line_about(caught.value, tmp_path / "checkpoints" / "step_1")
    assert (tmp_path / "checkpoints").read_text() == "in the way"
    writer.wait()  # told once


def test_a_failure_comes_out_at_the_next_save_and_the_earlier_ones_stay(tmp_path):
    writer = write_all(tmp_path, [(1, None)])
    (tmp_path / "step_2").write_text("in the way")
    writer.save(2, files_of(2), None)
    with pytest.raises(CheckpointError) as caught:
        writer.save(3, files_of(3), None)
    assert_one_line_about(caught.value, tmp_path / "step_2")
    assert find_checkpoint(tmp_path).path == tmp_path / "step_1"
    assert leftovers(tmp_path) == []
    writer.save(4, files_of(4), None)
    writer.wait()
    assert find_checkpoint(tmp_path).path == tmp_path / "step_4"


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, os.strerror(errno.EIO))])
def test_a_disk_that_fails_half_way_leaves_no_half_checkpoint(tmp_path, monkeypatch, number, text):
    write_all(tmp_path, [(1, None)])
    calls = []

    def failing_fsync(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(CheckpointError) as caught:
        commit(tmp_path, 2, files_of(2), None)
    assert_one_line_about(caught.value, tmp_path / "step_2")
    assert text in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert problem_with(tmp_path / "step_1") is None


def test_replacing_a_damaged_checkpoint_fails_without_touching_the_others(tmp_path, monkeypatch):
    write_all(tmp_path, [(1, None), (2, None)])
    (tmp_path / "step_2" / "state.json").write_text("{}")

    def no_rename(*_):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("pathlib.Path.rename", no_rename)
    with pytest.raises(CheckpointError):
        commit(tmp_path, 2, files_of(2), None)
    assert leftovers(tmp_path) == []
    assert find_checkpoint(tmp_path, warn=False).path == tmp_path / "step_1"


def test_everything_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """At the moment of the rename every file has been flushed, and the directories that name them."""
    synced, expected = set(), None
    real_fsync, real_rename = os.fsync, type(tmp_path).rename

    def fsync(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        real_fsync(handle)

    def rename(self, target):
        nonlocal expected
        expected = {str(self), *(str(path) for path in self.rglob("*"))}
        assert expected <= synced
        return real_rename(self, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to know which file is flushed")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("pathlib.Path.rename", rename)
    commit(tmp_path, 1, files_of(1), None)
    assert expected is not None
    assert len(expected) == 8  # the directory, envs/, five files and the manifest
    assert str(tmp_path) in synced


def test_a_rank_that_does_not_write_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = CheckpointWriter(None, 1, False, check=lambda: pytest.fail("the run isn't its to write"))
    writer.save(1, files_of(1), 1.0)
    writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_of_the_logs_that_a_checkpoint_counts_on_the_first_must_be_there(tmp_path):
    """Another may not have begun; without the metrics, a resumed run would have rows of which nobody knows."""
    first, second = tmp_path / "metrics.jsonl", tmp_path / "proof.jsonl"
    first.touch()
    sync_records([first, second])
    first.unlink()
    second.touch()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl can't be written: No such file"):
        sync_records([first, second])
