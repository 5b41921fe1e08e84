"""Collects from environments on the host with a policy on an accelerator: a step has one copy up and one down.

The rollout's noise is drawn and copied before its first step. What went up stays there, so that observations and
actions need no other copy when the rollout is complete.
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
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.rollout import HostCollector, Rollout, action_noise, check_rollout, collect
from lockstep.torch_engine.setup.accelerator import Download, Mark, host_buffer, upload
from lockstep.torch_engine.state import TrainState

ALIGNMENT = 64
"""A step's observations begin at multiples of this many bytes."""


class _Stage:
    """Holds what some environments of a rank send up and get down, in the same host memory at every step.

    Attributes:
        observations: on the device, ``[T+1, n, width]``; ``actions`` likewise, ``[T, n, …]``.
        ends: on the device, bool ``[T+1, n]``, whether an episode ended before each step.
        step: index of the next step.
    """

    def __init__(self, rows: Tensor, actions: Tensor, num_steps: int, device: torch.device) -> None:
        count, size = len(rows), rows.numel() * rows.element_size()
        width = -(-(size + count) // ALIGNMENT) * ALIGNMENT
        self._device, self.step = device, 0
        self._above = torch.zeros((num_steps + 1, width), dtype=torch.uint8, device=device)
        self.observations = self._above[:, :size].view(rows.dtype).unflatten(1, tuple(rows.shape))
        self.ends = self._above[:, size : size + count].view(torch.bool)
        self.actions = torch.zeros((num_steps, *actions.shape), dtype=actions.dtype, device=device)
        self._up = host_buffer((width,), torch.uint8, device)
        self._rows = self._up[:size].view(rows.dtype).view(rows.shape).numpy()
        self._ended = self._up[size : size + count].view(torch.bool).numpy()
        self._down = host_buffer(tuple(actions.shape), actions.dtype, device)
        self._sent: Mark | None = None

    def begin(self) -> None:
        """Starts over with the first step, once the last copy up has arrived."""
        if self._sent is not None:
            self._sent.wait()
        self.step, self._ended[:] = 0, False

    def end(self, ended: np.ndarray) -> None:
        """Marks ends of episodes, bool ``[n]``; the marks go up with the next observations."""
        self._ended[:] = ended

    def send(self, observations: np.ndarray) -> None:
        """Copies a step's observations and marks up, from memory that the last copy no longer reads.

        Within a rollout that copy was over when its actions came down; :meth:`begin` waits for the last one.
        """
        self._rows[...] = observations
        self._above[self.step].copy_(self._up, non_blocking=True)

    def finish(self, observations: np.ndarray) -> None:
        """Copies up the observations after the last step, for which no actions come down."""
        self.send(observations)
        self._sent = Mark(self._device)

    def receive(self, actions: Tensor) -> np.ndarray:
        """Stores a step's actions and copies them down, to where the next step's will be too."""
        self.actions[self.step] = actions
        self.step += 1
        return Download(self.actions[self.step - 1], self._down).wait().numpy()


class StagedActor(Actor):
    """Samples a rank's actions on an accelerator for environments on the host; see :class:`.nets.functions.Actor`.

    A step's observations go up in one copy with the marks of episodes that ended before it, to where the update reads
    them. Environments that are stepped in parts are copied part by part.
    """

    def __init__(self, inner: Actor, envs: HostEnvs, num_steps: int, device: torch.device) -> None:
        self._inner, self.device = inner, device
        rows, actions = (torch.from_numpy(x) for x in (envs.buffers.observations, envs.buffers.actions))
        self._parts = [(part, _Stage(rows[part], actions[part], num_steps, device)) for part in envs.parts]
        self._noise = torch.zeros(0)

    def _stage(self, part: slice | None) -> _Stage:
        return next(stage for own, stage in self._parts if part is None or own.start == part.start)

    def draw(self, noise: np.ndarray) -> None:
        """Copies a rollout's noise up, float32 ``[T, E, action outputs]``."""
        self._noise = upload(noise, self.device)

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """See :meth:`Actor.begin`."""
        for _, stage in self._parts:
            stage.begin()
        with torch.inference_mode(False), torch.no_grad():
            self._inner.begin(recurrent_state)

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """See :meth:`Actor.__call__`; uses the noise that went up before, and the next call overwrites the result."""
        stage = self._stage(part)
        with torch.inference_mode(False), torch.no_grad():
            step, own = stage.step, slice(None) if part is None else part
            stage.send(observations)
            if step:
                self._inner.forget(stage.ends[step], part)
            return stage.receive(self._inner.tensors(stage.observations[step], self._noise[step, own], part))

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """See :meth:`Actor.tensors`."""
        return self._inner.tensors(observations, noise, part)

    def forget(self, done: Tensor, part: slice | None = None) -> None:
        """See :meth:`Actor.forget`; the marks go up with the next observations."""
        self._stage(part).end(done.numpy())

    def finish(self, observations: np.ndarray) -> None:
        """Copies up the observations after the last step, rows ``[E, width]``."""
        with torch.no_grad():
            for part, stage in self._parts:
                stage.finish(observations[part])

    def kept(self) -> tuple[Tensor, Tensor]:
        """Returns a rollout's observations ``[T+1, E, width]`` and actions ``[T, E, …]``, on the device."""
        stages = [stage for _, stage in self._parts]
        if len(stages) == 1:
            return stages[0].observations, stages[0].actions
        return torch.cat([stage.observations for stage in stages], 1), torch.cat([stage.actions for stage in stages], 1)


@dataclass
class StagedRollout(Rollout):
    """Holds a rollout of environments on the host whose observations and actions are on the device as well."""

    staged: Any = field(default=None)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """See :meth:`Rollout.tensors`."""
        return self.staged.kept()

    def final_rows(self, places: np.ndarray) -> Tensor:
        """See :meth:`Rollout.final_rows`; copies them to the device without waiting."""
        return upload(super().final_rows(places), self.staged.device)


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
        check_rollout(self.rollout, self._envs, self._state.iteration)
