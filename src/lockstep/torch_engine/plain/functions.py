"""A plain policy's numbers by hand, in NumPy: what the engine asks for in tensors, on the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_engine.nets.functions import Actor, Columns
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.nets.shards import Mode, by_shard
from lockstep.torch_engine.plain.policy import PlainPolicy
from lockstep.training.losses import LossSettings

if TYPE_CHECKING:
    from lockstep.core.shards import ShardPlan


class PlainFunctions:
    """Computes a plain policy's numbers; see :class:`lockstep.torch_engine.nets.functions.PolicyFunctions`.

    The networks must be :func:`lockstep.torch_engine.plain.policy.derivable`, the parameters on the CPU.
    """

    def __init__(self, net: PolicyNet, parameters: FlatParameters) -> None:
        self.plain = PlainPolicy(net, {name: view.numpy() for name, view in parameters.views.items()})

    def actor(self, plan: ShardPlan, mode: Mode) -> PlainActor:
        """See :meth:`PolicyFunctions.actor`."""
        return PlainActor(self.plain, plan, mode)

    def output(self, observations: Tensor) -> Tensor:
        """See :meth:`PolicyFunctions.output`."""
        return torch.from_numpy(self.plain.output(observations.numpy()))

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`PolicyFunctions.evaluate`."""
        log_probs = self.plain.log_probs(observations[:, : actions.shape[1]].clone().numpy(), actions.numpy())
        return torch.from_numpy(log_probs), torch.from_numpy(self.plain.values(observations.numpy()))

    def unroll(
        self, observations: Tensor, actions: Tensor, recurrent_state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Refuses: a plain policy isn't recurrent."""
        raise AssertionError("a plain policy isn't recurrent")

    def values(self, observations: np.ndarray | Tensor, recurrent_state: Tensor | None) -> Tensor:
        """See :meth:`PolicyFunctions.values`."""
        return torch.from_numpy(self.plain.values(np.asarray(observations))[0])

    def gradients(self, columns: Columns, settings: LossSettings) -> Tensor:
        """See :meth:`PolicyFunctions.gradients`."""
        return torch.from_numpy(self.plain.gradients({name: x.numpy() for name, x in columns.items()}, settings))


class PlainActor(Actor):
    """Samples a plain policy's actions; see :class:`lockstep.torch_engine.nets.functions.Actor`."""

    def __init__(self, plain: PlainPolicy, plan: ShardPlan, mode: Mode) -> None:
        self._plain = plain
        self._mode: Mode = mode
        self._split = (plan.local_num_shards, plan.envs_per_shard, -1)

    def __call__(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """See :meth:`Actor.__call__`."""
        rows = observations.reshape(self._split).copy()
        actions = by_shard(self._mode, self._plain.act, rows, noise.reshape(self._split))
        return actions.reshape(len(observations), *actions.shape[2:])

    def tensors(self, observations: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return torch.from_numpy(self(observations.numpy(), noise.numpy()))
