"""Environments with one mistake each: a run names environment, step and value, or the line to mend."""

import re

import pytest
from command_line import SMALL, error_line, lockstep, metrics_of

ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.long)])


def train(tmp_path, name, *words):
    return lockstep("train", f"unfit:{name}-v0", *SMALL, "--name", "run", *words, cwd=tmp_path)


@ENGINES
def test_a_reward_that_is_no_number_is_not_blamed_on_the_learning_rate(tmp_path, engine):
    line = error_line(train(tmp_path, "Endless", "--engine", engine))
    assert "environment 0 (unfit:Endless-v0) gave reward -inf in step" in line
    assert "of iteration" in line
    assert "learning_rate" not in line


@ENGINES
def test_nor_is_an_observation(tmp_path, engine):
    line = error_line(train(tmp_path, "Unseen", "--engine", engine))
    assert "(unfit:Unseen-v0) gave observation nan in 'arm/pole' (component 2)" in line


@ENGINES
@pytest.mark.parametrize(("name", "where"), [("OldStep", "step()"), ("OldReset", "reset()")])
def test_the_older_interface_is_said_in_the_newer_ones_words(tmp_path, name, where, engine):
    line = error_line(train(tmp_path, name, "--engine", engine))
    assert f"{where} must return observation, " in line
    assert "unfit.py:" in line


@ENGINES
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Parts", "the observation under '0' is of dtype float64, its space says float32"),
        ("DrawsGlobally", "self.np_random, which super().reset(seed=seed) seeds"),
        ("Ragged", None),
    ],
)
def test_carelessness_is_one_warning_at_most(tmp_path, name, said, engine):
    env_id = f"heedless:{name}-v0"
    ended = lockstep("train", env_id, *SMALL, "--name", "run", "--engine", engine, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == (said is not None)
    assert all(line.startswith(f"lockstep: warning: {env_id}: ") and line.endswith(said) for line in lines)
    if name == "Ragged":
        assert metrics_of(tmp_path / "runs" / "run")[-1]["rollout/metrics/distance"] == pytest.approx(3.2)


@ENGINES
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ShapedReward", "the reward returned by step() must be a number, and is an array of shape (1,)"),
        ("Wide", "the observation is of dtype float64, its space says float32"),
        ("Outside", "its space says -0.01 to 0.01"),
        ("Normalized", "so that an evaluation begins without them; leave it out, and give --normalize.observations"),
    ],
)
def test_what_can_be_trained_on_is_one_warning(tmp_path, name, said, engine):
    nproc = 2 if name == "Wide" and engine == "torch" else 1
    ended = train(tmp_path, name, "--engine", engine, "--nproc", nproc, "--env.workers", 1)
    assert ended.code == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"lockstep: warning: unfit:{name}-v0: ")
    assert line.endswith(said)


@pytest.mark.parametrize("words", [("eval",), ("play", "--video", "out.mp4")], ids=["eval", "play"])
def test_what_it_raises_while_a_policy_is_watched_is_not_the_videos(tmp_path, words):
    """Its error is of the kind that a full disk gives."""
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    assert train(tmp_path, "Late", "--num-envs", 8, "--num-steps", 4, "--total-steps", 32).code == 0
    name, *options = words
    ended = lockstep(name, "run", *options, "--episodes", 100, cwd=tmp_path)
    assert ended.code == 1
    assert re.search(r"unfit:Late-v0\)? raised in step: OSError: out of order", error_line(ended))
    assert not (tmp_path / "out.mp4").exists()
