"""CartPole in a rank process whose every collective takes ``$COLLECTIVE_DELAY`` seconds longer.

And whose environments on rank ``$SLOW_RANK`` take ``$SLOW_SECONDS`` longer, once in 16 steps. A busy machine sleeps
longer than it was asked to: how long it really was goes to ``$SLEPT``, a line each.
"""

import os
import time

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

DELAY = float(os.environ.get("COLLECTIVE_DELAY", "0"))
IS_SLOW = os.environ.get("RANK") == os.environ.get("SLOW_RANK", "none")
SECONDS = float(os.environ.get("SLOW_SECONDS", "0"))
NUM_STEPS = 16


def sleep(seconds):
    """Sleep, and write down for how long."""
    started = time.perf_counter()
    time.sleep(seconds)
    with open(os.environ["SLEPT"], "a") as file:
        file.write(f"{time.perf_counter() - started}\n")


if DELAY and "RANK" in os.environ:
    from lockstep.torch_engine.distributed.communicator import Communicator

    _timed = Communicator._timed

    def timed(self, operation, x, *args):
        def delayed(*given):
            sleep(DELAY)
            return operation(*given)

        return _timed(self, delayed, x, *args)

    Communicator._timed = timed


class UnevenCartPole(CartPoleEnv):
    """Only the first instance that is stepped in a process sleeps."""

    _sleeper = None
    _steps = 0

    def step(self, action):
        cls = type(self)
        cls._sleeper = cls._sleeper or self
        self._steps += 1
        if IS_SLOW and cls._sleeper is self and self._steps % NUM_STEPS == 0:
            sleep(SECONDS)
        return super().step(action)


gymnasium.register("UnevenCartPole-v0", "delaying:UnevenCartPole", max_episode_steps=500)
