"""Names of parameters: two parts of a network never share one without a word."""

import equinox as eqx
import equinox_nets
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import users_nets
from gymnasium.spaces import Box, Dict, Discrete

from lockstep.config.run import Config
from lockstep.core.spaces import action_layout, observation_layout
from lockstep.jax_engine import state as jax_state
from lockstep.networks.initial import initial_parameters
from lockstep.torch_engine import state as torch_state

ENGINES = {"torch": torch_state, "jax": jax_state}
VECTOR, CONTINUOUS = observation_layout(Box(-1, 1, (4,), np.float32)), action_layout(Box(-1, 1, (2,), np.float32))


class OfTorch(users_nets.Tiny):
    """Has a standard deviation of its own, and gives it out where that is asked for."""

    def __init__(self, observation, outputs, given=False):
        super().__init__(observation, outputs // 2 if given else outputs)
        self.log_std = torch.nn.Parameter(torch.full((2,), -2.0))
        self.given = given

    def forward(self, observation):
        output, values = super().forward(observation)
        return torch.cat([output, self.log_std.expand_as(output)], -1) if self.given else output, values


class OfJax(eqx.Module):
    """Likewise."""

    inner: equinox_nets.Tiny
    log_std: jnp.ndarray
    given: bool = eqx.field(static=True)

    def __init__(self, observation, outputs, *, key, given=False):
        self.inner = equinox_nets.Tiny(observation, outputs // 2 if given else outputs, key=key)
        self.log_std, self.given = jnp.full((2,), -2.0), given

    def __call__(self, observation, *, key):
        output, values = self.inner(observation, key=key)
        spread = jnp.broadcast_to(self.log_std, output.shape)
        return jnp.concatenate([output, spread], -1) if self.given else output, values


def made(engine, action, **network):
    name = {"torch": "OfTorch", "jax": "OfJax"}[engine]
    config = Config.model_validate(
        {"engine": engine, "network": {"custom": f"test_parameter_names:{name}", "log_std_init": -0.5, **network}}
    )
    return config, ENGINES[engine].make_net(config, VECTOR, action)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_modules_own_log_std_is_not_replaced(engine):
    with pytest.raises(ValueError) as caught:
        made(engine, CONTINUOUS)
    assert str(caught.value).startswith(
        f"network.custom: test_parameter_names:Of{engine.capitalize()} has a parameter "
    )
    assert str(caught.value).endswith(
        "log_std, which is the name of ours beside the module: the log standard deviation of continuous actions, which "
        "begins at network.log_std_init; leave it out, or give your own out with network.state_dependent_std"
    )


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_modules_own_log_std_is_its_own_where_there_is_no_other(engine):
    for action, options in [
        (action_layout(Discrete(2)), {}),
        (CONTINUOUS, {"state_dependent_std": True, "custom_kwargs": {"given": True}}),
    ]:
        config, net = made(engine, action, **options)
        assert initial_parameters(config, net)["log_std"].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize(
    ("space", "kind", "said"),
    [
        (Dict({"a.b": Box(0, 255, (5, 5, 3), np.uint8), "a": Dict({"b": Box(0, 255, (5, 5, 3), np.uint8)})}), "simple",
         "observation keys 'a/b' and 'a.b': parameters of their images would have one name (encoder.a.b.0.weight)"),
        (Dict({"a": Box(0, 255, (5, 5, 3), np.uint8), "a.0": Box(0, 255, (5, 5, 3), np.uint8)}), "impala", None),
        (Dict({"a": Box(0, 255, (5, 5, 3), np.uint8), "a.0.0": Box(0, 255, (5, 5, 3), np.uint8)}), "impala",
         "observation keys 'a' and 'a.0.0': parameters of their images would have one name (encoder.a.0.0.0.weight)"),
    ],
)  # fmt: skip
def test_two_images_never_share_an_encoder(engine, space, kind, said):
    config = Config.model_validate({"engine": engine, "network": {"image": {"kind": kind}}})
    layout = observation_layout(space)
    if said is None:
        net = ENGINES[engine].make_net(config, layout, action_layout(Discrete(2)))
        features = [x for x in net.shapes() if x.startswith("actor.encoder.") and x.endswith(".out.weight")]
        assert features == ["actor.encoder.a.out.weight", "actor.encoder.a.0.out.weight"]
        return
    with pytest.raises(ValueError) as caught:
        ENGINES[engine].make_net(config, layout, action_layout(Discrete(2)))
    assert str(caught.value) == f"{said}; rename one"
