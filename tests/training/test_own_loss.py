"""Losses of the user's own: how they are found, and what is said of wrong ones."""

import numpy as np
import pytest
import users_losses

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.training.losses import (
    LOSS,
    TERMS,
    LossSettings,
    check_shape,
    loss_function,
    loss_settings,
)
from lockstep.training.metrics import update_metrics
from lockstep.training.own_loss.trial import (
    FAR,
    TRAINED,
    WIDE,
    check_loss,
    hint,
    made_up_samples,
    plain_samples,
)


def line(function, *arguments):
    with pytest.raises(ValueError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_loss_is_found_by_its_name():
    assert loss_function("users_losses:penalised") is users_losses.penalised
    assert "users_losses:nothing can't be imported" in line(loss_function, "users_losses:nothing")
    missing = line(loss_function, "no_such_losses:mine")
    assert missing.startswith("ppo.loss: no_such_losses:mine can't be imported: No module named")
    assert "modules are looked for in" in missing
    assert line(loss_function, "users_losses:NOT_CALLABLE").endswith("is int, which can't be called; name a function")


def test_made_up_samples_cannot_be_taken_for_the_actors_outputs():
    for outputs, plain in ((2, 5), (5, 7), (29, 7)):
        made_up = made_up_samples(outputs, critic=True, reference=True)
        assert {None if x is None else len(x) for x in made_up.values()} == {plain + WIDE + FAR}
        assert all(x is not None and x.dtype == np.float32 for x in made_up.values())
        assert plain_samples(outputs) == slice(0, plain)
    none = {name for name, x in made_up_samples(2, critic=False, reference=False).items() if x is None}
    assert none == {"value", "old_value", "return_", "reference_log_prob"}


def test_what_is_no_loss_of_each_sample_is_told_what_to_return():
    check_shape(np.zeros(5), 5, np.ndarray)
    for wrong, said in ((0.5, "float"), (np.zeros(()), "a single number for 5"), (np.zeros((5, 1)), "shape (5, 1)")):
        found = line(check_shape, wrong, 5, np.ndarray)
        assert found.startswith(f"ppo.loss: it returned {said}")
        assert "return the loss of each sample, [rows]" in found


ONES = {name: np.ones(3) for name in TRAINED}
ZEROS = {name: np.zeros(3) for name in TRAINED}


SAMPLE = LossSettings(0.2, None, 0.5, 0.5, 8).sample(
    lambda sample: sample.log_prob, **made_up_samples(2, critic=True, reference=False)
)


def test_only_plain_samples_have_a_logarithm():
    value = made_up_samples(2, critic=True, reference=False)["value"]
    assert value is not None
    assert (value[:5] > 0).all()
    assert (value[5:] < 0).any()


@pytest.mark.parametrize(
    ("losses", "gradients", "said"),
    [
        (np.array([1.0, np.nan]), ONES, "gave [1.0, nan] of made-up samples, which isn't finite"),
        (np.ones(2), ONES | {"value": np.array([np.inf])}, "the gradient of users:loss by value isn't finite"),
        (
            np.ones(2),
            ZEROS,
            "users:loss has no gradient: what it returns doesn't depend on log_prob, entropy",
        ),
        (np.ones(2), {}, "has no gradient"),
    ],
)
def test_a_loss_that_nothing_can_be_trained_by_is_one_line(losses, gradients, said):
    assert said in line(check_loss, "users:loss", 2, lambda rows: (losses[rows], gradients))


def test_a_loss_is_a_function_of_its_samples():
    counted = iter(range(3))
    assert "gave other numbers" in line(check_loss, "users:loss", 2, lambda rows: (np.ones(2) * next(counted), ONES))
    check_loss("users:loss", 2, lambda rows: (np.ones(2), ZEROS | {"value": np.ones(2)}))
    far = np.array([1.0] * 5 + [np.nan])
    check_loss("users:loss", 2, lambda rows: (far[rows], ONES))


def test_a_loss_of_all_samples_together_is_refused():
    numbers = np.arange(5.0)
    found = line(check_loss, "users:loss", 2, lambda rows: (numbers[rows] - numbers[rows].mean(), ONES))
    assert (
        "users:loss gave [-2.0, -1.0, 0.0] for three samples among others and [-1.0, 0.0, 1.0] for the three" in found
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AttributeError("no newvalue", name="newvalue", obj=SAMPLE), "; it is value here"),
        (AttributeError("no b_logprobs", name="b_logprobs", obj=SAMPLE), "; it is old_log_prob here"),
        (AttributeError("no mb_advantages", name="mb_advantages", obj=SAMPLE), "; it is advantage here"),
        (AttributeError("no b_values", name="b_values", obj=SAMPLE), "; it is old_value here"),
        (AttributeError("no b_obs", name="b_obs", obj=SAMPLE), "; a loss gets no observations"),
        (NameError("no args", name="args"), "; numbers of the config are the sample's, as sample.clip_range"),
        (NameError("no clip", name="clip"), ""),
        (AttributeError("no entropies", name="entropies", obj=SAMPLE), "; it is entropy here"),
        (AttributeError("no xyz", name="xyz", obj=SAMPLE), "; it has log_prob, old_log_prob, entropy, value"),
        (AttributeError("no x", name="x", obj=np), ""),
        (RuntimeError("Boolean value of Tensor with more than one value is ambiguous"), "; choose by torch.where"),
        (ValueError("something else"), ""),
    ],
)
def test_what_may_have_been_meant_is_said(error, said):
    assert hint(error).startswith(said)
    assert bool(hint(error)) == bool(said)


def test_arguments_of_a_loss_stand_in_the_config():
    def settings_of(**ppo):
        return loss_settings(Config.model_validate({"ppo": {"loss": "users_losses:weighted", **ppo}}), 8)

    light, heavy = (settings_of(loss_kwargs={"weight": weight}) for weight in (0.0, 2.0))
    assert light == settings_of(loss_kwargs={"weight": 0.0}) != heavy
    assert hash(heavy) == hash(settings_of(loss_kwargs={"weight": 2.0}))
    sample = heavy.sample(lambda sample: sample.log_prob, **made_up_samples(2, critic=True, reference=False))
    assert heavy.loss is not None
    assert light.loss is not None
    np.testing.assert_allclose(heavy.loss(sample) - light.loss(sample), 2 * sample.entropy, rtol=1e-5)
    with pytest.raises(ValueError, match=r"ppo\.loss_kwargs: .* there is no ppo\.loss to be called with them"):
        resolve(Config.model_validate({"env": "CartPole-v1", "ppo": {"loss_kwargs": {"weight": 1}}}), 1)


def test_the_term_that_it_is_stands_as_the_loss():
    settings = LossSettings(0.2, None, 0.5, 0.5, 8, loss=users_losses.same)
    assert settings.terms == (*TERMS, LOSS)
    record = update_metrics(settings, [1.0] * 5 + [6.0], 2, 1.0, 2, False, 1e-3)
    assert (record["train/loss"], record["train/policy_loss"]) == (3.0, 0.5)
    assert list(record)[:2] == ["train/loss", "train/policy_loss"]
