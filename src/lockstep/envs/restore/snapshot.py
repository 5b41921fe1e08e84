"""Saves environments into a checkpoint, one file per shard, and restores them exactly or reports them as restarted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from lockstep.core.episodes import EpisodeCounter
from lockstep.core.errors import one_line
from lockstep.core.life import Part, life
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.restore.replay import ReplayLog

WIDEST = 8
"""Bytes of the widest number that checkpoints hold: neither complex128 nor the long doubles of C."""
ShardArrays = dict[str, np.ndarray]
Carried = Mapping[str, np.ndarray]


class LocalShards(Protocol):
    """The shards of this process, in order, and the number of environments in each."""

    @property
    def shards(self) -> range:
        """Global indices of the shards."""
        ...

    @property
    def envs_per_shard(self) -> int:
        """Number of environments in a shard."""
        ...


def named(state: object) -> Mapping[str, Any]:
    """Returns what ``get_env_state()`` gave; empty for None, which says that there is nothing to save.

    Raises:
        TypeError: it is neither None nor a dict; one line.
    """
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"it must return a dict of arrays by name, or None, and returned {type(state).__name__}")
    return state or {}


def check_savable(name: object, array: np.ndarray) -> None:
    """Raises a one-line ``TypeError`` if a checkpoint can't hold an array of an environment's own state as it is."""
    if not isinstance(name, str):
        raise TypeError(f"the arrays' names must be texts, and one is {name!r}")
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{name!r} must be an array of numbers, and is {one_line(repr(array.tolist()))[:80]}")
    if array.dtype.itemsize > WIDEST:
        raise TypeError(
            f"{name!r} is of dtype {array.dtype}, which no checkpoint holds; give bools, integers, or floats of 64 bits"
        )


def save_shards(
    envs: HostEnvs, replay: ReplayLog, counter: EpisodeCounter, carried: Carried, plan: LocalShards
) -> dict[int, ShardArrays]:
    """Returns the arrays of each local shard.

    ``carried`` is what else each environment carries from step to step, arrays ``[E, …]``.
    """
    states = envs.save_states()
    b, rows = envs.buffers, plan.envs_per_shard
    out: dict[int, ShardArrays] = {}
    for local, shard in enumerate(plan.shards):
        part = slice(local * rows, (local + 1) * rows)
        arrays: ShardArrays = {
            "episodes": b.episodes[part].copy(),
            "observations": b.observations[part].copy(),
            "returns": counter.returns[part].copy(),
            "lengths": counter.lengths[part].copy(),
        }
        arrays |= {name: values[part].copy() for name, values in carried.items()}
        for row in range(rows):
            env, state = local * rows + row, states[local * rows + row]
            if state is not None:
                arrays |= {f"state.{row}.{name}": np.asarray(value) for name, value in state.items()}
            else:
                arrays[f"replay.{row}.actions"] = replay.actions(env, b.actions)
                arrays[f"replay.{row}.hashes"] = replay.hashes(env).view(np.int64)
        out[shard] = arrays
    return out


def _state_of(arrays: Mapping[str, np.ndarray], row: int) -> ShardArrays:
    """Returns an environment's own state; empty if it has none."""
    prefix = f"state.{row}."
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}


def _restore_env(
    envs: HostEnvs, replay: ReplayLog, env: int, row: int, length: int, arrays: Mapping[str, np.ndarray]
) -> bool:
    state = _state_of(arrays, row)
    no_actions = np.zeros((length if state else 0, *envs.buffers.actions.shape[1:]), envs.buffers.actions.dtype)
    actions = arrays.get(f"replay.{row}.actions", no_actions)
    hashes = arrays.get(f"replay.{row}.hashes", np.zeros(0, np.int64)).view(np.uint64)
    if not state and len(actions) != length:  # longer than the limit: its actions were not kept
        bits = envs.buffers.observations[env].view(np.uint8)
        np.invert(bits, out=bits)  # so that replaying nothing doesn't match and it restarts
        actions, hashes = no_actions, hashes[:0]
    if not envs.restore(env, actions, hashes, state):
        replay.clear(env)
        return False
    replay.restore(env, actions if not state else no_actions[:0], hashes, length)
    return True


def load_shards(
    envs: HostEnvs,
    replay: ReplayLog,
    counter: EpisodeCounter,
    carried: Carried,
    plan: LocalShards,
    shards: Mapping[int, ShardArrays],
) -> list[int]:
    """Restores the local environments from what :func:`save_shards` returned.

    Returns:
        Global ids of environments whose live episode couldn't be restored exactly, and was restarted.
    """
    b, rows, restarted = envs.buffers, plan.envs_per_shard, []
    for local, shard in enumerate(plan.shards):
        arrays = shards[shard]
        part = slice(local * rows, (local + 1) * rows)
        b.episodes[part] = arrays["episodes"]
        b.observations[part] = arrays["observations"]
        counter.returns[part] = arrays["returns"]
        counter.lengths[part] = arrays["lengths"]
        for name, values in carried.items():
            values[part] = arrays[name]
    life.begin(Part.RESUMING)
    for local, shard in enumerate(plan.shards):
        for row in range(rows):
            env = local * rows + row
            if not _restore_env(envs, replay, env, row, int(counter.lengths[env]), shards[shard]):
                counter.forget(env)
                for values in carried.values():
                    values[env] = 0.0
                restarted.append(envs.env_ids[env])
    return restarted


def load_states(envs: HostEnvs, plan: LocalShards, shards: Mapping[int, ShardArrays]) -> None:
    """Restores the own states of local environments, but no episodes, which all begin anew before the next step."""
    envs.reset()
    b, rows, nothing = envs.buffers, plan.envs_per_shard, envs.buffers.actions[:0]
    life.begin(Part.RESUMING)
    for local, shard in enumerate(plan.shards):
        part, arrays = slice(local * rows, (local + 1) * rows), shards[shard]
        b.episodes[part], b.observations[part] = arrays["episodes"], arrays["observations"]
        for row in range(rows):
            if state := _state_of(arrays, row):
                envs.restore(local * rows + row, nothing, np.zeros(0, np.uint64), state)
