"""Wraps a trained policy as a PyTorch module that maps raw observations to the environment's actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.run import Config
from lockstep.core.spaces import ObservationLayout, descend, layouts_from_json
from lockstep.policies.rows import batch_of, check_takes_mask
from lockstep.runs.checkpoint import POLICY
from lockstep.torch_engine.nets import distributions
from lockstep.torch_engine.nets.nets import expand
from lockstep.torch_engine.policy import as_in_training, forward, named_output
from lockstep.torch_engine.state import make_net


@dataclass(frozen=True)
class FloatLayout(ObservationLayout):
    """Puts images as float32 columns after the others, because bytes read as floats depend on the machine."""

    @classmethod
    def of(cls, layout: ObservationLayout) -> FloatLayout:
        """Makes the layout with the same parts as another one."""
        moved = (replace(x, start=x.start - 3 * layout.float_size) if x.kind == "image" else x for x in layout.leaves)
        return cls(tuple(moved))

    @cached_property
    def image_bytes(self) -> int:
        """The bytes of images in a row: 0, because images are float columns."""
        return 0


class PolicyModule(nn.Module):
    """Maps raw observations to greedy actions; normalisation, masks, scaling and recurrent state are inside.

    Parameters have the names of the checkpoint, ``policy.actor.0.weight`` (but for :func:`_attribute`), and can be
    trained further. The normaliser's numbers, the first values of indices and the bounds of actions are buffers.

    Args:
        config: of the run.
        environment: the description that the checkpoint holds.
        arrays: ``policy/…`` by name, from either engine.
        normalizer: what is subtracted from observations and what they are multiplied by, float32 ``[numbers]``, and the
            limit they are clipped to; None: observations aren't normalised.
        custom_class: class of the custom network, if the caller has it; None: it is found by its name.

    Raises:
        ValueError: if the networks can't be made; the message is one line.

    Attributes:
        observation: the layout of observations; ``action`` is that of actions.
        state_size: size of a recurrent policy's state, else 0.
        bf16: whether networks compute in bfloat16.
    """

    observation_mean: Tensor
    observation_scale: Tensor
    action_first: Tensor
    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        config: Config,
        environment: dict[str, Any],
        arrays: Mapping[str, np.ndarray],
        normalizer: tuple[np.ndarray, np.ndarray, float] | None = None,
        custom_class: type | None = None,
    ) -> None:
        super().__init__()
        self.observation, self.action = layouts_from_json(environment["observation"], environment["action"])
        with as_in_training(config.threads):
            net = make_net(config, self.observation, self.action, custom_class)
        self._net = replace(net, observation=FloatLayout.of(self.observation), traceable=True)
        self._names = {name: ".".join(map(_attribute, name.split("."))) for name in net.shapes()}
        self.state_size, self.bf16 = net.state_size if net.core else 0, net.bf16
        self.policy = nn.Module()
        for name, shape in net.shapes().items():
            values = torch.from_numpy(np.array(arrays[POLICY + name], np.float32).reshape(shape))
            _register(self.policy, self._names[name], nn.Parameter(values))
        self._limit = None if normalizer is None else normalizer[2]
        if normalizer is not None:
            self.register_buffer("observation_mean", torch.from_numpy(normalizer[0].copy()))
            self.register_buffer("observation_scale", torch.from_numpy(normalizer[1].copy()))
        if self.action.discrete:
            self.register_buffer("action_first", torch.tensor(self.action.first, device="cpu"))
        else:
            self.register_buffer("action_low", torch.tensor(self.action.low, dtype=torch.float32, device="cpu"))
            self.register_buffer("action_high", torch.tensor(self.action.high, dtype=torch.float32, device="cpu"))
        self.eval()

    def initial_state(self, count: int = 1) -> Tensor:
        """Returns the recurrent state before an episode: zeros float32 ``[count, state_size]``."""
        return next(self.parameters()).new_zeros((count, self.state_size))

    def forward(self, observation: Any, action_mask: Any = None, state: Tensor | None = None) -> dict[str, Tensor]:
        """Computes greedy actions, and what they come from, for a batch of ``n`` observations.

        Args:
            observation: a tensor ``[n, …]``, or a (nested) dict or tuple of them as in the environment's space. Any
                dtype: numbers are taken as float32, indices as the environment gives them, images 0 … 255.
            action_mask: which actions are allowed, ``[n, choices]`` or ``[choices]``, if the environment gives that
                apart from its observations; None: all.
            state: the recurrent state, float32 ``[n, state_size]``; None: episodes begin.

        Returns:
            A dict: ``action``, what ``env.step`` takes, int64 ``[n]`` or ``[n, *shape]``, or float32 ``[n, *shape]``
            within its bounds; ``logits`` ``[n, choices]``, -1e8 where an action is forbidden, or ``mean`` and ``std``
            ``[n, components]`` of the Gaussian before it is clipped or squashed; ``value`` ``[n]`` if there is a
            critic; ``next_state`` ``[n, state_size]``, the ``state`` of the next step, if the policy is recurrent.

        Raises:
            ValueError: a part's shape isn't the environment's, or there is a mask and the policy was trained without
                one apart from its observations; one line.
        """
        net, rows = self._net, self._rows(observation, action_mask)
        weights = expand({name: self.policy.get_parameter(own) for name, own in self._names.items()}, 1)
        if self.state_size and state is None:
            state = rows.new_zeros((rows.shape[0], self.state_size))
        output, values, after = forward(net, weights, rows, state)
        out = {"action": self._native(distributions.mode(net, output))} | named_output(net, weights, output)
        if values is not None:
            out["value"] = values[0]
        if after is not None:
            out["next_state"] = after
        return {name: x[0] if name in ("logits", "mean", "std") else x for name, x in out.items()}

    def _rows(self, observation: Any, action_mask: Any) -> Tensor:
        """Puts observations and mask into normalised rows float32 ``[n, columns]``, ordered by :class:`FloatLayout`."""
        check_takes_mask(self.observation, action_mask)
        parts: list[Tensor] = []
        device = next(self.parameters()).device
        seen = next(leaf for leaf in self.observation.leaves if not leaf.apart)
        count = torch.as_tensor(descend(observation, seen.name)).shape[0]
        for leaf in self.observation.leaves:
            if leaf.apart:
                given = torch.ones(leaf.shape, device=device) if action_mask is None else torch.as_tensor(action_mask)
                part = given.to(device, torch.float32).expand(count, leaf.size)
            else:
                part = torch.as_tensor(descend(observation, leaf.name)).to(device)
                if tuple(part.shape[1:]) != leaf.shape:
                    what = f" part {leaf.name!r}" if leaf.name else ""
                    takes = f"this policy takes batches {batch_of(leaf.shape)}"
                    raise ValueError(f"observation{what} of shape {tuple(part.shape)}; {takes}")
                part = part.reshape(part.shape[0], leaf.size)
                if leaf.first:
                    part = part - torch.tensor(leaf.first, device=device)
                part = part.to(torch.float32)
            parts.append(part)
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._limit is None:
            return rows
        numbers = self.observation.vector_size
        scaled = (rows[:, :numbers] - self.observation_mean) * self.observation_scale
        return torch.cat([scaled.clamp(-self._limit, self._limit), rows[:, numbers:]], -1)

    def _native(self, actions: Tensor) -> Tensor:
        """Converts actions ``[1, n, …]`` to the environment's units and shape."""
        actions = actions[0]
        if self.action.kind == "discrete":
            return actions + self.action_first[0]
        if self.action.kind == "multi_discrete":
            return (actions + self.action_first).reshape(-1, *self.action.shape)
        if self._net.squashed:
            actions = distributions.into_bounds(actions, self.action_low, (self.action_high - self.action_low) * 0.5)
        clipped = torch.minimum(torch.maximum(actions, self.action_low), self.action_high)
        return clipped.reshape(-1, *self.action.shape)


def _attribute(key: str) -> str:
    """Returns the name of a module's attribute for one part of a parameter's name; it is the part itself if possible.

    Where modules have an attribute of that name, as for an image ``forward``, or the part is empty, as for ``front.``,
    it ends with an underscore more.
    """
    taken = nn.Module()
    begins = (key[: len(key) - n] for n in range(len(key) - len(key.rstrip("_")) + 1))  # so that no two are alike
    return key + "_" if any(not begin or hasattr(taken, begin) for begin in begins) else key


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter whose name has dots, in nested modules."""
    *path, last = name.split(".")
    for key in path:
        if key not in module._modules:
            module.add_module(key, nn.Module())
        module = module.get_submodule(key)
    module.register_parameter(last, parameter)
