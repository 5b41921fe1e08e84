"""An environment that handles signals itself, as some robots' middleware and simulators do."""

import os
import signal

from handed_envs import Counting

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Handling(Counting):
    """Sets handlers of its own for stop signals, and sends its process one in a later step.

    Args:
        when: ``made`` or ``reset``: where it sets them, once.
        number: the signal that it sends.
        after: steps before it does.
    """

    def __init__(self, when: str, number: int, after: int):
        super().__init__()
        self._when, self._number, self._left = when, number, after
        if when == "made":
            self._handle()

    @staticmethod
    def _handle():
        for number in SIGNALS:
            signal.signal(number, lambda number, _frame: os._exit(99))

    def reset(self, **more):
        if self._when == "reset":
            self._handle()
            self._when = "done"
        return super().reset(**more)

    def step(self, action):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return super().step(action)
