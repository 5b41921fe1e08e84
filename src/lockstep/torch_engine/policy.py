"""The trained actor as a function of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.config import Config
from lockstep.torch_engine import nets
from lockstep.torch_engine.nets import PolicyNet
from lockstep.torch_engine.state import POLICY


def actor_function(
    config: Config, environment: dict[str, Any], arrays: dict[str, np.ndarray]
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]:
    """The actor of a checkpoint, on the CPU.

    Args:
        config: the run's.
        environment: the description that the checkpoint holds.
        arrays: ``policy/…`` by name.

    Returns:
        From normalised float32 ``[rows, size]`` to logits or means ``[rows, num_actions]``, and the standard
        deviations ``[num_actions]`` (None if discrete).
    """
    net = PolicyNet(
        observation_size=int(np.prod(environment["observation_shape"], dtype=int)),
        num_actions=environment["num_actions"],
        discrete=environment["discrete"],
        hidden_sizes=config.network.hidden_sizes,
        activation=config.network.activation,
    )
    weights = {name: torch.from_numpy(arrays[POLICY + name]) for name in net.shapes()}
    expanded = nets.expand(weights, 1)
    std = None if net.discrete else np.exp(arrays[POLICY + "log_std"])

    @torch.inference_mode()
    def act(observations: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        rows = torch.from_numpy(np.ascontiguousarray(observations, np.float32)).unsqueeze(0)
        return nets.actor(net, expanded, rows)[0].numpy(), std

    return act
