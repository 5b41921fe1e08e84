"""A state-dependent standard deviation must begin where it can learn; both engines refuse others in one line."""

import numpy as np
import pytest

from lockstep.config.engines import engine_module
from lockstep.config.run import Config
from lockstep.envs.describe import describe

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])


def checked(engine, **network):
    """The networks of a config for Pendulum, or what is wrong with them."""
    pytest.importorskip(engine)
    env_id = network.pop("env_id", "lockstep/Pendulum-v1")
    config = Config.model_validate({"engine": engine, "env": {"id": env_id}, "network": network})
    return engine_module(engine).check_networks(config, describe(config.env))


@ENGINES
@pytest.mark.parametrize("begins", [-5.01, 2.5])
def test_a_state_dependent_std_that_would_never_learn_is_refused(engine, begins):
    with pytest.raises(ValueError, match=f"network.log_std_init: {begins}, but .* within -5 and 2, .*never") as caught:
        checked(engine, state_dependent_std=True, log_std_init=begins)
    assert "\n" not in str(caught.value)


@ENGINES
def test_what_can_learn_or_is_not_read_is_taken(engine):
    for begins in (-5.0, -0.5, 2.0):
        assert checked(engine, state_dependent_std=True, log_std_init=begins).state_dependent_std
    assert not checked(engine, log_std_init=3.0).state_dependent_std
    assert checked(engine, env_id="lockstep/CartPole-v1", state_dependent_std=True, log_std_init=3.0).discrete


def test_beyond_the_limits_there_is_no_gradient():
    """Why it is refused."""
    torch = pytest.importorskip("torch")
    from lockstep.networks.spec import LOG_STD_LIMITS

    begins = torch.tensor(np.array([-5.01, 2.5, 1.0], np.float32), requires_grad=True)
    begins.clamp(*LOG_STD_LIMITS).sum().backward()
    assert begins.grad.tolist() == [0.0, 0.0, 1.0]
