"""Collecting from array environments on an accelerator: a step is captured once as a graph, and replayed.

A step of such environments and of the policy is some hundred small operations on tensors that stay where they are, so
the host's launches take most of its time. They are captured with a rollout of one step as what they fill; the host
copies the noise of each step there before, and what the step gave from there after.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.accelerated.graphs import captured
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.envs.tensor_rollout import TensorCollector, TensorRollout, take_step
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.state import TrainState


class GraphedCollector(TensorCollector):
    """Collects as :class:`TensorCollector` does, with the same operations in the same order.

    Where a step can't be captured it launches them.
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
        self._stay()  # where episodes were begun anew since the last rollout they lie elsewhere
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
        """Captures a step, None where it can't be."""
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
