"""The networks that a config asks for, as options of either engine's ``PolicyNet``."""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Config
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.networks.spec import ImageEncoder


def net_options(config: Config, observation: ObservationLayout, action: ActionLayout) -> dict[str, Any]:
    """Arguments of :class:`lockstep.networks.spec.PolicyNet`, but for ``custom``.

    Raises:
        ValueError: the networks don't fit the spaces; one line.
    """
    network = config.network
    if network.squash and not (action.kind == "continuous" and action.bounded):
        what = "discrete" if action.discrete else f"continuous within {list(action.low)} and {list(action.high)}"
        raise ValueError(f"network.squash: needs continuous actions with finite bounds and they are {what}")
    encoder = ImageEncoder(network.image.kind, network.image.width, network.image.depth)
    encoder.check(observation)
    return {
        "observation": observation,
        "action": action,
        "hidden_sizes": network.hidden_sizes,
        "activation": network.activation,
        "critic": config.algorithm == "ppo",
        "shared": network.shared and config.algorithm == "ppo",
        "squashed": network.squash,
        "state_dependent_std": network.state_dependent_std and not action.discrete,
        "image": encoder,
        "core": network.recurrent,
        "core_size": network.recurrent_size,
        "bf16": config.precision == "bf16",
    }
