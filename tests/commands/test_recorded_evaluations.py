"""``eval.record_video``: an episode of each evaluation as an mp4 file, and nothing else changes."""

import importlib.util
import json
import os
from importlib.machinery import PathFinder

import numpy as np
import pytest
from command_line import EVALUATED, MODULES, SMALL, Run, copy_of, error_line, lockstep, resume, same

from lockstep.cli import main

imageio = pytest.importorskip("imageio")
pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")

RECORDED = (*EVALUATED, "--eval.record-video")
UNDRAWABLE = ("undrawable:UndrawableCartPole-v0", *SMALL, "--eval.interval", 4, "--eval.record-video")


def videos(path):
    return {file.name for file in (path / "videos").iterdir()}


def frames(path):
    return [np.asarray(frame) for frame in imageio.get_reader(path)]


def test_recording_shows_the_evaluation_and_changes_no_byte_of_the_agent(trained):
    recorded, plain = trained(*RECORDED), trained(*EVALUATED)
    same(recorded, plain)
    assert videos(recorded.path) == {"step_512.mp4", "step_1024.mp4"}
    for step in (512, 1024):
        (row,) = [m for m in recorded.metrics if m["global_step"] == step]
        pictures = frames(recorded.path / "videos" / f"step_{step}.mp4")
        assert row["eval/return_min"] <= len(pictures) <= row["eval/return_max"]  # CartPole pays 1 a step
        assert np.abs(pictures[0].astype(int) - pictures[-1]).max() > 20
    assert not (plain.path / "videos").exists()


def test_recording_on_two_ranks_is_done_by_one(trained):
    run = trained(*RECORDED, "--nproc", 2)
    same(run, trained(*EVALUATED))
    assert videos(run.path) == {"step_512.mp4", "step_1024.mp4"}
    first = frames(run.path / "videos" / "step_512.mp4")
    again = frames(trained(*RECORDED).path / "videos" / "step_512.mp4")
    assert len(first) == len(again)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_resumed_run_drops_the_videos_of_the_future_it_leaves(trained, tmp_path):
    path = copy_of(trained(*RECORDED), tmp_path / "run")
    (path / "videos" / "step_896.mp4").write_bytes(b"of a future that is left")
    (path / "videos" / "step_by_hand.mp4").write_bytes(b"somebody's own")
    resume(path / "checkpoints" / "step_768", "--stop-at-step", 896)
    assert videos(path) == {"step_512.mp4", "step_by_hand.mp4"}


def test_a_video_that_fails_later_costs_a_warning_and_no_more(trained, tmp_path):
    ended = lockstep("train", *UNDRAWABLE, "--name", "run", cwd=tmp_path, FRAMES="3")
    assert ended.code == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"lockstep: warning: {tmp_path / 'runs/run/videos/step_512.mp4'} can't be recorded: ")
    assert line.endswith("RuntimeError: the screen is gone; no more videos, training goes on")
    run = Run(tmp_path / "runs" / "run", ended)
    assert videos(run.path) == set()
    assert run.agent == trained(*EVALUATED).agent


def test_an_environment_that_cannot_be_drawn_is_refused_before_anything_starts(tmp_path):
    ended = lockstep("train", *UNDRAWABLE, "--nproc", 2, "--name", "run", cwd=tmp_path, FRAMES="0")
    assert ended.code == 2
    assert error_line(ended) == (
        "lockstep: error: eval.record_video: UndrawableCartPole-v0 can't be rendered here: "
        "RuntimeError: the screen is gone; --eval.record-video false goes on without videos"
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_of_envpool_that_began_with_videos_goes_on_without_and_none_begins(tmp_path):
    """Earlier versions showed Gymnasium's environment in its place; nothing shows EnvPool's."""
    packages = tmp_path / "packages"  # the working directory comes last, after an EnvPool that is installed
    packages.mkdir()
    (packages / "envpool.py").write_text("from late import *\n")
    paths = {"PYTHONPATH": os.pathsep.join([str(packages), str(MODULES), os.environ.get("PYTHONPATH", "")])}
    words = ("Late-v0", *SMALL, "--env.backend", "envpool", "--eval.interval", 2)
    ended = lockstep("train", *words, "--name", "run", "--stop-at-step", 512, cwd=tmp_path, **paths)
    assert ended.code == 0, ended.stderr
    run, refused = tmp_path / "runs" / "run", "eval.record_video: env.backend: envpool, which draws no pictures"
    for asking in ((*words, "--name", "other"), ("--resume", "run")):
        said = error_line(lockstep("train", *asking, "--eval.record-video", cwd=tmp_path, **paths))
        assert said.startswith(f"lockstep: error: {refused}")
    assert not (tmp_path / "runs" / "other").exists()
    config = json.loads((run / "config.json").read_text())
    config["eval"]["record_video"] = True
    (run / "config.json").write_text(json.dumps(config))
    again = (*words, "--eval.record-video", "--name", "run", "--resume", "auto")
    for asking, steps in ((("--resume", "run", "--stop-at-step", 768), 768), (again, 1024)):
        ended = lockstep("train", *asking, cwd=tmp_path, **paths)
        assert ended.code == 0, ended.stderr
        assert Run(run, ended).summary["global_step"] == steps
        (line,) = (line for line in ended.stderr.splitlines() if "videos" in line)
        assert line.startswith(f"lockstep: warning: {run}/videos/step_{steps}.mp4 can't be recorded: env.backend: env")
        assert line.endswith("; no more videos, training goes on")
    assert json.loads((run / "config.json").read_text())["eval"]["record_video"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eval.record-video",), "eval.record_video: there are no evaluations (eval.interval 0)"),
        (("--log.entity", "team"), "log.entity: team is for Weights & Biases, which is off; add --log.wandb"),
        (("--log.tags", "a"), "log.tags: no tracker takes it; add --log.wandb, --log.trackio or --log.mlflow"),
    ],
)
def test_what_would_have_no_effect_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_missing_extra_is_named_before_anything_starts(name, tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", f"--log.{name}"]) == 2
    expected = f"lockstep: error: log.{name}: needs the package {name}; pip install 'lockstep-rl[{name}]'\n"
    assert capsys.readouterr().err == expected
    assert not any(tmp_path.iterdir())


def test_a_folder_of_wandbs_files_is_not_the_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.util.find_spec
    folder = PathFinder.find_spec("wandb", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: folder if module == "wandb" else found(module))
    assert folder is not None
    assert main(["train", "CartPole-v1", "--log.wandb", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "needs the package wandb" in capsys.readouterr().err
