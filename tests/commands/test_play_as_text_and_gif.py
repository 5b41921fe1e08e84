"""``lockstep play``: Snake as text, and as a gif."""

import errno
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from command_line import command, surroundings

from lockstep.cli import main
from lockstep.commands.play import _reason
from lockstep.config.run import EnvConfig
from lockstep.core.shards import keyed_seed
from lockstep.policies.terminal import CLEAR, HINT, Terminal
from lockstep.policies.videos import drawn_environment


@pytest.fixture(scope="module")
def snake(tmp_path_factory):
    """A run of Snake that learnt next to nothing."""
    runs = tmp_path_factory.mktemp("runs")
    words = ("--env.kwargs", '{"size": 4}', "--num-envs", "8", "--num-steps", "8", "--total-steps", "64")
    small = (
        "--ppo.num-minibatches",
        "4",
        "--network.image.width",
        "0.1",
        "--runs-dir",
        str(runs),
        "--name",
        "a",
        "--quiet",
        "--log.no-tensorboard",
    )
    assert main(["train", "Snake-v0", *words, *small]) == 0
    return runs / "a"


def test_every_step_is_written_as_text(snake, capsys):
    assert main(["play", str(snake), "--terminal"]) == 0
    *boards, last = capsys.readouterr().out.splitlines()
    assert len(boards) % 7 == 0  # a border, four rows, a border, the score
    assert boards[:7] == ["+-------+", *boards[1:5], "+-------+", "score 0"]
    assert sum(row.count("@") for row in boards) == len(boards) // 7
    assert re.fullmatch(rf"lockstep/Snake-v0: return \S+ \(score \d+, {len(boards) // 7} steps\)", last)


def test_the_episodes_shown_are_those_that_an_evaluation_counts(snake, capsys, tmp_path):
    words = ("--episodes", "3", "--seed", "4")
    assert main(["eval", str(snake), *words, "--json", str(tmp_path / "a.json")]) == 0
    capsys.readouterr()
    assert main(["play", str(snake), *words, "--terminal"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["per_episode"]
    columns = zip(found["return"], found["score"], found["length"], strict=True)
    said = ", ".join(f"return {total:,.2f} (score {score:.0f}, {length} steps)" for total, score, length in columns)
    assert capsys.readouterr().out.splitlines()[-1] == f"lockstep/Snake-v0: {said}"


def test_a_terminal_shows_one_text_in_place_of_another(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.fileno", lambda: -1, raising=False)  # input comes from nowhere: no keys
    Terminal(fps=1000).append_data("board")
    assert capsys.readouterr().out == f"{CLEAR}board\n{HINT.format('Ctrl-C')}\n"


@pytest.mark.parametrize(("key", "code"), [(b"xq", 0), (b"\x03", 130)])
def test_keys_end_it(snake, key, code, tmp_path):
    """In a terminal of its own, which gets back its settings; another key does nothing."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    words = [*command("play", snake, "--terminal", "--episodes", 10_000)]
    pipes: Any = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE}
    start = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    wrapped = [sys.executable, "-c", start, *words]
    process = subprocess.Popen(wrapped, env=surroundings("play"), cwd=tmp_path, start_new_session=True, **pipes)
    try:
        shown = b""
        while HINT.format("q or Ctrl-C").encode() not in shown:
            shown += os.read(ours, 65536)
        assert termios.tcgetattr(theirs)[3] != before[3]
        os.write(ours, key)
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        errors = process.stderr.read().decode() if process.stderr else ""
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    assert errors == ("" if code == 0 else "lockstep: error: interrupted\n")
    assert termios.tcgetattr(theirs) == before


@pytest.mark.parametrize(
    "values",
    [
        {"id": "HalfCheetah-v5"},
        {"id": "CartPole-v1"},
        {"id": "lockstep/CartPole-v1"},
        {"id": "lockstep/Pendulum-v1", "backend": "jax"},
    ],
)
def test_what_has_no_text_is_refused_with_a_way_out(values):
    with pytest.raises(ValueError) as caught:
        drawn_environment(EnvConfig.model_validate(values), "ansi")
    assert str(caught.value) == f"{values['id']} can't be shown as text; --video out.mp4 (or .gif) shows it"


def test_what_has_text_is_not():
    with closing(drawn_environment(EnvConfig(id="lockstep/GridWorld-v0"), "ansi")) as env:
        env.reset(seed=0)
        assert "\n" in env.render()


def test_a_gif_has_a_frame_of_every_step(snake, tmp_path, capsys):
    imageio = pytest.importorskip("imageio")
    video = tmp_path / "new" / "out.gif"
    assert main(["play", str(snake), "--video", str(video)]) == 0
    assert main(["eval", str(snake), "--episodes", "1", "--json", str(tmp_path / "out.json")]) == 0
    capsys.readouterr()
    assert main(["play", str(snake), "--terminal"]) == 0
    boards = capsys.readouterr().out.count("\nscore ")
    frames = [np.asarray(frame) for frame in imageio.get_reader(video)]
    assert frames[0].shape[:2] == (480, 480)
    assert len(frames) == len({frame.tobytes() for frame in frames}) == boards
    assert json.loads((tmp_path / "out.json").read_text())["environment"] == "lockstep/Snake-v0"
    assert keyed_seed(0, "eval", 0) != keyed_seed(0, "eval", 1)


def test_why_a_video_cannot_be_written_is_the_files_own_reason(tmp_path):
    """What ffmpeg leaves behind is a broken pipe and pages of its own."""
    broken = BrokenPipeError(errno.EPIPE, "Broken pipe\n  x264 [info]: using cpu capabilities")
    (tmp_path / "file").touch()
    assert _reason(tmp_path / "file" / "out.mp4", broken) == f"{tmp_path / 'file'} is no directory"
    assert _reason(tmp_path / "made" / "out.mp4", broken) == "Broken pipe x264 [info]: using cpu capabilities"
    assert list((tmp_path / "made").iterdir()) == []
