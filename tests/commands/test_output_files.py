"""Files that commands are asked to write: other files are kept, and their own until the new ones are whole."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from command_line import CARTPOLE, SMALL
from commands_here import printed, refused

from lockstep.policies.results import check_files

RANDOM = ("eval", "CartPole-v1", "--policy", "random", "--episodes", 3)


@pytest.fixture
def run(trained, tmp_path):
    """A run to write into."""
    shutil.copytree(trained(*CARTPOLE).path, tmp_path / "run")
    return tmp_path / "run"


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--json", "config.json"),
        ("--json", "checkpoints/step_1024/manifest.json"),
        ("--csv", "metrics.csv"),
        ("--json", "verify.json"),
    ],
)
def test_a_runs_own_files_are_not_overwritten(run, capsys, option, file):
    kept = contents(run)
    assert f"{option[2:]}: {run / file} is " in refused(capsys, "eval", run, option, run / file)
    if option == "--json":
        said = refused(capsys, "compare", run, run, "--episodes", 2, "--json", run / file)
        assert f"json: {run / file} is " in said
    assert contents(run) == kept


def test_other_files_are_not_overwritten(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.json", "a.csv", "a.png", "a.npz"):
        (tmp_path / name).write_text('{"mine": 1}')
    kept = contents(tmp_path)
    for option, name in (("--json", "a.json"), ("--csv", "a.csv"), ("--histogram", "a.png")):
        said = refused(capsys, *RANDOM, option, tmp_path / name)
        assert f"{option[2:]}: {tmp_path / name} is there and n" in said
        assert said.endswith(", and would be lost; name another file\n")
    said = refused(capsys, "record", "CartPole-v1", "--policy", "random", "--out", tmp_path / "a.npz")
    assert f"recording: {tmp_path / 'a.npz'} is there and no recording, and would be lost" in said
    os.mkfifo(tmp_path / "pipe.json")  # which would be waited for
    assert "is there and no evaluation, and would be lost" in refused(capsys, *RANDOM, "--json", tmp_path / "pipe.json")
    assert contents(tmp_path) == kept


def test_an_evaluation_takes_no_comparisons_place(capsys, tmp_path):
    one, both = tmp_path / "one.json", tmp_path / "both.json"
    printed(capsys, *RANDOM, "--json", one)
    printed(capsys, "compare", one, one, "--json", both)
    kept = contents(tmp_path)
    line = f"json: {both} is there and no evaluation, and would be lost; name another file"
    assert line in refused(capsys, *RANDOM, "--json", both)
    assert contents(tmp_path) == kept


def test_a_checkpoint_is_not_overwritten_by_a_recording(run, capsys):
    kept, arrays = contents(run), next(run.rglob("*.safetensors"))
    assert "no recording, and would be lost" in refused(capsys, "record", run, "--episodes", 1, "--out", arrays)
    assert contents(run) == kept


def test_what_a_command_wrote_takes_the_place_of_what_it_wrote_before(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {option: tmp_path / f"a.{option}" for option in ("json", "csv", "png", "svg", "pdf", "npz", "safetensors")}
    found = []
    for episodes in (3, 4):
        words = (*RANDOM[:-1], episodes)
        printed(capsys, *words, "--json", files["json"], "--csv", files["csv"])
        for picture in ("png", "svg", "pdf"):
            printed(capsys, *words, "--histogram", files[picture])
        for recording in ("npz", "safetensors"):
            printed(capsys, "record", *words[1:], "--out", files[recording])
        found.append(contents(tmp_path))
    assert found[0].keys() == found[1].keys() == set(files.values())
    assert all(found[0][file] != found[1][file] for file in files.values())


def test_behind_a_link_the_file_is_written(capsys, tmp_path):
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    printed(capsys, *RANDOM, "--json", tmp_path / "a.json")
    assert (tmp_path / "a.json").is_symlink()
    assert len(json.loads((tmp_path / "b.json").read_text())["per_episode"]["return"]) == 3


def test_a_full_disk_leaves_what_was_there(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        words = ("--json", tmp_path / f"{name}.json", "--csv", tmp_path / f"{name}.csv")
        printed(capsys, *RANDOM, *words, "--histogram", tmp_path / f"{name}.png")
    record = ("record", *RANDOM[1:], "--out", tmp_path / "a.npz")
    compare = ("compare", tmp_path / "a.json", tmp_path / "b.json", "--json", tmp_path / "c.json")
    printed(capsys, *record)
    printed(capsys, *compare)
    kept = contents(tmp_path)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    for option, name in (("--json", "a.json"), ("--csv", "a.csv"), ("--histogram", "a.png")):
        said = refused(capsys, *RANDOM, option, tmp_path / name, code=1)
        assert f"{tmp_path / name} can't be written: the disk is full" in said
    for words in (record, compare):
        assert f"{words[-1]} can't be written: the disk is full" in refused(capsys, *words, code=1)
    assert contents(tmp_path) == kept


def test_a_video_that_fails_half_way_leaves_the_one_before(trained, capsys, tmp_path, monkeypatch):
    pytest.importorskip("pygame")
    imageio = pytest.importorskip("imageio")
    path, video = trained("faulty:FaultyCartPole-v0", *SMALL).path, tmp_path / "out.gif"
    printed(capsys, "play", path, "--video", video)
    kept = contents(tmp_path)
    assert kept.keys() == {video}
    monkeypatch.setenv("FAULT", "step")
    assert "the motor is gone" in refused(capsys, "play", path, "--video", video, code=1)
    assert contents(tmp_path) == kept
    monkeypatch.delenv("FAULT")
    printed(capsys, "play", path, "--video", video, "--episodes", 2)
    frames = [len(np.asarray(imageio.mimread(file, memtest=False))) for file in (video, kept[video])]
    assert frames[0] > frames[1] > 1


def test_rewards_that_are_no_numbers_are_neither_evaluated_nor_recorded(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "nan reward")
    faulty = ("faulty:FaultyCartPole-v0", "--policy", "random", "--episodes", 3)
    line = "environment faulty:FaultyCartPole-v0 gave reward nan in step 1 of episode 0; lockstep check faulty:Faulty"
    for words in (("eval", *faulty, "--json", tmp_path / "a.json"), ("record", *faulty, "--out", tmp_path / "a.npz")):
        assert line in refused(capsys, *words, code=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((*RANDOM, "--json", "a.json"), "json"),
        ((*RANDOM, "--csv", "a.csv"), "csv"),
        ((*RANDOM, "--histogram", "a.png"), "histogram"),
        (("record", "CartPole-v1", "--policy", "random", "--out", "a.npz"), "out"),
        (("compare", "a", "b", "--json", "a.json"), "json"),
        (("compare", "a", "b", "--plot", "a.png"), "plot"),
        (("plot", "a", "--out", "a.png"), "out"),
        (("export", "a", "--onnx", "a.onnx"), "--onnx"),
        (("export", "a", "--torch", "a.pt2"), "--torch"),
        (("plan", "CartPole-v1", "--on", "cpu:1", "--name", "a", "--runs-dir", ""), "runs_dir"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_played(capsys, tmp_path, words, option):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "new" / words[-1]
    given = (*words[:-1], place)
    said = refused(capsys, *given)
    written = place / "a" if words[0] == "plan" else place
    assert said == f"lockstep: error: {option}: {written} can't be written: {tmp_path / 'file'} is no directory\n"


def test_a_directory_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=f"^json: {tmp_path}/new/a.json can't be written: {tmp_path} doesn't let you"):
        check_files(tmp_path / "new" / "a.json", None, None)


def test_an_empty_file_has_nothing_to_lose(tmp_path):
    """As ``mktemp`` makes it."""
    (tmp_path / "made.json").touch()
    check_files(tmp_path / "made.json", None, None)
    (tmp_path / "made.json").write_text("{}")
    with pytest.raises(ValueError, match=r"made.json is there"):
        check_files(tmp_path / "made.json", None, None)
