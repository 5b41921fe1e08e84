"""The networks that a config asks for."""

from __future__ import annotations

from dataclasses import replace

from lockstep.config.run import Config
from lockstep.core.shards import keyed_seed
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.jax_engine.nets.custom import load_custom
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.networks.spec import net_options


def make_net(config: Config, observation: ObservationLayout, action: ActionLayout) -> PolicyNet:
    """The networks that a config asks for.

    Raises:
        ValueError: they don't fit the spaces; one line.
    """
    network = config.network
    net = PolicyNet(**net_options(config, observation, action), remat=getattr(network, "remat", False))
    if network.custom is None:
        return net
    custom = load_custom(network.custom, network.custom_kwargs, net, keyed_seed(config.seed, "init/custom"))
    return replace(net, custom=custom, core=None, shared=False)
