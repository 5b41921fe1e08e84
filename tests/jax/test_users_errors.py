"""Errors in a user's own functions name the line of the user's file, and are kept as the cause."""

from pathlib import Path
from typing import Any

import corridors
import faulty_walks
import pytest
from refusals import failure_of

import lockstep.jax as ljax
from lockstep.jax.training import Training

PPO = ljax.PPOConfig(n_steps=8, n_minibatches=2, n_epochs=1, hidden_sizes=(4,))
RUNNER = ljax.RunnerConfig(64, num_devices=1, num_envs=2)
FILE = Path(faulty_walks.__file__)


def trained(env: Any, params: Any = None, **settings: Any):
    return ljax.train_ppo_multigpu(env, params, ppo_config=PPO, runner_config=RUNNER, **settings)


def place_of(what):
    """Where the user's code says that something fails."""
    lines = FILE.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if f"# the {what} fails here" in line)
    return f"({FILE.name}, line {number})"


class Task(ljax.Task):
    def __init__(self, env, terms=None):
        super().__init__(PPO, RUNNER)
        self._env, self._terms = env, terms or {}

    def environment(self):
        return self._env, None

    def reward_terms(self):
        return self._terms


@pytest.mark.parametrize(
    ("env", "what", "begins", "cause"),
    [
        (faulty_walks.FailingStep(), "step", "env: FailingStep: step can't be traced by JAX: TypeError: ", TypeError),
        (faulty_walks.FailingReset(), "reset", "env: FailingReset: reset can't be traced by JAX: KeyError: ", KeyError),
        (faulty_walks.FailingSpace(), "space", "env: FailingSpace: action_space: RuntimeError: ", RuntimeError),
    ],
)
def test_an_error_in_an_environment_names_the_users_line(env, what, begins, cause):
    for run in (lambda: trained(env), Task(env).train, Task(ljax.EpisodeStatisticsWrapper(env)).train):
        error = failure_of(run)
        assert str(error).startswith(begins)
        assert str(error).endswith(f" {place_of(what)}")
        assert isinstance(error.__cause__, cause)


def test_an_error_in_a_reward_term_names_the_term_and_its_line():
    terms = {"good": (1.0, lambda t: t.reward), "bad": (1.0, faulty_walks.failing_term)}
    error = failure_of(Task(corridors.Corridor(), terms).train)
    assert str(error).startswith("reward_terms: 'bad': TypeError: ")
    assert str(error).endswith(f" {place_of('term')}")
    assert isinstance(error.__cause__, TypeError)
    error = failure_of(Task(corridors.Corridor(), {"pair": (1.0, lambda t: t.observation)}).train)
    assert str(error) == "reward_terms: 'pair' gave an array of shape (2,) and must give one number"


def test_what_isnt_the_users_code_has_no_line_and_no_cause():
    error = failure_of(trained, corridors.Wrong("shape"))
    assert "reset's observation is float32[1], and its space says float32[2]" in str(error)
    assert (error.__cause__, " line " in str(error)) == (None, False)
    bare = failure_of(Training, ljax.Environment(), None, PPO, RUNNER)
    assert " line " not in str(bare)
