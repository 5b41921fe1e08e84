"""What is removed of old checkpoints, and what is read again to decide it."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.runs import pruning
from lockstep.runs.checkpoint import best_of, checkpoints_in, pack, problem_with, step_of, to_files
from lockstep.runs.checkpoint_writer import CheckpointWriter, commit
from lockstep.runs.pruning import Pruner, remove_checkpoint


def save(directory, step, score=None, **facts):
    files = to_files({"policy/w": np.full(3, step, np.float32)}, {0: pack({"x": np.ones(2)})}, {"step": step})
    return commit(directory, step, files, score, facts)


def steps_in(directory):
    return sorted(step_of(path) or 0 for path in checkpoints_in(directory))


@pytest.fixture
def read(monkeypatch):
    """Names of the checkpoints that were read whole."""
    names, problem_with = [], pruning.problem_with
    monkeypatch.setattr(pruning, "problem_with", lambda path: names.append(path.name) or problem_with(path))
    return names


def test_each_checkpoint_is_read_once(tmp_path, read):
    prune = Pruner(tmp_path, keep_last=2, keep_best=False)
    for step in range(1, 6):
        save(tmp_path, step)
        prune()
    assert steps_in(tmp_path) == [4, 5]
    assert read == [f"step_{step}" for step in range(1, 6)]


def test_what_a_stop_or_the_clock_saves_pushes_no_planned_one_out(tmp_path, read):
    prune = Pruner(tmp_path, keep_last=2, keep_best=False)
    for step, planned in ((3, True), (4, False), (6, True), (7, False), (8, False), (9, True), (10, False)):
        save(tmp_path, step, 9.0 - step, planned=planned)
        prune()
        kept = steps_in(tmp_path)
        if step == 8:
            assert kept == [3, 6, 7, 8]  # never fewer of the newest, whatever they are
    assert kept == [6, 9, 10]
    assert best_of(tmp_path) == tmp_path / "step_6"  # as if nothing had stopped the run
    assert len(read) == len(set(read))
    (tmp_path / "step_9" / "state.json").unlink()
    prune()
    assert steps_in(tmp_path) == [6, 10]


def test_checkpoints_of_a_version_that_planned_nothing_count_as_planned(tmp_path):
    prune = Pruner(tmp_path, keep_last=1, keep_best=False)
    for step, facts in ((3, {}), (4, {"planned": False})):
        save(tmp_path, step, **facts)
        prune()
    assert steps_in(tmp_path) == [3, 4]


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("name", ["policy.safetensors", "envs/shard_0.safetensors"])
def test_one_that_is_damaged_later_is_read_again_and_takes_no_place(tmp_path, read, name, same_size):
    prune = Pruner(tmp_path, keep_last=2, keep_best=False)
    for step in (1, 2):
        save(tmp_path, step)
    prune()
    file = tmp_path / "step_2" / name
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content if same_size else content[:-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of its change tells all the same
    save(tmp_path, 3)
    prune()
    assert steps_in(tmp_path) == [1, 3]
    assert read.count("step_2") == 2
    assert read.count("step_1") == 1


def test_one_that_has_lost_a_file_or_its_manifest_takes_no_place(tmp_path):
    prune = Pruner(tmp_path, keep_last=2, keep_best=False)
    for step in (1, 2, 3):
        save(tmp_path, step)
    prune()
    assert steps_in(tmp_path) == [2, 3]
    (tmp_path / "step_3" / "state.json").unlink()
    save(tmp_path, 4)
    prune()
    assert steps_in(tmp_path) == [2, 4]
    (tmp_path / "step_4" / "manifest.json").unlink()
    save(tmp_path, 5)
    prune()
    assert steps_in(tmp_path) == [2, 4, 5]  # what has no manifest may be somebody else's


def test_a_checkpoint_that_another_takes_the_place_of_is_read_again(tmp_path, read):
    prune = Pruner(tmp_path, keep_last=2, keep_best=True)
    save(tmp_path, 1, score=1.0)
    save(tmp_path, 2, score=9.0)
    prune()
    (tmp_path / "step_2").rename(tmp_path / "elsewhere")
    save(tmp_path, 2, score=0.0)
    save(tmp_path, 3, score=0.5)
    prune()
    assert steps_in(tmp_path) == [1, 2, 3]  # the best is 1 now
    assert read.count("step_2") == 2
    assert read.count("step_1") == 1


@pytest.mark.parametrize(("replaced", "left"), [(True, [3]), (False, [2, 3])])
def test_a_manifest_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, replaced, left):
    save(tmp_path, 1, score=1.0)
    save(tmp_path, 2, score=9.0)
    manifest_of, elsewhere = pruning.manifest_of, tmp_path / "elsewhere"

    def read_meanwhile(path):
        found = manifest_of(path)
        if replaced and path.name == "step_2" and not elsewhere.exists():
            path.rename(elsewhere)
            save(tmp_path, 2, score=0.0)
        return found

    monkeypatch.setattr(pruning, "manifest_of", read_meanwhile)
    prune = Pruner(tmp_path, keep_last=1, keep_best=True)
    prune()
    save(tmp_path, 3, score=0.5)
    prune()
    assert steps_in(tmp_path) == left


class KilledError(BaseException):
    """In the place of SIGKILL."""


def test_one_whose_removal_is_interrupted_is_gone_and_the_rest_goes_with_the_next_start(tmp_path, monkeypatch):
    def killed(path, ignore_errors=False):
        if path.exists():
            (path / "manifest.json").unlink()
            raise KilledError

    for step in (1, 2, 3):
        save(tmp_path, step)
    pruner = Pruner(tmp_path, keep_last=2, keep_best=False)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            pruner()
    assert steps_in(tmp_path) == [2, 3]
    assert len(list(tmp_path.iterdir())) == 3
    CheckpointWriter(tmp_path, keep_last=2, keep_best=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_one_that_cant_be_renamed_stays_whole(tmp_path, monkeypatch):
    def refuse(path, target):
        raise PermissionError(13, "Permission denied", str(path))

    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(Path, "rename", refuse)
    Pruner(tmp_path, keep_last=1, keep_best=False)()
    assert steps_in(tmp_path) == [1, 2]
    assert problem_with(tmp_path / "step_1") is None


def test_what_an_earlier_process_of_this_number_left_is_in_nobodys_way(tmp_path):
    save(tmp_path, 1)
    left = tmp_path / f".step_1.{os.getpid()}.tmp"
    left.mkdir()
    (left / "state.json").touch()
    remove_checkpoint(tmp_path / "step_1")
    assert list(tmp_path.iterdir()) == []
