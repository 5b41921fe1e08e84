"""EnvPool's environments as Stable-Baselines3 steps them: reset at once, the last observation in ``infos``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from pools import as_pool_actions, make_pool
from settings import Settings
from stable_baselines3.common.vec_env import VecEnv


class PooledEnvs(VecEnv):
    """One pool behind the interface of vectors of environments."""

    def __init__(self, settings: Settings) -> None:
        self._pool = make_pool(settings)
        self._actions = np.zeros(0)
        super().__init__(settings.num_envs, self._pool.observation_space, self._pool.action_space)

    def reset(self) -> np.ndarray:
        return self._pool.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = as_pool_actions(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observations, rewards, terminated, truncated, _ = self._pool.step(self._actions)
        dones, infos = terminated | truncated, [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(dones)
        for i in ended:
            cut_short = bool(truncated[i] and not terminated[i])
            infos[i] = {"terminal_observation": observations[i].copy(), "TimeLimit.truncated": cut_short}
        if len(ended):
            observations = observations.copy()
            observations[ended] = self._pool.reset(ended.astype(np.int32))[0]
        return observations, rewards, dones, infos

    def close(self) -> None:
        self._pool.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._pool, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: int | Iterable[int] | None = None) -> list[bool]:
        return [False] * self.num_envs
