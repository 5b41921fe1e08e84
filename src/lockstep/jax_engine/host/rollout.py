"""Collects a rollout from environments on the host in groups: while one steps, the device infers for another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.envs.gymnasium.random_policy import allowed_actions, random_actions
from lockstep.envs.host_envs import Buffers, HostEnvs
from lockstep.envs.restore.replay import ReplayLog, row_hashes

Infer = Callable[[int, int, np.ndarray], Array]
"""Group, step and rows ``[n, width]`` as the environments gave them, to the actions under way."""


@dataclass
class HostRollout:
    """Holds a process's rollout, host arrays ``[T, E, …]`` over its environments.

    Attributes:
        raw: observation rows with the one that follows the last step, ``[T+1, E, width]``.
        actions: as the policy took them; ``native`` as the environments did.
        scores: float64, rewards as the environments gave them; ``rewards`` as the learner gets them.
        terminated: bool, for the learner: lost lives too; ``truncated`` likewise.
        final: rows that truncated an episode; zeros elsewhere.
        successes: int8.
        over: bool, where an episode of the environment ended.
        stated: the environments' own metrics of episodes that ended.
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
        self.stated: dict[tuple[int, int], dict[str, float]] = {}

    @classmethod
    def empty(cls, config: Config, envs: Sequence[HostEnvs]) -> HostRollout:
        """Makes buffers for the environments of all groups."""
        b, shape = envs[0].buffers, (config.num_steps, sum(group.num_envs for group in envs))
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
        """Keeps what a step of a group gave."""
        self.scores[t, part] = b.rewards
        self.successes[t, part] = b.successes
        self.terminated[t, part] = b.terminated | b.lost
        self.over[t, part] = b.terminated | b.truncated
        self.truncated[t, part] = b.truncated & ~self.terminated[t, part]
        self.raw[t + 1, part] = b.observations
        if b.truncated.any():
            self.final[t, part][b.truncated] = b.final_observations[b.truncated]

    @property
    def first_episodes(self) -> np.ndarray:
        """Marks where no episode of the environment had ended before in this rollout, bool ``[T, E]``."""
        return np.cumsum(self.over, 0) - self.over == 0


def parts_of(envs: Sequence[HostEnvs]) -> list[slice]:
    """Says which environments each group has."""
    ends = np.cumsum([0, *(group.num_envs for group in envs)])
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def collect(
    envs: Sequence[HostEnvs], infer: Infer, squash: Callable[[np.ndarray], np.ndarray], out: HostRollout
) -> None:
    """Steps the environments of every group ``T`` times; ``squash`` makes their actions of the policy's."""
    parts = parts_of(envs)
    out.stated.clear()
    for part, group in zip(parts, envs, strict=True):
        out.raw[0, part] = group.buffers.observations
    under_way = [infer(g, 0, out.raw[0, part]) for g, part in enumerate(parts)]
    steps = len(out.scores)
    for t in range(steps):
        for g, group in enumerate(envs):
            life.wait()  # the networks may still be under way, in a collective
            actions = np.asarray(under_way[g])
            life.go_on()
            actions = actions.reshape(out.actions[t, parts[g]].shape)
            out.actions[t, parts[g]] = actions
            out.native[t, parts[g]] = group.buffers.actions[...] = squash(actions)
            group.begin_step()
        for g, group in enumerate(envs):
            group.end_step()
            life.progressed()
            out.take(t, parts[g], group.buffers)
            out.stated |= group.stated_at(t)
            if t + 1 < steps:
                under_way[g] = infer(g, t + 1, out.raw[t + 1, parts[g]])
    out.rewards[...] = envs[0].description.rewards(out.scores)


def collect_random(config: Config, plan: ShardPlan, envs: Sequence[HostEnvs], out: HostRollout) -> None:
    """Collects a rollout of random actions, for the normalisers' first statistics; then episodes start anew."""
    description = envs[0].description
    actions = random_actions(config, plan, description.action)
    for part, group in zip(parts_of(envs), envs, strict=True):
        b = group.buffers
        out.raw[0, part] = b.observations
        for t in range(config.num_steps):
            b.actions[...] = allowed_actions(
                description.observation, description.action, b.observations, actions[t, part]
            )
            group.step()
            life.progressed()
            out.take(t, part, b)
        b.episodes += 1
        group.reset()
    out.rewards[...] = description.rewards(out.scores)


def record_replay(replays: Sequence[ReplayLog], envs: Sequence[HostEnvs], out: HostRollout) -> None:
    """Keeps the actions of live episodes, with a hash of what each step returned."""
    for replay, part in zip(replays, parts_of(envs), strict=True):
        hashes = row_hashes(np.ascontiguousarray(out.raw[1:, part]), out.scores[:, part])
        native = out.native[:, part].astype(envs[0].buffers.actions.dtype)
        replay.extend(native, hashes, out.over[:, part])
