"""The error of numbers that aren't finite."""

import math

import pytest

from lockstep.config.run import Config
from lockstep.training.limits import minibatch_name, non_finite, non_finite_statistics


def test_a_loss_that_isnt_finite_names_place_and_terms():
    error = non_finite(3, "epoch 1, minibatch 2", ("policy_loss", "value_loss"), [0.5, math.nan])
    assert str(error).startswith(
        "non-finite loss or gradient in iteration 3, epoch 1, minibatch 2 (policy_loss 0.5, value_loss nan); a smaller"
    )
    with pytest.raises(ValueError, match="shorter"):
        non_finite(3, "there", ("policy_loss", "value_loss"), [0.5])


def test_minibatches_are_named_by_epoch_and_periods_by_their_last_one():
    def names(sync_period, *places):
        config = Config.model_validate(
            {"env": {"id": "CartPole-v1"}, "sync_period": sync_period, "ppo": {"num_minibatches": 4, "num_epochs": 2}}
        )
        return [minibatch_name(config, place) for place in places]

    assert names(1, 0, 3, 4) == ["epoch 1, minibatch 1", "epoch 1, minibatch 4", "epoch 2, minibatch 1"]
    assert names(3, 2, 5) == ["epoch 1, the 3 minibatches up to 3", "epoch 2, the 3 minibatches up to 2"]
    assert names(3, 7) == ["epoch 2, the 2 minibatches up to 4"]  # the last period is shorter
    assert names(8, 7) == ["epoch 2, the 8 minibatches up to 4"]
    assert names(7, 7) == ["epoch 2, minibatch 4"]


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


def test_statistics_that_arent_finite_say_what_they_are_of_and_when():
    told = [str(non_finite_statistics(n, of)) for n, of in ((0, "returns"), (7, "observations"))]
    assert told[0].startswith("non-finite statistics of a random policy, of normalize.returns: a reward, or a ")
    assert told[1].startswith("non-finite statistics after iteration 7, of normalize.observations: an observation is ")
