"""Collects on an accelerator by graphs: what a step launches is captured once, and replayed.

A step of the policy launches some dozen small operations, and with array environments some hundred, always on the same
memory; launching takes most of the host's time. A graph has memory of its own: a step's observations and noise are
copied there before it, and its results from there after it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.accelerated.graphs import captured
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.envs.tensor_rollout import TensorCollector, TensorRollout, take_step
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.state import TrainState


class GraphedActor(Actor):
    """Samples as another actor does, by replaying graphs; see :class:`lockstep.torch_engine.nets.functions.Actor`.

    If a step can't be captured, all steps are launched, with one warning; if graphs were ``asked`` for, it is an error.
    """

    def __init__(self, inner: Actor, asked: bool) -> None:
        self._inner, self._asked = inner, asked
        self._steps: dict[int | None, _SampledStep] = {}
        self._launched = False

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """See :meth:`Actor.begin`."""
        self._inner.begin(recurrent_state)

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`."""
        return self._inner(observations, noise, part)

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`; the next call for the same environments overwrites the result."""
        key = None if part is None else part.start
        if key not in self._steps and not self._launched:
            self._steps[key] = _SampledStep(self._inner, observations, noise, part)
            self._launched = not self._steps[key].captured(self._asked)
        if self._launched:
            return self._inner.tensors(observations, noise, part)
        return self._steps[key](observations, noise)

    def forget(self, done: Tensor, part: slice | None = None) -> None:
        """See :meth:`Actor.forget`."""
        self._inner.forget(done, part)

    def carried(self) -> list[Tensor]:
        """See :meth:`Actor.carried`."""
        return self._inner.carried()


class _SampledStep:
    """Samples actions for some environments, from observations and noise in memory of its own."""

    def __init__(self, actor: Actor, observations: Tensor, noise: Tensor, part: slice | None) -> None:
        self._actor, self._part = actor, part
        self._observations, self._noise, self._actions = observations.clone(), noise.clone(), torch.zeros(0)
        self._replay: Callable[[], None] | None = None

    def captured(self, asked: bool) -> bool:
        """Captures the sampling; returns whether it could be captured."""
        what, kept = "the sampling of actions", self._actor.carried()
        self._replay = captured(self._noise.device, self._step, kept, what, asked)
        return self._replay is not None

    def _step(self) -> None:
        self._actions = self._actor.tensors(self._observations, self._noise, self._part)

    def __call__(self, observations: Tensor, noise: Tensor) -> Tensor:
        assert self._replay is not None
        self._observations.copy_(observations)
        self._noise.copy_(noise)
        self._replay()
        return self._actions


class GraphedCollector(TensorCollector):
    """Collects as :class:`TensorCollector` does, with the same operations in the same order.

    If a step can't be captured, it launches them.
    """

    def __init__(self, config: Config, plan: ShardPlan, state: TrainState, envs: TensorEnvs, actor: Actor) -> None:
        super().__init__(config, plan, state, envs, actor)
        self._one = TensorRollout.on_device(
            1, envs, state.net, state.observation_normalizer is not None, plan.local_num_shards
        )
        self._noise: Tensor | None = None
        self._held: list[dict[str, Tensor]] = []
        self._replay: Callable[[], None] | None = None

    def take_steps(self, noise: Tensor) -> None:
        """See :meth:`TensorCollector.take_steps`; the first call captures a step."""
        if self._noise is None:
            self._replay = self._captured(noise[0].clone())
        if self._replay is None:
            super().take_steps(noise)
            return
        assert self._noise is not None
        self._stay()  # a reset since the last rollout has put the arrays elsewhere
        self._one.observations[1] = self._buffers.observations[0]
        for t in range(len(noise)):
            self._noise.copy_(noise[t])
            self._replay()
            self._buffers.take(t, self._one)
            life.progressed()

    def _step(self) -> None:
        """Takes one step from where the last one ended, and leaves everything in the same memory."""
        one = self._one
        assert self._noise is not None
        one.observations[0] = one.observations[1]
        take_step(0, self._envs, self._actor, self._noise, one, self._normalize, self._squash)
        self._stay()

    def _stay(self) -> None:
        for group, memory in zip(self._envs.arrays, self._held, strict=True):
            group.move_to(memory)

    def _captured(self, noise: Tensor) -> Callable[[], None] | None:
        """Captures a step; returns None if it can't be captured."""
        groups = self._envs.arrays
        self._noise, self._held = noise, [{name: x.clone() for name, x in group.memory.items()} for group in groups]
        self._stay()
        held = [x for memory in self._held for x in memory.values()]
        kept = [self._envs.observations, *self._actor.carried(), *held]
        asked = self._config.cuda_graphs is True
        try:
            return captured(self._envs.device, self._step, kept, "a step of a rollout", asked)
        finally:
            for group, memory in zip(groups, self._held, strict=True):
                group.stay_in(memory)
