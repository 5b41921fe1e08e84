"""Environments that only JAX steps, from the command line: trained on several devices, evaluated, recorded."""

import json

import numpy as np
import pytest
from command_line import error_line, lockstep, trained

pytestmark = pytest.mark.exact

__all__ = ["trained"]

SIZES = ("--num-envs", 4, "--num-steps", 8, "--total-steps", 128, "--ppo.num-epochs", 1, "--ppo.num-minibatches", 1)
EVALUATED = ("--eval.interval", 2, "--eval.episodes", 4, "--eval.max-steps", 20)
CORRIDOR = ("corridors:Painted", "--env.backend", "jax", "--engine", "jax", *SIZES, *EVALUATED)


def evaluations(run):
    return [
        {k[5:]: v for k, v in row.items() if k.startswith("eval/")} for row in run.metrics if "eval/episodes" in row
    ]


@pytest.fixture(scope="module")
def corridor(trained):
    return trained(*CORRIDOR, "--simulate-devices", 2)


def test_it_is_evaluated_while_it_trains_and_afterwards(corridor, tmp_path):
    found = evaluations(corridor)
    assert len(found) == 2
    ended = lockstep("eval", corridor.path, "--episodes", 4, "--json", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    after = json.loads(ended.stdout)
    assert {k: after[k] for k in found[-1]} == found[-1]
    assert found[-1]["success_rate"] in (0.0, 1.0)
    assert found[-1]["return_mean"] == pytest.approx(
        1 - 0.1 * found[-1]["length_mean"] if found[-1]["success_rate"] else -2.0
    )


def test_the_number_of_devices_changes_nothing(trained, corridor):
    four = trained(*CORRIDOR, "--simulate-devices", 4)
    assert four.agent == corridor.agent
    assert four.metrics == corridor.metrics


def test_it_is_recorded(corridor, tmp_path):
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    ended = lockstep("play", corridor.path, "--video", tmp_path / "out.mp4", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stderr == ""
    frames = [np.asarray(frame) for frame in imageio.get_reader(tmp_path / "out.mp4")]
    assert len(frames) == evaluations(corridor)[-1]["length_mean"]


def test_what_cannot_be_drawn_starts_no_run_that_records(tmp_path):
    words = ("corridors:Corridor", *CORRIDOR[1:], "--eval.record-video")
    line = error_line(lockstep("train", *words, "--name", "x", cwd=tmp_path))
    assert "eval.record_video: corridors:Corridor can't be drawn: it has no render(state, params)" in line
    assert not (tmp_path / "runs").exists()
