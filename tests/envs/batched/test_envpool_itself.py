"""EnvPool's own package, which ``make test-all`` installs: what the back end relies on, and runs on it."""

import json

import pytest
from command_line import SMALL, lockstep, resume, train

envpool = pytest.importorskip(
    "envpool", reason="needs EnvPool, a gigabyte with what it needs: make test-all installs it"
)

ON_ENVPOOL = ("CartPole-v1", *SMALL, "--env.backend", "envpool")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), *ON_ENVPOOL)


def test_a_pool_answers_one_step_late():
    """After an episode's last step the action is ignored: the answer is the next episode's first observation."""
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=1, seed=3)
    pool.reset()
    steps = [pool.step(pool.action_space.sample()[None] * 0) for _ in range(40)]
    ended = [bool(step[2][0] or step[3][0]) for step in steps]
    first_end = ended.index(True)
    assert abs(steps[first_end][0][0, 2]) > 0.2  # the pole has fallen
    observation, reward, *_ = steps[first_end + 1]
    assert abs(observation).max() <= 0.05
    assert reward[0] == 0
    assert not ended[first_end + 1]
    pool.close()


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc", 2),
        pytest.param(("--nproc", 4), marks=pytest.mark.long),
        pytest.param(("--env.workers", 2), marks=pytest.mark.long),
    ],
)
def test_ranks_and_threads_change_no_byte(alone, tmp_path, words):
    other = train(tmp_path, *ON_ENVPOOL, *words)
    assert other.agent == alone.agent
    assert other.metrics == alone.metrics
    assert alone.metrics[-1]["rollout/episode_length_mean"] > 8


@pytest.mark.long
def test_a_run_is_evaluated_and_goes_on(alone, tmp_path):
    ended = lockstep("eval", alone.path, "--episodes", 4, "--json", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["length_mean"] > 8
    stopped = train(tmp_path, *ON_ENVPOOL, "--stop-at-step", 512)
    assert resume(stopped.path).summary["global_step"] == 1024


def test_what_it_does_not_have_is_one_line(tmp_path):
    ended = lockstep("train", "FrozenLake-v7", *SMALL, "--env.backend", "envpool", cwd=tmp_path)
    assert ended.code == 2
    assert "EnvPool has no 'FrozenLake-v7'" in ended.stderr
