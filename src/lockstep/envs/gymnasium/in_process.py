"""Steps Gymnasium environments one after the other in the rank's own process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np

from lockstep.core.life import life
from lockstep.core.silence import Stillness
from lockstep.envs.gymnasium.sweep import Sweep
from lockstep.envs.host_envs import HostEnvs, RowMetrics, WantedEnvs, cut

FAILED_SECONDS = 2.0
"""Seconds that environments may take to close after a failure, before its message is printed."""
MAKE_SECONDS = 60.0
"""Seconds that each environment may take to be made, even if ``env.timeout`` is less: the first one loads its code."""
_LOOK_SECONDS = 0.25
"""Longest time between two looks, by which ranks that wait for this one learn that its environments make progress."""


class Watchdog:
    """Ends the process, by ``fail`` and a message, when an environment in it takes longer than ``limit`` seconds.

    The value of ``sign`` changes with every step and reset, and a change counts as this process's progress. Time in
    which the process is stopped doesn't count.
    """

    def __init__(
        self, limit: float, sign: Callable[[], object], message: Callable[[], str], fail: Callable[[str], None]
    ) -> None:
        self._limit, self._sign, self._message, self._fail = limit, sign, message, fail
        self._busy = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="environment-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._busy = True

    def __exit__(self, *exc: object) -> None:
        self._busy = False

    def _watch(self) -> None:
        pause, seen = min(_LOOK_SECONDS, self._limit / 4), None
        stillness = Stillness(2 * pause)
        while not self._closed.wait(pause):
            sign, busy = self._sign(), self._busy
            seconds = stillness.look((sign, busy))
            if busy and sign != seen:
                life.progressed()
            elif busy and seconds > self._limit:
                self._fail(self._message())
                return
            seen = sign

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()


class InProcessEnvs(HostEnvs):
    """Steps Gymnasium environments one after the other in this process.

    ``fail`` is called with a message if an environment hangs, and ends the process.
    """

    def __init__(self, wanted: WantedEnvs, fail: Callable[[str], None]) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._limit = wanted.config.timeout
        count, in_parts = self.num_envs, wanted.in_parts and wanted.overlapped
        self._parts = cut(count, wanted.shard_size if in_parts else None, count)
        self._sweeps: list[Sweep] = []
        limit = max(self._limit, MAKE_SECONDS)
        more = "a longer env.timeout gives it more"
        making = Watchdog(limit, self._sign, lambda: f"{self._late()} wasn't made within {limit:g} s; {more}", fail)
        try:
            with making:
                for part in self._parts:
                    self._sweeps.append(Sweep(wanted, self.buffers, range(part.start, part.stop), 0))
        except BaseException:
            self._close_sweeps()
            raise
        finally:
            making.close()
        self._watchdog = Watchdog(self._limit, self._sign, self._hang, fail)

    def _sign(self) -> tuple[int, int]:
        return int(self.buffers.heartbeats[0]), int(self.buffers.stepping[0])

    def _late(self) -> str:
        """Names the environment that is being made, stepped, reset or asked."""
        return f"environment {self.env_ids[max(int(self.buffers.stepping[0]), 0)]} ({self.description.id})"

    def _hang(self) -> str:
        return f"{self._late()} didn't answer within {self._limit:g} s (env.timeout)"

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        with self._watchdog:
            for sweep in self._sweeps:
                sweep.reset()

    def step(self) -> None:
        """See :meth:`HostEnvs.step`."""
        env_metrics: RowMetrics = {}
        for part in range(len(self._parts)):
            self.end_step(part)
            env_metrics |= self.env_metrics
        self.env_metrics = env_metrics

    @property
    def parts(self) -> list[slice]:
        """See :attr:`HostEnvs.parts`."""
        return self._parts

    def end_step(self, part: int = 0) -> None:
        """See :meth:`HostEnvs.end_step`."""
        with self._watchdog:
            self.env_metrics = self._sweeps[part].step()

    def has_hooks(self) -> bool:
        """See :meth:`HostEnvs.has_hooks`."""
        return any(sweep.has_hooks() for sweep in self._sweeps)

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`."""
        with self._watchdog:
            return [state for sweep in self._sweeps for state in sweep.save_states()]

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`."""
        sweep = next(s for s, part in zip(self._sweeps, self._parts, strict=True) if env < part.stop)
        with self._watchdog:
            return sweep.restore(env, actions, hashes, state)

    def close(self) -> None:
        """See :meth:`HostEnvs.close`.

        Each environment may take half of ``env.timeout``, or at most two seconds if another error ends the run. If one
        can't be interrupted then, the watchdog ends the process.
        """
        try:
            with self._watchdog:
                self._close_sweeps()
        finally:
            self._watchdog.close()

    def _close_sweeps(self) -> None:
        limit = self._limit / 2
        if sys.exception() is not None:
            limit = min(limit, FAILED_SECONDS)
        for sweep in self._sweeps:
            limit = sweep.close(limit)
