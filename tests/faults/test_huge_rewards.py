"""Rewards that are finite, and too large for a loss, end a run in one line that says what helps."""

import json

import pytest
from command_line import error_line, lockstep, train

WORDS = ("huge_rewards:Huge-v0", "--num-envs", 4, "--num-steps", 16, "--total-steps", 128, "--eval.interval", 0)
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])


def words(engine, reward, *more):
    return (*WORDS, "--engine", engine, "--env.kwargs", json.dumps({"reward": reward}), *more)


@ENGINES
@pytest.mark.parametrize(
    ("reward", "normalized"), [(1e25, False), (1e25, True), (1e38, False), (8e307, False), (8e307, True)]
)
def test_one_line_names_what_is_done_about_rewards(tmp_path, engine, reward, normalized):
    more = ("--normalize.returns",) if normalized else ()
    if normalized and reward == 1e25:  # which float64 can square
        assert train(tmp_path, *words(engine, reward, *more)).summary["global_step"] == 128
        return
    line = error_line(lockstep("train", *words(engine, reward, *more), cwd=tmp_path))
    assert "non-finite loss or gradient in iteration 1, epoch 1, minibatch 1 " in line
    assert line.endswith("; env.reward_scale, env.reward_clip or normalize.returns may help")


@ENGINES
def test_what_it_says_helps(tmp_path, engine):
    assert train(tmp_path, *words(engine, 1e300, "--env.reward-scale", 1e-300)).summary["global_step"] == 128
