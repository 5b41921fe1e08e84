"""Steps a batch of array environments with NumPy: keyed resets, time limit, same-step autoreset.

Random numbers of steps come from SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"). Its
n-th output is a function of n, so that one vectorised hash serves all environments, in place of one slower Philox
generator for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.core.episodes import EPISODES_PER_ITERATION
from lockstep.core.shards import KeyedDraws, keyed_generator
from lockstep.envs.description import make_arrays
from lockstep.envs.host_envs import HostEnvs, WantedEnvs, by_row

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
STEP_BITS = 32
"""Low bits of a counter, which count the steps of an episode."""


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniform(keys: np.ndarray, episodes: np.ndarray, steps: np.ndarray, draws: int) -> np.ndarray:
    """Returns float32 ``[n, draws]``, uniform in [0, 1), from key (uint64), episode and step (int64), each ``[n]``.

    An episode's number may begin with an iteration's, for which the counter has no room; that part goes into the key.
    """
    iterations, episodes = np.divmod(episodes.astype(np.uint64), np.uint64(EPISODES_PER_ITERATION))
    keys = keys ^ _mixed(iterations * _GOLDEN)  # unchanged in iteration 0
    counters = (episodes << np.uint64(STEP_BITS)) + steps.astype(np.uint64)
    columns = np.arange(1, draws + 1, dtype=np.uint64)
    x = _mixed(keys[:, None] + (counters[:, None] * np.uint64(draws) + columns) * _GOLDEN)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def step_key(seed: int, purpose: str, key: int) -> np.uint64:
    """Returns the key of an environment's steps, see :func:`uniform`."""
    return keyed_generator(seed, f"{purpose}/step", key).integers(2**64, dtype=np.uint64)


class EvaluationDraws:
    """Draws the random numbers of one episode of an evaluation, the same as :class:`ArrayEnvs` draws for it.

    Args:
        seed: seed of the evaluation's episodes.
        episode: the episode's number.
    """

    def __init__(self, seed: int, episode: int) -> None:
        self._seed, self._episode = seed, episode
        self._key = np.array([step_key(seed, "eval", episode)])

    def of_reset(self, count: int) -> np.ndarray:
        """Returns the numbers of the reset, uniform in [0, 1), float32 ``[1, count]``."""
        return keyed_generator(self._seed, "eval", self._episode).random((1, count), np.float32)

    def of_step(self, elapsed: int, count: int) -> np.ndarray:
        """Returns the numbers of the step after ``elapsed`` steps, uniform in [0, 1), float32 ``[1, count]``."""
        return uniform(self._key, np.zeros(1, np.int64), np.array([elapsed]), count)


class ArrayEnvs(HostEnvs):
    """Steps one batch of an array environment."""

    replayed = False

    def __init__(self, wanted: WantedEnvs) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._wanted, self._env, self._keyed = wanted, make_arrays(wanted.config), KeyedDraws()
        keys = wanted.keys if self._env.step_draws else []
        self._step_keys = np.array([step_key(wanted.seed, wanted.purpose, key) for key in keys], np.uint64)
        self._limit = wanted.description.max_episode_steps or self._env.max_episode_steps
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._state: dict[str, np.ndarray] = {}

    def _draws(self, rows: Sequence[int]) -> np.ndarray:
        seed, purpose, draw = self._wanted.seed, self._wanted.purpose, self._keyed.generator
        keys = [self._wanted.episode_key(r, self.buffers.episodes[r]) for r in rows]
        return np.stack([draw(seed, purpose, *k).random(self._env.reset_draws, np.float32) for k in keys])

    def _step_draws(self) -> np.ndarray | None:
        """Returns a step's random numbers, keyed by environment, episode and step; an evaluation repeats them."""
        if not self._env.step_draws:
            return None
        episodes = 0 * self.buffers.episodes if self._wanted.purpose == "eval" else self.buffers.episodes
        return uniform(self._step_keys, episodes, self._elapsed, self._env.step_draws)

    def _rows(self, observation: np.ndarray) -> np.ndarray:
        """Returns rows ``[n, width]``, each one vector or one image; an image's bytes are padded to whole words."""
        layout = self.description.observation
        rows = np.asarray(observation, layout.dtype).reshape(len(observation), -1)
        spare = layout.width - rows.shape[1]
        return np.pad(rows, ((0, 0), (0, spare))) if spare else rows

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        self.buffers.observations[:] = self._begin()

    def _begin(self) -> np.ndarray:
        """Starts every episode; returns the rows of the first observations."""
        state, observation = self._env.reset(np, self._draws(range(self.num_envs)))
        self._state = {k: np.array(v) for k, v in state.items()}
        self._elapsed[:] = 0
        return self._rows(observation)

    def step(self) -> None:
        """See :meth:`HostEnvs.step`."""
        b = self.buffers
        actions = self.description.action.natives(b.actions)
        state, observation, reward, terminated = self._env.step(np, self._state, actions, self._step_draws())
        self._elapsed += 1
        b.rewards[:] = reward
        b.terminated[:] = terminated
        b.truncated[:] = self._elapsed >= self._limit
        own = self._env.truncated(np, state)
        if own is not None:
            b.truncated |= own
        b.observations[:] = self._rows(observation)
        success = self._env.success(np, state)
        if success is not None:
            b.successes[:] = np.where(success, 1, -1)
        score = self._env.score(np, state)
        if score is not None:
            b.scores[:] = score
        self._state = state
        rows = (b.terminated | b.truncated).nonzero()[0]
        if rows.size:
            b.final_observations[rows] = b.observations[rows]
            b.episodes[rows] += 1
            self._reset_rows(rows)

    def _reset_rows(self, rows: np.ndarray) -> None:
        fresh, observation = self._env.reset(np, self._draws(rows.tolist()))
        state = {k: np.array(v) for k, v in self._state.items()}
        for key, value in fresh.items():
            state[key][rows] = value
        self._state = state
        self.buffers.observations[rows] = self._rows(observation)
        self._elapsed[rows] = 0

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`."""
        return by_row({**self._state, "elapsed": self._elapsed}, self.num_envs)

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`; an array environment is restored from its arrays."""
        if not self._state:
            self._begin()
        self._elapsed[env] = state["elapsed"]
        for key, value in self._state.items():
            value[env] = state[key]
        return True
