"""Steps Gymnasium environments one after the other, with little overhead beside their own ``step``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy as np

from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.gymnasium.atari import LIFE_LOST
from lockstep.envs.gymnasium.keyed import CLOSE_LIMIT, KeyedEnv
from lockstep.envs.gymnasium.step_info import info_metrics, info_score, info_success, number
from lockstep.envs.host_envs import Buffers, RowMetrics, WantedEnvs

HUNG_SECONDS = 0.5
"""Seconds that environments may take to close after one of them has hung."""
_NEVER = 1 << 62
_STEPPED: WeakValueDictionary[int, gymnasium.Env] = WeakValueDictionary()
"""Environments stepped in this process, inside all wrappers, by ``id``."""


class Sweep:
    """Makes and steps the environments whose rows are ``rows``, in the order of their rows.

    It writes the row that is being stepped into ``buffers.stepping[slot]``, and increments ``buffers.heartbeats[slot]``
    at the beginning of each sweep and at each reset. As long as one of the two changes, the environments make progress.

    In an evaluation, an environment whose episode is over isn't stepped until the next reset, so that what it remembers
    doesn't depend on how long others play.
    """

    def __init__(self, wanted: WantedEnvs, buffers: Buffers, rows: range, slot: int) -> None:
        self._buffers, self._rows, self._slot = buffers, rows, slot
        self._action, self._goes_on = wanted.description.action, wanted.purpose != "eval"
        self._stepping, self._heartbeats = buffers.stepping.data, buffers.heartbeats.data
        self._rewards: Any = buffers.rewards.data  # a store in these costs less than one in an array
        part = slice(rows.start, rows.stop)
        self._actions = buffers.actions[part]
        self._flags = [b[part] for b in (buffers.terminated, buffers.truncated, buffers.lost, buffers.successes)]
        self._scores = buffers.scores[part]
        self.envs: list[KeyedEnv] = []
        self._taken: list[int] = []
        try:
            for row in rows:
                self._stepping[slot] = row
                self.envs.append(KeyedEnv(wanted, row))
                self._take(self.envs[-1].unwrapped, wanted.config.id)
        except BaseException:
            self.close()
            raise
        self._stepping[slot] = -1
        vector = wanted.description.observation.single_vector
        self._shape = None if vector is None else vector.shape
        self._views = [buffers.observations[row].reshape(self._shape or -1) for row in rows]
        self._look_on()
        self._sweeps = 0
        self._truncated_in = [_NEVER] * len(rows)
        self._next_limit = _NEVER
        self._nobody_late = [False] * len(rows)

    def _take(self, env: gymnasium.Env, env_id: str) -> None:
        """Raises if this process already steps the object."""
        if _STEPPED.get(id(env)) is env:
            raise ValueError(
                f"env.id: {env_id} gives the same object each time that it is called, and two would step it; make a "
                "new environment in each call"
            )
        _STEPPED[id(env)] = env
        self._taken.append(id(env))

    def reset(self) -> None:
        """Starts the episodes ``buffers.episodes``."""
        self._look_on()
        for row in self._rows:
            self._begin(row)
        self._stepping[self._slot] = -1

    def step(self) -> RowMetrics:
        """Steps every environment with ``buffers.actions`` and resets those that end; returns their metrics."""
        env_metrics: RowMetrics = {}
        shape, stepping, slot, rewards = self._shape, self._stepping, self._slot, self._rewards
        ndarray, row = np.ndarray, self._rows.start
        self._heartbeats[slot] += 1
        self._sweeps += 1
        self._forget()
        late = self._late() if self._sweeps >= self._next_limit else self._nobody_late
        if self._watching:
            self._look_on()
        each = zip(self._rows, self._stepped, self._action.native_rows(self._actions), self._views, late, strict=True)
        try:
            for row, env, action, view, is_late in each:
                if env is None:
                    continue
                stepping[slot] = row
                observation, reward, terminated, truncated, info = env.step(action)
                ended = terminated or truncated or is_late
                if type(observation) is ndarray and observation.shape == shape:
                    view[...] = observation
                else:
                    self._write(row, observation, info, ended)
                rewards[row] = reward if type(reward) is float else number(reward)
                if info:
                    self._read(row, info)
                if ended:
                    self._end(row, bool(terminated), bool(truncated or is_late), info, env_metrics)
        except EnvironmentFailureError:
            raise
        except (Exception, SystemExit) as error:
            raise self._env(row).failure("step", error) from error
        stepping[slot] = -1
        return env_metrics

    def _env(self, row: int) -> KeyedEnv:
        return self.envs[row - self._rows.start]

    def _look_on(self) -> None:
        """Updates which objects to step: an environment itself, once it has been watched for long enough."""
        self._watching = any(env.watched for env in self.envs)
        self._stepped: list[Any] = [env.stepped for env in self.envs]

    def _forget(self) -> None:
        """Clears what the last sweep read of ends, lives, tasks and games, because most steps say nothing."""
        for flag in self._flags:
            flag.fill(0)
        self._scores.fill(math.nan)

    def _late(self) -> list[bool]:
        """Returns whose episodes reach, in this sweep, the limit that this class counts."""
        self._next_limit = min((last for last in self._truncated_in if last > self._sweeps), default=_NEVER)
        return [last == self._sweeps for last in self._truncated_in]

    def _write(self, row: int, observation: Any, info: Mapping[str, Any], ended: Any) -> None:
        self._env(row).write(self._buffers.observations[row], observation, info, bool(ended))

    def _read(self, row: int, info: Mapping[str, Any]) -> None:
        """Reads what an environment's info says of a step."""
        b = self._buffers
        if type(info) is not dict:
            self._env(row).check_info(info)
        if LIFE_LOST in info:
            b.lost[row] = bool(info[LIFE_LOST])
        b.successes[row] = info_success(info)
        if "score" in info:
            b.scores[row] = info_score(info)

    def _end(
        self, row: int, terminated: bool, truncated: bool, info: Mapping[str, Any], env_metrics: RowMetrics
    ) -> None:
        """Ends an episode, and begins the next one, if there is one."""
        self._env(row).check_info(info)
        b = self._buffers
        b.terminated[row], b.truncated[row] = terminated, truncated
        if metrics := info_metrics(info):
            env_metrics[row] = metrics
        b.final_observations[row] = b.observations[row]
        b.episodes[row] += 1
        if self._goes_on:
            self._begin(row)
        else:
            self._stepped[row - self._rows.start] = None

    def _begin(self, row: int) -> None:
        self._stepping[self._slot] = row
        self._heartbeats[self._slot] += 1
        self._env(row).reset(int(self._buffers.episodes[row]), self._buffers.observations[row])
        self._count_from(row, 0)

    def _count_from(self, row: int, elapsed: int) -> None:
        """Records in which sweep an episode that has ``elapsed`` steps reaches its limit."""
        limit = self._env(row).limit
        last = _NEVER if limit is None else self._sweeps + max(limit - elapsed, 1)
        self._truncated_in[row - self._rows.start] = last
        self._next_limit = min(self._next_limit, last)

    def _progressed(self) -> None:
        self._heartbeats[self._slot] += 1

    def restore(self, row: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """Restores one environment's live episode; if that fails, begins the next episode and returns False."""
        b, env = self._buffers, self._env(row)
        self._stepping[self._slot] = row
        self._progressed()
        back = env.restore(int(b.episodes[row]), actions, hashes, b.observations[row], state, self._progressed)
        if back:
            self._count_from(row, env.elapsed)
        else:
            b.episodes[row] += 1
            self._begin(row)
        self._stepping[self._slot] = -1
        return back

    def has_hooks(self) -> bool:
        """Returns whether some environment has state hooks."""
        return any(env.has_hooks for env in self.envs)

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """Returns each environment's own state, None if it has no state hooks."""
        return [env.save_state() for env in self._each()]

    def _each(self) -> Iterator[KeyedEnv]:
        """Iterates over the environments; whoever waits sees that they make progress, and which one is asked."""
        before = self._stepping[self._slot]  # may name the environment that ended its worker
        for row, env in zip(self._rows, self.envs, strict=False):
            self._stepping[self._slot] = row
            self._progressed()
            yield env
        self._stepping[self._slot] = before

    def close(self, limit: float = CLOSE_LIMIT) -> float:
        """Closes the environments, each within ``limit`` seconds; returns the limit for others, which a hang lowers."""
        for env in self._each():
            if not env.close(limit):
                limit = min(limit, HUNG_SECONDS)
        for taken in self._taken:
            _STEPPED.pop(taken, None)
        self._taken.clear()
        return limit
