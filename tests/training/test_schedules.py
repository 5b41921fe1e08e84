"""Learning rates and coefficients of the loss by schedule."""

import pytest

from lockstep.config.run import Config
from lockstep.training.schedules import follows_length, scheduled_coefficients, scheduled_learning_rate


def config_of(schedule):
    values = {"num_envs": 8, "num_steps": 16, "total_steps": 1000}
    return Config.model_validate(values | {"ppo": {"schedule": schedule, "learning_rate": 1e-3}})


def test_a_linear_schedule_falls_to_zero_and_never_below():
    rates = [scheduled_learning_rate(config_of("linear"), step, 7.0) for step in (0, 250, 1000, 1024)]
    assert rates == [1e-3, 0.75e-3, 0.0, 0.0]


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_other_schedules_leave_the_rate_where_it_is(schedule):
    assert scheduled_learning_rate(config_of(schedule), 500, 7e-4) == 7e-4


def test_coefficients_of_the_loss_fall_as_the_learning_rate_does_where_they_are_scheduled():
    ppo = {"entropy_coef": 0.02, "clip_range": 0.2, "value_clip_range": 0.4}
    values = {"num_envs": 8, "num_steps": 16, "total_steps": 1000}

    def at(step, **schedules):
        return scheduled_coefficients(Config.model_validate(values | {"ppo": ppo | schedules}), step)

    assert at(250) == {}
    assert at(250, entropy_schedule="linear") == {"entropy_coef": 0.02 * 0.75}
    assert at(750, clip_schedule="linear") == {"clip_range": 0.2 * 0.25, "value_clip_range": 0.4 * 0.25}
    assert at(750, clip_schedule="linear", value_clip_range=None) == {"clip_range": 0.2 * 0.25}
    assert at(1024, clip_schedule="linear", value_clip_range=None) == {"clip_range": 0.0}


@pytest.mark.parametrize("name", ["schedule", "entropy_schedule", "clip_schedule"])
def test_each_schedule_that_falls_follows_the_length(name):
    """So what tells runs of other lengths apart must know of each."""
    ppo = {"schedule": "constant", "entropy_coef": 0.02}
    assert not follows_length(Config.model_validate({"ppo": ppo}))
    assert follows_length(Config.model_validate({"ppo": ppo | {name: "linear"}}))
