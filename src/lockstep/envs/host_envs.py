"""Declares how a rank's environments are stepped together on the host, with same-step autoreset.

Behind this interface stand Gymnasium environments in the rank itself (:mod:`lockstep.envs.gymnasium.in_process`) and in
worker processes (:mod:`lockstep.envs.gymnasium.workers`), array environments (:mod:`lockstep.envs.batched.array_envs`)
and EnvPool (:mod:`lockstep.envs.batched.envpool`).
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
    """Says which environments a back end makes.

    Attributes:
        config: which environment, and in how many worker processes.
        purpose: ``"reset"`` for training, ``"eval"`` for evaluation.
        group_size: environments that share the keys of their resets, and so their starts.
        device: of the policy; tensor environments and JAX's live there.
        shard_size: environments of a shard; None: all are one.
        in_parts: whether some shards may be stepped while the caller does something for the others, see
            :attr:`HostEnvs.parts`.
        overlapped: whether parts are worth it in one process too, for a caller who computes in another thread.
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
        """What stands for each environment in the keys of its random numbers."""
        return [env_id // self.group_size for env_id in self.env_ids]

    def slices(self, size: int | None) -> list[slice]:
        """Rows of every ``size`` environments; None: of all."""
        count = len(self.env_ids)
        return [slice(start, start + (size or count)) for start in range(0, count, size or count)]

    def episode_key(self, row: int, episode: SupportsInt) -> tuple[int, ...]:
        """The key of an episode's reset: training counts episodes, an evaluation repeats the same ones."""
        key = self.env_ids[row] // self.group_size
        return (key,) if self.purpose == "eval" else (key, int(episode))

    def episode_seed(self, row: int, episode: SupportsInt, stream: str = "") -> int:
        """The seed of an episode's reset; ``stream`` tells a back end's own draws from others of the same key."""
        return keyed_seed(self.seed, self.purpose + stream, *self.episode_key(row, episode))


def cut(num_envs: int, shard_size: int | None, workers: int) -> list[slice]:
    """Cuts environments into two parts of whole shards, if workers can be shared out evenly between them; else one."""
    half = num_envs // (shard_size or num_envs) // 2 * (shard_size or num_envs)
    if half == 0 or workers * half % num_envs:
        return [slice(0, num_envs)]
    return [slice(0, half), slice(half, num_envs)]


@dataclass
class Buffers:
    """Holds what one step reads and writes, for ``E`` environments.

    ``actions`` int64 ``[E]`` or ``[E, indices]``, or float32 ``[E, components]``; ``observations`` and
    ``final_observations`` rows ``[E, width]`` (:class:`lockstep.core.spaces.ObservationLayout`); ``rewards``
    float64 ``[E]``; ``terminated``, ``truncated`` bool ``[E]``; ``successes`` int8 ``[E]``, 1 where the step left the
    task solved, -1 where it didn't, 0 where the environment doesn't say; ``scores`` float64 ``[E]``, points of the
    episode up to this step, NaN where the environment has none; ``episodes`` int64 ``[E]``, the index of each
    environment's live episode; ``stepping`` int64 ``[1 or workers]``, which row is being stepped now, -1 for none, and
    ``heartbeats`` likewise, counted up when a worker starts, whenever all are stepped and at each reset; ``lost`` bool
    ``[E]``, where a life was lost: for the learner that terminates an episode, while the game, its score and its replay
    go on; ``dead`` bool ``[E]``, where a back end that resets one step late (:attr:`HostEnvs.late_reset`) began an
    episode instead of taking a step. Rewards are the environment's own.
    A row of ``final_observations`` is valid where the step ended an episode; ``observations`` then holds the first
    observation of the next one.
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
        """Views of some environments' rows."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Buffers(**{name: x if name in _OF_STEPPERS else x[part] for name, x in arrays.items()})


_OF_STEPPERS = ("stepping", "heartbeats")


def buffer_layout(description: EnvDescription, num_envs: int, slots: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each buffer."""
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
    """Cuts arrays ``[count, …]`` into those of each environment."""
    return [{name: np.asarray(values[row]) for name, values in arrays.items()} for row in range(count)]


Stated = dict[int, dict[str, float]]
"""Row of an environment to the metrics that it gives of an episode, by name."""


class HostEnvs(ABC):
    """Environments that are stepped on the host.

    Attributes:
        buffers: what the last step left.
        stated: of rows whose episode the last step ended, what their environments' info says under ``"metrics"``.
        replayed: whether live episodes may have to be restored by replaying their actions.
        late_reset: whether an ended episode's last observation is in ``observations``, and the next step begins the
            next episode whatever the action; otherwise that happens in the same step.
        in_workers: whether :meth:`begin_step` sets other processes to work; otherwise :meth:`end_step` does it all.
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
        self.stated: Stated = {}

    @property
    def num_envs(self) -> int:
        """Environments here."""
        return len(self.env_ids)

    @abstractmethod
    def reset(self) -> None:
        """Start the episodes ``buffers.episodes`` in every environment."""

    @abstractmethod
    def step(self) -> None:
        """Step every environment with ``buffers.actions``; an ended episode is followed by the next one."""

    @property
    def parts(self) -> list[slice]:
        """Rows that :meth:`begin_step` steps apart from the others: whole shards, in order; one part if nothing can."""
        return [slice(0, self.num_envs)]

    def begin_step(self, part: int = 0) -> None:
        """Begin what :meth:`end_step` finishes: worker processes step while the caller does something else."""
        return

    def end_step(self, part: int = 0) -> None:
        """Finish a step of one of :attr:`parts` that was begun; afterwards its rows are as after :meth:`step`."""
        self.step()

    def stated_at(self, step: int) -> dict[tuple[int, int], dict[str, float]]:
        """Returns :attr:`stated` by (step, global env id)."""
        return {(step, self.env_ids[row]): said for row, said in self.stated.items()} if self.stated else {}

    def has_hooks(self) -> bool:
        """Whether some environment has hooks for its state, which may be more than that of its live episode."""
        return False

    @abstractmethod
    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """Each environment's own state, None where only replaying can restore it."""

    @abstractmethod
    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """Bring back the live episode of one environment; False if it was restarted (as its next episode) instead."""

    def close(self) -> None:
        """Let the environments go."""
        self.env_ids = []
