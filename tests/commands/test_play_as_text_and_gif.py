"""``lockstep play``: Snake as text, and as a gif."""

import json
import re

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.core.shards import keyed_seed
from lockstep.policies.videos import CLEAR, Terminal


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


def test_a_terminal_shows_one_text_in_place_of_another(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Terminal(fps=1000).append_data("board")
    assert capsys.readouterr().out == f"{CLEAR}board\n"


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
