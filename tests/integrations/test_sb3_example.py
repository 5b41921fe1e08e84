"""The example: a tutorial's script with one line changed, alone and on two ranks; and scripts that go wrong."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import stable_baselines3
from command_line import lockstep, run_words
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from variants import variants

from lockstep.integrations.sb3 import PPO

EXAMPLE = Path(__file__).parents[2] / "examples" / "sb3_cartpole.py"
SOLVED = 475
WRITTEN = {
    1: {f"checkpoints/rl_model_{n}_steps.zip" for n in range(5_000, 30_001, 5_000)},
    2: {f"checkpoints/rl_model_{n}_steps.zip" for n in range(10_000, 30_001, 10_000)},
}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def example(request, tmp_path_factory):
    """The example's number of ranks, its folder, and what it printed."""
    folder = tmp_path_factory.mktemp(f"ranks_{request.param}")
    start = ("run", "--nproc", request.param, str(EXAMPLE), "out")
    ended = (
        lockstep(*start, cwd=folder)
        if request.param > 1
        else run_words([sys.executable, *start[3:]], folder, OMP_NUM_THREADS="1")
    )
    assert ended.code == 0, ended.stderr
    return request.param, folder / "out", ended.stdout


@pytest.mark.long
def test_it_solves_cartpole(example):
    ranks, _, stdout = example
    told = [float(found) for found in re.findall(r"mean return over 20 episodes: ([0-9.]+)", stdout)]
    assert len(told) == ranks
    assert min(told) >= SOLVED


@pytest.mark.long
def test_its_zip_is_the_librarys_and_acts_alike(example):
    _, folder, _ = example
    theirs = stable_baselines3.PPO.load(folder / "ppo_cartpole", device="cpu")
    ours = PPO.load(folder / "ppo_cartpole", device="cpu")
    observations = np.random.default_rng(0).normal(0, 0.3, (200, 4)).astype(np.float32)
    mine, expected = (model.predict(observations, deterministic=True)[0] for model in (ours, theirs))
    assert np.array_equal(mine, expected)
    assert set(mine) == {0, 1}
    mean, _ = evaluate_policy(theirs, make_vec_env("CartPole-v1", 4, seed=9), n_eval_episodes=8)
    assert np.mean(mean) >= SOLVED


@pytest.mark.long
def test_it_leaves_one_set_of_files(example):
    ranks, folder, stdout = example
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    events = {name for name in found if name.startswith("tensorboard/PPO_1/events.out.tfevents.")}
    assert len(events) == 1
    monitors = {f"monitor/{n}.monitor.csv" for n in range(4)}
    assert found - events == WRITTEN[ranks] | monitors | {"best/best_model.zip", "ppo_cartpole.zip"}
    assert len(re.findall(r"Logging to", stdout)) == 1


FAILS = """
import os, sys
import gymnasium
from lockstep.integrations.attach.process_group import place
from lockstep.integrations.sb3 import PPO

class Fails(gymnasium.Wrapper):
    def step(self, action):
        if place()[0] == 1:
            if "killed" in sys.argv:
                os.kill(os.getpid(), 9)
            raise OSError("the simulator is gone")
        return super().step(action)

PPO("MlpPolicy", Fails(gymnasium.make("CartPole-v1")), n_steps=16, device="cpu").learn(1000)
"""


@pytest.mark.parametrize("how", variants(["raises", "killed"], ["raises"]))
def test_a_failing_rank_ends_every_rank_and_is_named(how, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    ended = lockstep("run", "--nproc", 2, "fails.py", how, cwd=tmp_path)
    assert ended.code not in (0, 2)
    assert "rank 1" in ended.stderr
    assert ("OSError: the simulator is gone" in ended.stderr) == (how == "raises")
