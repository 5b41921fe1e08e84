"""Collects a rollout from environments on the host in parts: while one part steps, the device infers for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import Buffers, HostEnvs
from lockstep.envs.numbers import check_acted
from lockstep.envs.restore.replay import ReplayLog, row_hashes
from lockstep.training.host_rollout import random_steps

Infer = Callable[[int, int, np.ndarray], Array]
"""From a part, a step and its rows ``[n, width]`` as the environments gave them, starts computing the actions."""


@dataclass
class HostRollout:
    """Holds a process's rollout, host arrays ``[T, E, …]`` over its environments.

    Attributes:
        raw: observation rows, including those after the last step, ``[T+1, E, width]``.
        actions: as the policy took them; ``native`` as the environments did.
        scores: float64, rewards as the environments gave them; ``rewards`` are those after reward shaping.
        terminated: bool, for the learner, at lost lives too; so is ``truncated``.
        final: rows that truncated an episode; zeros elsewhere.
        successes: int8.
        over: bool, where an episode of the environment ended.
        env_metrics: the environments' own metrics of episodes that ended.
    """

    raw: np.ndarray
    actions: np.ndarray
    native: np.ndarray
    scores: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final: np.ndarray
    successes: np.ndarray
    over: np.ndarray

    def __post_init__(self) -> None:
        self.env_metrics: dict[tuple[int, int], dict[str, float]] = {}

    @classmethod
    def empty(cls, config: Config, envs: HostEnvs) -> HostRollout:
        """Allocates arrays for the environments of this process."""
        b, shape = envs.buffers, (config.num_steps, envs.num_envs)
        row, dtype = b.observations.shape[1:], b.observations.dtype
        actions = np.zeros((*shape, *b.actions.shape[1:]), np.int32 if b.actions.dtype == np.int64 else np.float32)
        return cls(
            raw=np.zeros((shape[0] + 1, shape[1], *row), dtype),
            actions=actions,
            native=np.zeros_like(actions),
            scores=np.zeros(shape),
            rewards=np.zeros(shape),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            final=np.zeros((*shape, *row), dtype),
            successes=np.zeros(shape, np.int8),
            over=np.zeros(shape, np.bool_),
        )

    def take(self, t: int, part: slice, b: Buffers) -> None:
        """Stores the results of step ``t`` of some environments."""
        self.scores[t, part] = b.rewards
        self.successes[t, part] = b.successes
        self.terminated[t, part] = b.terminated | b.lost
        self.over[t, part] = b.terminated | b.truncated
        self.truncated[t, part] = b.truncated & ~self.terminated[t, part]
        self.raw[t + 1, part] = b.observations
        if b.truncated.any():
            self.final[t, part][b.truncated] = b.final_observations[b.truncated]


def collect(
    envs: HostEnvs, infer: Infer, squash: Callable[[np.ndarray], np.ndarray], out: HostRollout, iteration: int
) -> None:
    """Steps every part of the environments ``T`` times.

    ``squash`` turns the policy's actions into the environments'; ``iteration`` is named in errors.
    """
    parts = envs.parts
    buffers = [envs.buffers.of(part) for part in parts]
    out.env_metrics.clear()
    out.raw[0] = envs.buffers.observations
    under_way = [infer(p, 0, out.raw[0, part]) for p, part in enumerate(parts)]
    steps = len(out.scores)

    def end(p: int, t: int) -> None:
        envs.end_step(p)
        life.progressed()
        out.take(t, parts[p], buffers[p])
        out.env_metrics |= envs.env_metrics_at(t)
        if t + 1 < steps:
            under_way[p] = infer(p, t + 1, out.raw[t + 1, parts[p]])

    t = 0
    try:
        for t in range(steps):
            for p, part in enumerate(parts):
                life.wait()  # the networks may still be under way, in a collective
                actions = np.asarray(under_way[p])
                life.go_on()
                actions = actions.reshape(out.actions[t, part].shape)
                out.actions[t, part] = actions
                out.native[t, part] = buffers[p].actions[...] = squash(actions)
                envs.begin_step(p)
                if not envs.in_workers:
                    end(p, t)
            if envs.in_workers:
                for p in range(len(parts)):
                    end(p, t)
    except EnvironmentFailureError:
        check_acted(envs.description, envs.env_ids, out.raw[: t + 1], iteration)
        raise
    out.rewards[...] = envs.description.rewards(out.scores)


def collect_random(config: Config, plan: ShardPlan, envs: HostEnvs, out: HostRollout) -> None:
    """Collects a rollout of random actions for the normalisers' first statistics, then resets all environments."""
    for t in random_steps(config, plan, envs, out.raw):
        out.take(t, slice(None), envs.buffers)
    out.rewards[...] = envs.description.rewards(out.scores)


def record_replay(replay: ReplayLog, envs: HostEnvs, out: HostRollout) -> None:
    """Records the actions of episodes that haven't ended, with a hash of what each step returned."""
    hashes = row_hashes(np.ascontiguousarray(out.raw[1:]), out.scores)
    replay.extend(out.native.astype(envs.buffers.actions.dtype), hashes, out.over)
