"""The adaptive schedule begins within its limits: from beyond them its first move would lead the wrong way."""

import pytest
from command_line import error_line, lockstep

from lockstep.config.run import Config, RunOptions
from lockstep.launch.checks import check_limits
from lockstep.training.limits import LEARNING_RATE_LIMITS

ADAPTIVE = ("--ppo.schedule", "adaptive", "--ppo.learning-rate")


@pytest.mark.parametrize(("rate", "shown"), [("1e-6", "1e-06"), ("0.05", "0.05")])
@pytest.mark.parametrize("more", [(), ("--seeds", "0-1"), ("--engine", "jax")], ids=["run", "seeds", "jax"])
def test_a_rate_beyond_them_is_refused_before_anything_starts(tmp_path, rate, shown, more):
    line = error_line(lockstep("train", "CartPole-v1", *ADAPTIVE, rate, *more, cwd=tmp_path))
    assert line == (
        f"lockstep: error: ppo.learning_rate: {shown} with ppo.schedule adaptive, which moves between 1e-05 and 0.01 "
        "alone; give one of these, or another schedule"
    )
    assert not (tmp_path / "runs").exists()


def config_of(rate, schedule="adaptive"):
    return Config.model_validate({"ppo": {"learning_rate": rate, "schedule": schedule}})


@pytest.mark.parametrize("rate", LEARNING_RATE_LIMITS)
def test_the_limits_themselves_are_taken(rate):
    check_limits(RunOptions(), config_of(rate))


@pytest.mark.parametrize("rate", [1e-6, 0.05])
def test_other_schedules_and_runs_that_go_on_are_left_alone(rate):
    """A run of an older version was moved within the limits by its first minibatch."""
    check_limits(RunOptions(), config_of(rate, "linear"))
    check_limits(RunOptions(resume="run"), config_of(rate))
    with pytest.raises(ValueError, match=r"^ppo\.learning_rate: "):
        check_limits(RunOptions(), config_of(rate))
