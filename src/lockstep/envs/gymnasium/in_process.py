"""Steps Gymnasium environments one after the other in the rank's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.envs.gymnasium.keyed import KeyedEnv
from lockstep.envs.host_envs import Buffers, HostEnvs, Stated, WantedEnvs


def reset_envs(envs: Sequence[KeyedEnv], buffers: Buffers, first: int, slot: int) -> None:
    """Reset the environments whose rows begin at ``first``."""
    for row, env in enumerate(envs, first):
        buffers.stepping[slot] = row
        buffers.observations[row] = env.reset(int(buffers.episodes[row]))
    buffers.stepping[slot] = -1


def step_envs(envs: Sequence[KeyedEnv], buffers: Buffers, first: int, slot: int) -> Stated:
    """Step the environments whose rows begin at ``first``, resetting those that end; what those state."""
    stated: Stated = {}
    for row, env in enumerate(envs, first):
        buffers.stepping[slot] = row
        observation, reward, terminated, truncated = env.step(buffers.actions[row])
        buffers.rewards[row] = reward
        buffers.terminated[row] = terminated
        buffers.truncated[row] = truncated
        buffers.lost[row] = env.lost
        buffers.successes[row] = env.success
        buffers.scores[row] = env.score
        if terminated or truncated:
            if env.metrics:
                stated[row] = env.metrics
            buffers.final_observations[row] = observation
            buffers.episodes[row] += 1
            observation = env.reset(int(buffers.episodes[row]))
        buffers.observations[row] = observation
    buffers.stepping[slot] = -1
    return stated


def restore_env(
    env: KeyedEnv, buffers: Buffers, row: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]
) -> bool:
    """Restore one environment's live episode; restart it as the next one where that fails."""
    if env.restore(int(buffers.episodes[row]), actions, hashes, buffers.observations[row], state):
        return True
    buffers.episodes[row] += 1
    buffers.observations[row] = env.reset(int(buffers.episodes[row]))
    return False


class Watchdog:
    """Ends the process, by ``fail`` and a message, when an environment in it takes longer than ``limit`` seconds.

    Every step and reset counts ``heartbeat`` up, int64 ``[1]``.
    """

    def __init__(
        self, limit: float, heartbeat: np.ndarray, message: Callable[[], str], fail: Callable[[str], None]
    ) -> None:
        self._limit, self._heartbeat, self._message, self._fail = limit, heartbeat, message, fail
        self._busy = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="environment-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._busy = True

    def __exit__(self, *exc: object) -> None:
        self._busy = False

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while not self._closed.wait(min(1.0, self._limit / 4)):
            beat = int(self._heartbeat[0])
            if beat != seen or not self._busy:
                seen, since = beat, time.monotonic()
            elif time.monotonic() - since > self._limit:
                self._fail(self._message())
                return

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()


class InProcessEnvs(HostEnvs):
    """Gymnasium environments stepped one after the other in this process.

    ``fail`` ends the process with a message, for an environment that hangs.
    """

    def __init__(self, wanted: WantedEnvs, fail: Callable[[str], None]) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._limit, beats = wanted.config.timeout, self.buffers.heartbeats
        self._envs = [KeyedEnv(wanted, row, beats) for row in range(self.num_envs)]
        self._watchdog = Watchdog(self._limit, beats, self._hang, fail)

    def _hang(self) -> str:
        row = int(self.buffers.stepping[0])
        return (
            f"environment {self.env_ids[max(row, 0)]} ({self.description.id}) didn't answer within "
            f"{self._limit:g} s (env.timeout)"
        )

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        with self._watchdog:
            reset_envs(self._envs, self.buffers, 0, 0)

    def step(self) -> None:
        """See :meth:`HostEnvs.step`."""
        with self._watchdog:
            self.stated = step_envs(self._envs, self.buffers, 0, 0)

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`."""
        return [env.save_state() for env in self._envs]

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`."""
        self.buffers.stepping[0] = env
        with self._watchdog:
            return restore_env(self._envs[env], self.buffers, env, actions, hashes, state)

    def close(self) -> None:
        """See :meth:`HostEnvs.close`."""
        self._watchdog.close()
        for env in self._envs:
            env.close()
