"""Defines the interface by which a rank steps its environments on the host, with same-step autoreset.

It is implemented for Gymnasium environments in the rank's process (:mod:`lockstep.envs.gymnasium.in_process`) and in
worker processes (:mod:`lockstep.envs.gymnasium.workers`), for array environments
(:mod:`lockstep.envs.batched.array_envs`) and for EnvPool (:mod:`lockstep.envs.batched.envpool`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, SupportsInt

import numpy as np

from lockstep.config.run import EnvConfig
from lockstep.core.shards import keyed_seed
from lockstep.envs.description import EnvDescription


@dataclass(frozen=True)
class WantedEnvs:
    """Describes the environments that a back end is to make.

    Attributes:
        config: which environment, and in how many worker processes.
        purpose: first part of the keys of resets: ``"reset"`` for training, ``"eval"`` for evaluation.
        group_size: number of environments that share the keys of their resets, and so begin alike.
        device: device of the policy, on which tensor environments and those of JAX are made.
        shard_size: environments per shard; None: all are one shard.
        in_parts: whether some shards may be stepped while the caller works on the others, see :attr:`HostEnvs.parts`.
        overlapped: whether the caller computes in another thread, so that parts pay off in one process too.
    """

    config: EnvConfig
    description: EnvDescription
    seed: int
    env_ids: Sequence[int]
    purpose: str = "reset"
    group_size: int = 1
    device: str = "cpu"
    shard_size: int | None = None
    in_parts: bool = False
    overlapped: bool = False

    @property
    def keys(self) -> list[int]:
        """Each environment's number in the keys of its random numbers; environments of a group share it."""
        return [env_id // self.group_size for env_id in self.env_ids]

    def slices(self, size: int | None) -> list[slice]:
        """Cuts the rows into slices of ``size`` environments; None: one slice of all."""
        count = len(self.env_ids)
        return [slice(start, start + (size or count)) for start in range(0, count, size or count)]

    def episode_key(self, row: int, episode: SupportsInt) -> tuple[int, ...]:
        """Returns the key of an episode's reset; without the episode in an evaluation, which repeats the same ones."""
        key = self.env_ids[row] // self.group_size
        return (key,) if self.purpose == "eval" else (key, int(episode))

    def episode_seed(self, row: int, episode: SupportsInt, stream: str = "") -> int:
        """Returns the seed of an episode's reset; ``stream`` separates a back end's own draws from others."""
        return keyed_seed(self.seed, self.purpose + stream, *self.episode_key(row, episode))


def cut(num_envs: int, shard_size: int | None, workers: int) -> list[slice]:
    """Cuts the rows into two parts of whole shards, or into one part if shards or workers can't be split evenly."""
    half = num_envs // (shard_size or num_envs) // 2 * (shard_size or num_envs)
    if half == 0 or workers * half % num_envs:
        return [slice(0, num_envs)]
    return [slice(0, half), slice(half, num_envs)]


@dataclass
class Buffers:
    """Holds what one step reads and writes, for ``E`` environments.

    Where a step ended an episode, ``final_observations`` holds its last observation, and ``observations`` the first one
    of the next episode (unless the back end resets late, see :attr:`HostEnvs.late_reset`).

    Attributes:
        actions: int64 ``[E]`` or ``[E, indices]``, or float32 ``[E, components]``.
        observations: rows ``[E, width]`` (:class:`lockstep.core.spaces.ObservationLayout`).
        final_observations: rows ``[E, width]``, valid only where the step ended an episode.
        rewards: float64 ``[E]``, the environment's own.
        terminated: bool ``[E]``.
        truncated: bool ``[E]``.
        successes: int8 ``[E]``: 1 if the step left the task solved, -1 if not, 0 if the environment doesn't say.
        scores: float64 ``[E]``, points of the episode up to this step; NaN if the environment has none.
        episodes: int64 ``[E]``, index of each environment's live episode.
        stepping: int64 ``[1 or workers]``, the row that is being stepped now; -1: none.
        heartbeats: int64 ``[1 or workers]``, incremented when a worker starts, when it steps its rows, and at each
            reset.
        lost: bool ``[E]``, where a life was lost. For the learner that terminates an episode, while the game, its score
            and its replay go on.
        dead: bool ``[E]``, where a back end that resets late began an episode instead of taking a step.
    """

    actions: np.ndarray
    observations: np.ndarray
    final_observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    successes: np.ndarray
    scores: np.ndarray
    episodes: np.ndarray
    stepping: np.ndarray
    heartbeats: np.ndarray
    lost: np.ndarray
    dead: np.ndarray

    def of(self, part: slice) -> Buffers:
        """Returns views of the rows of a part."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Buffers(**{name: x if name in _OF_STEPPERS else x[part] for name, x in arrays.items()})


_OF_STEPPERS = ("stepping", "heartbeats")


def buffer_layout(description: EnvDescription, num_envs: int, slots: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shape and dtype of each buffer."""
    action, rows = description.action, ((num_envs, description.observation.width), description.observation.dtype)
    return {
        "actions": ((num_envs, *action.row_shape), action.row_dtype),
        "observations": rows,
        "final_observations": rows,
        "rewards": ((num_envs,), np.float64),
        "terminated": ((num_envs,), np.bool_),
        "truncated": ((num_envs,), np.bool_),
        "successes": ((num_envs,), np.int8),
        "scores": ((num_envs,), np.float64),
        "episodes": ((num_envs,), np.int64),
        "stepping": ((slots,), np.int64),
        "heartbeats": ((slots,), np.int64),
        "lost": ((num_envs,), np.bool_),
        "dead": ((num_envs,), np.bool_),
    }


def by_row(arrays: Mapping[str, Any], count: int) -> list[dict[str, np.ndarray] | None]:
    """Splits arrays ``[count, …]`` into one dict of arrays for each environment."""
    return [{name: np.asarray(values[row]) for name, values in arrays.items()} for row in range(count)]


RowMetrics = dict[int, dict[str, float]]
"""Maps the row of an environment to the metrics, by name, that it states of an ended episode."""


class HostEnvs(ABC):
    """Steps a rank's environments on the host.

    Attributes:
        buffers: what the last step read and wrote.
        env_metrics: by row, the metrics under ``"metrics"`` in ``info`` of the episodes that the last step ended.
        replayed: whether live episodes may have to be restored by replaying their actions.
        late_reset: whether resets come one step late: ``observations`` holds an ended episode's last observation, and
            the next step begins the next episode, whatever the action. Otherwise both happen in the same step.
        in_workers: whether :meth:`begin_step` sets other processes to work; otherwise :meth:`end_step` does everything.
    """

    replayed = True
    late_reset = False
    in_workers = False

    def __init__(self, description: EnvDescription, env_ids: Sequence[int], buffers: Buffers | None = None) -> None:
        self.description = description
        self.env_ids = list(env_ids)
        layout = buffer_layout(description, len(env_ids), 1)
        self.buffers = buffers or Buffers(**{k: np.zeros(s, d) for k, (s, d) in layout.items()})
        self.buffers.scores[:] = np.nan
        self.env_metrics: RowMetrics = {}

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.env_ids)

    @abstractmethod
    def reset(self) -> None:
        """Starts episode ``buffers.episodes`` in every environment."""

    @abstractmethod
    def step(self) -> None:
        """Steps every environment with ``buffers.actions``; where an episode ends, starts the next one."""

    @property
    def parts(self) -> list[slice]:
        """Parts of the rows that can be stepped separately: whole shards, in order; a single part if none can."""
        return [slice(0, self.num_envs)]

    def begin_step(self, part: int = 0) -> None:
        """Begins a step of one part; worker processes step it while the caller works until :meth:`end_step`."""
        return

    def end_step(self, part: int = 0) -> None:
        """Finishes a step of one of :attr:`parts` that was begun; its rows are then as after :meth:`step`."""
        self.step()

    def env_metrics_at(self, step: int) -> dict[tuple[int, int], dict[str, float]]:
        """Returns :attr:`env_metrics` keyed by (step, global env id)."""
        return {(step, self.env_ids[row]): said for row, said in self.env_metrics.items()} if self.env_metrics else {}

    def has_hooks(self) -> bool:
        """Returns whether some environment has state hooks, whose state may be more than that of its live episode."""
        return False

    @abstractmethod
    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """Returns each environment's own state, None where only replaying can restore it."""

    @abstractmethod
    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """Restores one environment's live episode; returns False if it began the next episode instead."""

    def close(self) -> None:
        """Releases the environments."""
        self.env_ids = []
