"""Collecting from environments on the host with a policy on an accelerator: one copy up and one down a step.

The rollout's noise is drawn and copied before its first step. What went up stays there, so that nothing of observations
and actions is copied again when the rollout is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import check_numbers
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.rollout import HostCollector, Rollout, action_noise, collect
from lockstep.torch_engine.setup.accelerator import Download, host_buffer, pins, upload
from lockstep.torch_engine.state import TrainState

ALIGNMENT = 64
"""Bytes at multiples of which a step's observations begin."""


class StagedActor(Actor):
    """Samples a rank's actions on an accelerator for environments on the host; see :class:`.nets.functions.Actor`.

    A step's observations go up together with the marks of episodes that ended before it, in one copy, to where the
    update will look for them.

    Attributes:
        observations: on the device, ``[T+1, E, width]``; ``actions`` likewise, ``[T, E, …]``.
    """

    def __init__(self, inner: Actor, envs: HostEnvs, num_steps: int, device: torch.device) -> None:
        self._inner, self._device = inner, device
        rows, actions = (torch.from_numpy(x) for x in (envs.buffers.observations, envs.buffers.actions))
        self._bytes = rows.numel() * rows.element_size()
        row = -(-(self._bytes + envs.num_envs) // ALIGNMENT) * ALIGNMENT
        self._above = torch.zeros((num_steps + 1, row), dtype=torch.uint8, device=device)
        self._staged = host_buffer((row,), torch.uint8, device)
        self._staged_rows = self._staged[: self._bytes].view(rows.dtype).view(rows.shape).numpy()
        self._staged_ends = self._staged[self._bytes : self._bytes + envs.num_envs].view(torch.bool).numpy()
        self.observations = self._above[:, : self._bytes].view(rows.dtype).unflatten(1, tuple(rows.shape))
        self._ends = self._above[:, self._bytes : self._bytes + envs.num_envs].view(torch.bool)
        self.actions = torch.zeros((num_steps, *actions.shape), dtype=actions.dtype, device=device)
        self._down = host_buffer(tuple(actions.shape), actions.dtype, device)
        self._noise = torch.zeros(0)
        self._step = 0

    def draw(self, noise: np.ndarray) -> None:
        """Copies a rollout's noise up, float32 ``[T, E, action outputs]``."""
        self._noise = upload(noise, self._device)

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """See :meth:`Actor.begin`."""
        self._step = 0
        self._staged_ends[:] = False
        with torch.inference_mode(False), torch.no_grad():
            self._inner.begin(recurrent_state)

    def _send(self, observations: np.ndarray) -> None:
        """Copies a step's observations and ends up; what was staged before has arrived when its actions came down."""
        self._staged_rows[...] = observations
        self._above[self._step].copy_(self._staged, non_blocking=pins(self._device))

    def __call__(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """See :meth:`Actor.__call__`; ``noise`` has gone up before, and what is returned is overwritten by the next."""
        with torch.inference_mode(False), torch.no_grad():
            step = self._step
            self._send(observations)
            if step:
                self._inner.forget(self._ends[step])
            self.actions[step] = self._inner.tensors(self.observations[step], self._noise[step])
            self._step += 1
            return Download(self.actions[step], self._down).wait().numpy()

    def tensors(self, observations: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return self._inner.tensors(observations, noise)

    def forget(self, done: Tensor) -> None:
        """See :meth:`Actor.forget`; the marks go up with the next observations."""
        self._staged_ends[:] = done.numpy()

    def finish(self, observations: np.ndarray) -> None:
        """Copies what followed the last step up."""
        with torch.no_grad():
            self._send(observations)


@dataclass
class StagedRollout(Rollout):
    """Holds a rollout of environments on the host whose observations and actions are on the device as well."""

    staged: Any = field(default=None)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`Rollout.tensors`."""
        return self.staged.observations, self.staged.actions


class StagedCollector(HostCollector):
    """Collects from environments on the host for an accelerator; see :class:`.rollout.Collector`."""

    def __init__(self, config: Config, plan: ShardPlan, state: TrainState, envs: HostEnvs, actor: Actor) -> None:
        self._staged = StagedActor(actor, envs, config.num_steps, state.parameters.flat.device)
        super().__init__(config, plan, state, envs, self._staged)
        held = {each.name: getattr(self.rollout, each.name) for each in fields(self.rollout)}
        self.rollout: Rollout = StagedRollout(**held, staged=self._staged)

    def collect(self) -> None:
        """See :meth:`Collector.collect`."""
        noise = action_noise(self._config, self._plan, self._state.net, self._state.iteration)
        self._staged.draw(noise)
        collect(self._state, self._envs, self._actor, noise, self.rollout)
        self._staged.finish(self.rollout.observations[-1])
        rollout, envs = self.rollout, self._envs
        check_numbers(envs.description, envs.env_ids, rollout.raw, rollout.scores, self._state.iteration)
