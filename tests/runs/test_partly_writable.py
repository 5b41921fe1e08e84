"""A run of which a part can't be written is refused before anything of it is cut."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config, EvalConfig, LogConfig, ProofConfig
from lockstep.core import files
from lockstep.core.errors import RunError
from lockstep.runs.checkpoint import to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import RunDirectory, open_run
from lockstep.runs.making import create_run

CONFIG = resolve(Config())
FILMED = EvalConfig(interval=1, record_video=True)


@pytest.fixture
def run(tmp_path):
    made = create_run(str(tmp_path), "a", CONFIG)
    made.unlock()
    for step in (100, 200):
        commit(made.checkpoints, step, to_files({}, {}, {}), None)
    (made.path / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2)))
    return made.path


def everything_in(path):
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in path.rglob("*")}


@contextlib.contextmanager
def of_another_owner(monkeypatch, folder):
    """Tests may run as root, which may write everywhere: a new file is refused in its place."""
    folder.mkdir(exist_ok=True)
    written = files.write_synced

    def refuse(path, content):
        if path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        written(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_synced", refuse)
        yield


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("folder", ["checkpoints", "tensorboard", "videos"])
def test_a_folder_of_another_owner_is_found_when_the_run_is_opened(run, monkeypatch, folder, later):
    (run / folder).mkdir(exist_ok=True)
    before = everything_in(run)
    with of_another_owner(monkeypatch, run / folder), pytest.raises(ValueError) as caught:
        open_run(run, resolve(Config(total_steps=1_000_000, eval=FILMED)), later=later)
    assert str(caught.value) == (
        f"run {run}: {folder} can't be written (Permission denied); copy the run to where you may write"
    )
    assert everything_in(run) == before
    open_run(run, CONFIG, later=later).unlock()
    assert everything_in(run) == before


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "fingerprints.jsonl", "timing.jsonl"])
def test_a_record_of_another_owner_is_found_when_the_run_is_opened(run, monkeypatch, name, later):
    (run / name).touch()
    before, may = everything_in(run), os.access
    recorded = resolve(Config(proof=ProofConfig(trace=True), log=LogConfig(timing=True)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path) != run / name and may(path, mode))
        with pytest.raises(ValueError) as caught:
            open_run(run, recorded, later=later)
    assert str(caught.value) == (
        f"run {run}: {name} can't be written (Permission denied); copy the run to where you may write"
    )
    assert everything_in(run) == before
    open_run(run, recorded, later=later).unlock()


def test_a_run_on_a_full_disk_is_not_to_be_copied(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lockstep.runs.directory.try_json", full)
    with pytest.raises(ValueError) as caught:
        open_run(run, CONFIG, later=True)
    assert str(caught.value) == f"run {run}: config.json can't be written (the disk is full); free some space"


def test_records_that_are_not_appended_to_are_not_asked_for(run, monkeypatch):
    (run / "timing.jsonl").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name not in ("timing.jsonl", "fingerprints.jsonl"))
    open_run(run, CONFIG).unlock()


def test_a_folder_of_videos_is_not_asked_for_where_none_are_recorded(run, monkeypatch):
    (run / "videos").mkdir()
    (run / "videos" / "step_100.mp4").touch()
    with of_another_owner(monkeypatch, run / "videos"):
        open_run(run, CONFIG).unlock()
        RunDirectory(run).cut_after(1, 100, LogConfig())
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step_100"]
    assert (run / "videos" / "step_100.mp4").exists()


def test_a_video_that_stays_keeps_what_comes_after_the_point_too(run, monkeypatch):
    (run / "videos").mkdir()
    (run / "videos" / "step_200.mp4").touch()
    before = everything_in(run)
    with of_another_owner(monkeypatch, run / "videos"), pytest.raises(RunError) as caught:
        RunDirectory(run).cut_after(1, 100, LogConfig())
    assert str(caught.value) == (
        f"{run}/videos/step_200.mp4 comes after what the run goes on from and can't be removed (Permission denied); "
        "remove it, or copy the run to where you may write"
    )
    assert everything_in(run) == before
    RunDirectory(run).cut_after(1, 100, LogConfig())
    assert not (run / "videos" / "step_200.mp4").exists()


def test_a_checkpoint_that_stays_keeps_the_rows_after_it(run, monkeypatch):
    renamed = Path.rename

    def refuse(path, target):
        if path.name == "step_200":
            raise PermissionError(13, "Permission denied", str(path))
        return renamed(path, target)

    before = everything_in(run)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError) as caught:
        RunDirectory(run).cut_after(1, 100, LogConfig())
    assert str(caught.value) == (
        f"{run}/checkpoints/step_200 comes after what the run goes on from and can't be removed (Permission denied); "
        "remove it, or copy the run to where you may write"
    )
    assert everything_in(run) == before
    monkeypatch.undo()
    RunDirectory(run).cut_after(1, 100, LogConfig())
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step_100"]
