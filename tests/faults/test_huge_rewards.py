"""Rewards that are finite, and too large for a loss, end a run in one line that says what helps."""

import json

import pytest
from command_line import error_line, lockstep, train

WORDS = ("huge_rewards:Huge-v0", "--num-envs", 4, "--num-steps", 16, "--total-steps", 128, "--eval.interval", 0)
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])


def words(engine, reward, *more):
    return (*WORDS, "--engine", engine, "--env.kwargs", json.dumps({"reward": reward}), *more)


@ENGINES
@pytest.mark.parametrize(("reward", "normalized"), [(1e25, False), (1e25, True), (1e38, False), (8e307, False)])
def test_one_line_names_what_is_done_about_rewards(tmp_path, engine, reward, normalized):
    more = ("--normalize.returns",) if normalized else ()
    if normalized and reward == 1e25:  # which float64 can square
        assert train(tmp_path, *words(engine, reward, *more)).summary["global_step"] == 128
        return
    line = error_line(lockstep("train", *words(engine, reward, *more), cwd=tmp_path))
    assert "non-finite loss or gradient in iteration 1, epoch 1, minibatch 1 " in line
    assert line.endswith("; env.reward_scale, env.reward_clip or normalize.returns may help")


@pytest.mark.parametrize(("engine", "reward"), [("torch", 1e160), ("torch", 8e307), ("jax", 8e307)])
def test_statistics_that_would_make_all_later_rewards_nothing_end_a_run(tmp_path, engine, reward):
    line = error_line(lockstep("train", *words(engine, reward, "--normalize.returns"), cwd=tmp_path))
    assert "non-finite statistics of a random policy, of normalize.returns: a reward" in line
    assert line.endswith("; env.reward_scale or env.reward_clip may help")


@pytest.mark.parametrize("seeds", [(), ("--seeds", "1,2")], ids=["one", "seeds"])
def test_infinite_observations_inside_a_program_leave_no_checkpoint_that_they_spoil(tmp_path, seeds):
    settings = ("--num-envs", 4, "--num-steps", 16, "--total-steps", 256, "--checkpoint.interval", 1, "--engine", "jax")
    ended = lockstep(
        "train", "mishaps:blinded", *settings, "--env.backend", "jax", "--normalize.observations", *seeds, cwd=tmp_path
    )
    assert "non-finite statistics of a random policy, of normalize.observations: an observation is inf" in ended.stderr
    assert ended.code == 1
    assert list(tmp_path.glob("runs/**/step_*")) == []


@ENGINES
def test_what_it_says_helps(tmp_path, engine):
    assert train(tmp_path, *words(engine, 1e300, "--env.reward-scale", 1e-300)).summary["global_step"] == 128
