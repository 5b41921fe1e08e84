"""Learning rates by schedule, and the error of numbers that aren't finite."""

import math

import pytest

from lockstep.config.run import Config
from lockstep.training.limits import non_finite, scheduled_coefficients, scheduled_learning_rate


def config_of(schedule):
    values = {"num_envs": 8, "num_steps": 16, "total_steps": 1000}
    return Config.model_validate(values | {"ppo": {"schedule": schedule, "learning_rate": 1e-3}})


def test_a_linear_schedule_falls_to_zero_and_never_below():
    rates = [scheduled_learning_rate(config_of("linear"), step, 7.0) for step in (0, 250, 1000, 1024)]
    assert rates == [1e-3, 0.75e-3, 0.0, 0.0]


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_other_schedules_leave_the_rate_where_it_is(schedule):
    assert scheduled_learning_rate(config_of(schedule), 500, 7e-4) == 7e-4


def test_a_loss_that_isnt_finite_names_place_and_terms():
    error = non_finite(3, "epoch 1, minibatch 2", ("policy_loss", "value_loss"), [0.5, math.nan])
    assert str(error).startswith(
        "non-finite loss or gradient in iteration 3, epoch 1, minibatch 2 (policy_loss 0.5, value_loss nan); a smaller"
    )
    with pytest.raises(ValueError, match="shorter"):
        non_finite(3, "there", ("policy_loss", "value_loss"), [0.5])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_rewards_are_blamed_where_the_policy_is_finite_and_the_values_are_not(value):
    terms, rewards = ("policy_loss", "value_loss", "entropy"), "env.reward_scale, env.reward_clip or normalize.returns"

    def advice(iteration, policy_loss, value_loss, entropy):
        return str(non_finite(iteration, "there", terms, [policy_loss, value_loss, entropy])).rpartition("; ")[2]

    usual = "a smaller ppo.learning_rate or normalize.observations may help"
    assert advice(1, 1e-8, value, 0.69) == advice(1, math.nan, value, 0.69) == f"{rewards} may help"
    assert advice(2, 1e-8, value, 0.69) == f"a smaller ppo.learning_rate, {rewards} may help"
    assert advice(1, value, value, value) == usual
    assert advice(1, value, 1.0, 0.69) == usual


def test_a_network_that_gives_what_isnt_finite_is_named():
    terms = ("policy_loss", "entropy")
    told = [str(non_finite(3, "there", terms, [math.nan, entropy], custom="nets:Own")) for entropy in (math.nan, 0.5)]
    assert ["network.custom nets:Own" in line for line in told] == [True, False]
    assert "network.custom" not in str(non_finite(3, "there", terms, [math.nan, math.nan]))


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
