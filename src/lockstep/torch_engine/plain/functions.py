"""Computes the numbers of plain and recurrent policies by hand in NumPy, on the memory of the engine's tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_engine.nets.functions import Actor, Columns
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.nets.shards import Mode, by_shard, shards_within
from lockstep.torch_engine.plain.policy import PlainPolicy
from lockstep.torch_engine.plain.recurrent import RecurrentPolicy
from lockstep.training.losses import LossSettings

if TYPE_CHECKING:
    from lockstep.core.shards import ShardPlan


NUMBERS = (int, float, type(None))
"""Types of most settings: checking for these is faster than checking for tensors."""


def in_numbers(settings: LossSettings) -> LossSettings:
    """Returns the settings with scheduled coefficients, which are tensors ``[]``, as numbers."""
    others = {name: x for name, x in vars(settings).items() if not isinstance(x, NUMBERS)}
    return settings.scheduled({name: x.item() for name, x in others.items() if isinstance(x, Tensor)})


class PlainFunctions:
    """Computes a plain policy's numbers; see :class:`lockstep.torch_engine.nets.functions.PolicyFunctions`.

    The networks must be :func:`lockstep.torch_engine.plain.policy.derivable`, the parameters on the CPU.
    """

    def __init__(self, net: PolicyNet, parameters: FlatParameters) -> None:
        self.plain = PlainPolicy(net, parameters.flat.numpy())

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
        """Raises: a plain policy isn't recurrent."""
        raise AssertionError("a plain policy isn't recurrent")

    def step(self, observations: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Raises: a plain policy isn't recurrent."""
        raise AssertionError("a plain policy isn't recurrent")

    def values(self, observations: np.ndarray | Tensor, recurrent_state: Tensor | None) -> Tensor:
        """See :meth:`PolicyFunctions.values`."""
        return torch.from_numpy(self.plain.values(np.asarray(observations))[0])

    def gradients(self, columns: Columns, settings: LossSettings, out: Tensor | None = None) -> Tensor:
        """See :meth:`PolicyFunctions.gradients`."""
        arrays = {name: x.numpy() for name, x in columns.items()}
        rows = torch.from_numpy(self.plain.gradients(arrays, in_numbers(settings)))
        return rows if out is None else out.copy_(rows)


class RecurrentFunctions:
    """Computes a recurrent policy's numbers; see :class:`lockstep.torch_engine.nets.functions.PolicyFunctions`.

    The networks must be :func:`lockstep.torch_engine.plain.recurrent.derivable_recurrent`, the parameters on the CPU.
    """

    def __init__(self, net: PolicyNet, parameters: FlatParameters) -> None:
        self.recurrent = RecurrentPolicy(net, {name: view.numpy() for name, view in parameters.views.items()})

    def actor(self, plan: ShardPlan, mode: Mode) -> RecurrentPlainActor:
        """See :meth:`PolicyFunctions.actor`."""
        return RecurrentPlainActor(self.recurrent, plan, mode)

    def output(self, observations: Tensor) -> Tensor:
        """Raises: a recurrent policy's output depends on its state."""
        raise AssertionError("a recurrent policy goes by step or unroll")

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Raises: see :meth:`output`."""
        raise AssertionError("a recurrent policy goes by step or unroll")

    def unroll(
        self, observations: Tensor, actions: Tensor, recurrent_state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`PolicyFunctions.unroll`."""
        given = (x.numpy() for x in (observations, actions, recurrent_state, resets))
        log_probs, values, states = self.recurrent.unroll(*given)
        return torch.from_numpy(log_probs), torch.from_numpy(values), torch.from_numpy(states)

    def step(self, observations: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`PolicyFunctions.step`."""
        none = np.zeros(observations.shape[:2], np.float32)
        stepper = self.recurrent.stepper()
        output, states = self.recurrent.step(stepper, observations.numpy(), recurrent_state.numpy(), none)
        return torch.from_numpy(output), torch.from_numpy(states)

    def values(self, observations: np.ndarray | Tensor, recurrent_state: Tensor | None) -> Tensor:
        """See :meth:`PolicyFunctions.values`."""
        assert recurrent_state is not None
        return torch.from_numpy(self.recurrent.values(np.asarray(observations), recurrent_state.numpy())[0])

    def gradients(self, columns: Columns, settings: LossSettings, out: Tensor | None = None) -> Tensor:
        """See :meth:`PolicyFunctions.gradients`."""
        arrays = {name: x.numpy() for name, x in columns.items()}
        rows = torch.from_numpy(self.recurrent.gradients(arrays, in_numbers(settings)))
        return rows if out is None else out.copy_(rows)


class PlainActor(Actor):
    """Samples a plain policy's actions; see :class:`lockstep.torch_engine.nets.functions.Actor`."""

    def __init__(self, plain: PlainPolicy, plan: ShardPlan, mode: Mode) -> None:
        self._plain = plain
        self._mode: Mode = mode
        self._rows = plan.envs_per_shard

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`."""
        split = (len(observations) // self._rows, self._rows, -1)
        actions = by_shard(self._mode, self._plain.act, observations.reshape(split).copy(), noise.reshape(split))
        return actions.reshape(len(observations), *actions.shape[2:])

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return torch.from_numpy(self(observations.numpy(), noise.numpy()))


class RecurrentPlainActor(Actor):
    """Samples a recurrent policy's actions, and keeps its state ``[k, rows, size]`` from step to step.

    It uses the parameters as they were at the beginning of the rollout.
    """

    def __init__(self, policy: RecurrentPolicy, plan: ShardPlan, mode: Mode) -> None:
        self._policy = policy
        self._mode: Mode = mode
        self._shards, self._rows = plan.local_num_shards, plan.envs_per_shard

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """See :meth:`Actor.begin`."""
        assert isinstance(recurrent_state, np.ndarray)
        self._stepper = self._policy.stepper()
        self._state = recurrent_state.reshape(self._shards, self._rows, -1).copy()
        self._resets = np.zeros((self._shards, self._rows), np.float32)

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`."""
        shards, split = shards_within(part, self._rows), (len(observations) // self._rows, self._rows, -1)
        rows, state = observations.reshape(split).copy(), self._state[shards]
        act = partial(self._policy.act, self._stepper)
        actions, self._state[shards] = by_shard(
            self._mode, act, rows, noise.reshape(split), state, self._resets[shards]
        )
        return actions.reshape(len(observations), *actions.shape[2:])

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return torch.from_numpy(self(observations.numpy(), noise.numpy(), part))

    def forget(self, done: Tensor, part: slice | None = None) -> None:
        """See :meth:`Actor.forget`; takes effect with the next step."""
        resets = self._resets[shards_within(part, self._rows)]
        resets[...] = done.numpy().reshape(resets.shape)
