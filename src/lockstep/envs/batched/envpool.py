"""Steps environments with EnvPool (Weng et al. 2022), which is fast and resets one step late.

After an episode's last step EnvPool ignores the next action and answers with the next episode's first observation. That
step is *dead* (``Buffers.dead``): it counts in no loss, statistic or episode. Each shard has its own pool, seeded by
its key, so that a run doesn't depend on the number of ranks. EnvPool seeds environment i of a pool with ``seed + i``
and draws all further episodes from that generator, so that a live episode can't be restored.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import gymnasium
import numpy as np

from lockstep.config.run import Config, EnvConfig
from lockstep.core.errors import one_line
from lockstep.core.spaces import ObservationLayout
from lockstep.envs.gymnasium.keyed import environment_failure
from lockstep.envs.host_envs import HostEnvs, WantedEnvs


def envpool_module() -> Any:
    """Imports EnvPool.

    Raises:
        ValueError: it isn't installed; one line.
    """
    if importlib.util.find_spec("envpool") is None:
        raise ValueError("env.backend: envpool isn't installed; pip install 'lockstep-rl[envpool]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("envpool")


def pool_spaces(config: EnvConfig) -> tuple[gymnasium.Space, gymnasium.Space, int | None]:
    """Returns observation space, action space and time limit of EnvPool's environment of this id.

    Raises:
        ValueError: EnvPool isn't installed, doesn't have the id, or rejects the arguments; one line.
    """
    module = envpool_module()
    if config.id not in module.list_all_envs():
        raise ValueError(f"env.id: EnvPool has no {config.id!r}; envpool.list_all_envs() lists what it has")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns of EnvPool's float64 bounds
        try:
            pool = _make(module, config, 1, 0)
        except Exception as error:
            text = one_line(error)
            raise ValueError(f"env.id: EnvPool's {config.id} can't be made: {type(error).__name__}: {text}") from error
        spaces = pool.observation_space, pool.action_space, pool.config.get("max_episode_steps")
    pool.close()
    return spaces


def _make(module: Any, config: EnvConfig, count: int, seed: int) -> Any:
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    threads = {} if config.workers in (0, "auto") else {"num_threads": config.workers}
    settings = {**threads, **limit, **config.kwargs}
    return module.make(config.id, env_type="gymnasium", num_envs=count, seed=seed, **settings)


def check_envpool_options(config: Config) -> None:
    """Raises a one-line ``ValueError`` if EnvPool can't do what the config asks for."""
    env = config.env
    if env.backend != "envpool":
        return
    if config.algorithm == "grpo":
        raise ValueError("algorithm: grpo needs groups of environments that start alike, and EnvPool has none; use ppo")
    for name, given in (
        ("frame_skip", env.frame_skip > 1),
        ("frame_stack", env.frame_stack > 1),
        ("sticky_actions", bool(env.sticky_actions)),
        ("atari", env.atari.enabled),
        ("action_mask", env.action_mask in ("info", "method")),
    ):
        if given:
            raise ValueError(f"env.{name}: EnvPool takes no wrappers; give its own option in env.kwargs")


def encode_batch(layout: ObservationLayout, observation: Any, rows: np.ndarray) -> None:
    """Writes a batch of observations into rows ``[E, width]``."""
    (leaf,) = layout.leaves if len(layout.leaves) == 1 else (None,)
    if leaf is not None and not leaf.name and leaf.kind in ("vector", "image"):
        rows[:, : leaf.size] = observation.reshape(len(rows), -1)
        return
    for row in range(len(rows)):
        rows[row] = layout.encode(_item(observation, row))


def _item(observation: Any, row: int) -> Any:
    return {k: _item(v, row) for k, v in observation.items()} if isinstance(observation, dict) else observation[row]


class EnvPoolEnvs(HostEnvs):
    """Steps one pool of environments per shard, each with ``config.workers`` threads (0, auto: EnvPool's choice)."""

    replayed = False
    late_reset = True

    def __init__(self, wanted: WantedEnvs) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._wanted, self._module = wanted, envpool_module()
        self._slices = wanted.slices(wanted.shard_size)
        self._pools: list[Any] = [None] * len(self._slices)
        self._restarted: set[int] = set()

    def _begin(self, number: int) -> None:
        """Makes a new pool for a shard, because EnvPool's generators can't be seeded again."""
        part = self._slices[number]
        count = part.stop - part.start
        seed = self._wanted.episode_seed(part.start, self.buffers.episodes[part.start], "/envpool") % (2**31 - count)
        if self._pools[number] is not None:
            self._pools[number].close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the bounds' warning comes at the first use
            self._pools[number] = _make(self._module, self._wanted.config, count, seed)
            observation, _ = self._pools[number].reset()
        encode_batch(self.description.observation, observation, self.buffers.observations[part])
        self.buffers.terminated[part] = self.buffers.truncated[part] = False

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        try:
            for number in range(len(self._slices)):
                self._begin(number)
        except Exception as error:
            raise environment_failure(f"environments ({self.description.id}, EnvPool)", "reset", error) from error

    def step(self) -> None:
        """See :meth:`HostEnvs.step`; where an episode has just ended, the step is dead and begins the next episode."""
        b = self.buffers
        np.logical_or(b.terminated, b.truncated, out=b.dead)
        b.episodes += b.dead
        actions = self.description.action.natives(b.actions)
        if self.description.action.discrete:
            actions = actions.astype(self.description.action.dtype)
        try:
            for pool, part in zip(self._pools, self._slices, strict=True):
                pool.send(actions[part])
            for pool, part in zip(self._pools, self._slices, strict=True):
                self._take(part, *pool.recv())
        except Exception as error:
            raise environment_failure(f"environments ({self.description.id}, EnvPool)", "step", error) from error

    def _take(self, part: slice, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        b = self.buffers
        assert np.array_equal(info["env_id"], np.arange(len(reward))), "a pool answers in the order of its environments"
        encode_batch(self.description.observation, observation, b.observations[part])
        b.rewards[part], b.terminated[part], b.truncated[part] = reward, terminated, truncated

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`; EnvPool has no states to save."""
        return [None] * self.num_envs

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`; EnvPool can't, so that every environment begins its next episode."""
        number = next(n for n, part in enumerate(self._slices) if part.start <= env < part.stop)
        self.buffers.episodes[env] += 1
        if number not in self._restarted:
            self._restarted.add(number)
            self._begin(number)
            self._first = self.buffers.observations[self._slices[number]].copy()
        part = self._slices[number]
        self.buffers.observations[env] = self._first[env - part.start]
        return False

    def close(self) -> None:
        """See :meth:`HostEnvs.close`."""
        for pool in self._pools:
            if pool is not None:
                pool.close()
