"""CartPole in rank processes whose time is counted, not measured: what isn't put into a run takes none.

Every collective takes ``$COLLECTIVE_DELAY`` seconds and ends on all ranks at once; the environments of rank
``$SLOW_RANK`` take ``$SLOW_SECONDS``, once in 16 steps. Everything between takes ``TICK``, so that no iteration is
without length, each time that somebody looks at the clock.
"""

import os
import time

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

DELAY = float(os.environ.get("COLLECTIVE_DELAY", "0"))
IS_SLOW = os.environ.get("RANK") == os.environ.get("SLOW_RANK", "none")
SECONDS = float(os.environ.get("SLOW_SECONDS", "0"))
NUM_STEPS = 16
TICK = 2.0**-20


class Counted:
    """Stands in for the module ``time`` where iterations are measured."""

    sleep, monotonic_ns, time = time.sleep, time.monotonic_ns, time.time

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += TICK
        return self.now

    monotonic = perf_counter


if "RANK" in os.environ:
    import torch

    from lockstep.torch_engine.distributed import communicator
    from lockstep.torch_engine.setup import clock

    COUNTED = communicator.time = clock.time = Counted()
    timed = communicator.Communicator._timed

    def together(self, moved, device, operation, *args):
        def delayed(*given):
            result = operation(*given)
            everybody = self.slots.gather(torch.tensor([COUNTED.now], dtype=torch.float64))
            COUNTED.now = float(everybody.max()) + DELAY
            return result

        return timed(self, moved, device, delayed, *args)

    communicator.Communicator._timed = together


class UnevenCartPole(CartPoleEnv):
    """Only the first instance that is stepped in a process is slow."""

    _slow = None
    _steps = 0

    def step(self, action):
        cls = type(self)
        cls._slow = cls._slow or self
        self._steps += 1
        if IS_SLOW and cls._slow is self and self._steps % NUM_STEPS == 0:
            COUNTED.now += SECONDS
        return super().step(action)


gymnasium.register("UnevenCartPole-v0", "delaying:UnevenCartPole", max_episode_steps=500)
