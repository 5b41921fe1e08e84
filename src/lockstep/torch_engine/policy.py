"""A trained policy as a function of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.config.run import Config
from lockstep.core.spaces import layouts_from_json
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.state import POLICY, make_net


class PolicyFunction:
    """The actor of a checkpoint, whose arrays are ``policy/…`` by name, on the CPU.

    Attributes:
        observation: how observations lie in rows; ``action`` what actions are.
        carry_size: numbers that a recurrent policy carries from step to step, else 0.
    """

    def __init__(self, config: Config, environment: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        torch.set_num_threads(config.threads)
        self.observation, self.action = layouts_from_json(environment["observation"], environment["action"])
        self._net = make_net(config, self.observation, self.action)
        weights = {name: torch.from_numpy(arrays[POLICY + name]) for name in self._net.shapes()}
        self._weights = nets.expand(weights, 1)
        self.carry_size = self._net.carry_size if self._net.core else 0

    @torch.inference_mode()
    def __call__(
        self, observations: np.ndarray, noise: np.ndarray | None, carry: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gives rows of actions, as :class:`lockstep.envs.host_envs.Buffers` takes them, and what is carried on.

        Takes normalised observation rows ``[rows, width]``, Gumbel or normal noise, float32 ``[rows, action outputs]``
        (None: the most likely actions), and what is carried, float32 ``[rows, carry_size]``.
        """
        net, rows = self._net, torch.from_numpy(np.ascontiguousarray(observations)).unsqueeze(0)
        if net.core is None:
            output = nets.actor(net, self._weights, rows)
        else:
            none = torch.zeros((1, 1, rows.shape[1]))
            before = torch.from_numpy(carry).unsqueeze(0)
            unrolled, _, carries = nets.unroll(net, self._weights, rows.unsqueeze(1), before, none, actor_only=True)
            output, carry = unrolled[:, 0], carries[0, 0].numpy()
        if noise is None:
            actions = distributions.mode(net, output)
        else:
            actions = distributions.sample(net, self._weights, output, torch.from_numpy(noise).unsqueeze(0))
        return distributions.squash(net, actions[0].numpy()), carry
