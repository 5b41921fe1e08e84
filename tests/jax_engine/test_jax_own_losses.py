"""Losses of the user's own in the JAX engine: devices, and what is refused."""

import pytest
from jax_engine.small_programs import apart, arrays_of, opened, small_config, trained

from lockstep.envs.describe import describe
from lockstep.jax_engine.start.own_loss import check_own_loss
from lockstep.jax_engine.state import check_networks

pytestmark = pytest.mark.exact

PPO = {"loss": "users_losses:spo", "clip_schedule": "linear", "entropy_schedule": "linear", "entropy_coef": 0.05}


def test_two_devices_train_what_one_does_with_scheduled_coefficients():
    """In the middle of the run, where half of both coefficients is left."""
    states, metrics = [], []
    for devices in (1, 2):
        run = opened(small_config(devices, ppo=PPO), devices)
        metrics += [iteration.numbers["terms"] for iteration in trained(run, first=32)]
        states.append(arrays_of(run))
    assert apart(*states) == 0.0
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 6


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("mean", "users_losses:mean returned a single number for 29 samples; return the loss of each sample, [rows]"),
        ("number", "users_losses:number returned float"),
        ("infinite", "which isn't finite"),
        ("without_gradient", "users_losses:without_gradient has no gradient"),
        ("counting", "gave other numbers when it was called again"),
        (
            "branching",
            "users_losses:branching: TracerBoolConversionError: Attempted boolean conversion of traced array",
        ),
        ("branching", "; choose by jax.numpy.where instead of by if, and, or"),
        ("of_numpy", "; compute with jax.numpy instead of numpy"),
        ("misspelt", "AttributeError: 'LossSample' object has no attribute 'entropies' (users_losses.py, line"),
    ],
)
def test_what_is_no_loss_is_one_line_before_anything_is_compiled(loss, said):
    config = small_config(ppo={"loss": f"users_losses:{loss}"})
    with pytest.raises(ValueError) as caught:
        check_own_loss(config, check_networks(config, describe(config.env)))
    assert said in str(caught.value)
    assert str(caught.value).startswith("ppo.loss: ")
    assert "\n" not in str(caught.value)
