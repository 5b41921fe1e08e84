"""CartPole whose environment number 5 fails in the third iteration of 16 steps, in a way that an argument names.

It does so once ``$FAILS_AFTER``, a file or directory, is there. ``$FAULT`` has every environment fail at once.
"""

import atexit
import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from lockstep.core.shards import keyed_seed

FAILING = 5
GOES_WELL = 36
BAD_END = 99
"""How the process ends after faults that are a number of Ctrl-Cs, if what is registered for its exit runs."""


class FaultyCartPole(CartPoleEnv):
    """Without a fault it is CartPole-v1, step for step."""

    def __init__(self, fault="none", **kwargs):
        super().__init__(**kwargs)
        if fault == "construction" or (fault == "construction in a rank" and "RANK" in os.environ):
            raise RuntimeError("the pole is missing")
        self._fault, self._steps, self._chosen, self._goes_well = fault, 0, False, GOES_WELL
        if "FAULT" in os.environ:
            self._fault, self._chosen, self._goes_well = os.environ["FAULT"], True, 0

    def _fails(self, where):
        if not self._chosen or self._fault != where or self._steps <= self._goes_well:
            return False
        deadline = time.monotonic() + 600
        while "FAILS_AFTER" in os.environ and not Path(os.environ["FAILS_AFTER"]).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return True

    def reset(self, *, seed=None, options=None):
        self._chosen |= seed == keyed_seed(0, "reset", FAILING, 0)
        if self._fails("reset"):
            raise RuntimeError("the cart left the track")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._steps += 1
        if self._fails("step"):
            raise RuntimeError("the motor is gone\n  for good")
        if self._fails("hang"):
            time.sleep(3600)
        if self._fails("death"):
            os._exit(3)
        if self._fails("interrupt"):
            raise KeyboardInterrupt
        for presses in (1, 2):
            if self._fails(f"Ctrl-C {presses}"):
                self._fault = "none"
                atexit.register(os._exit, BAD_END)
                for _ in range(presses):
                    os.kill(os.getpid(), signal.SIGINT)
        observation, reward, terminated, truncated, info = super().step(action)
        if self._fails("nan reward"):
            reward = float("nan")
        if self._fails("nan observation"):
            observation = np.full_like(observation, np.nan)
        if self._fails("shape"):
            observation = observation[:2]
        return observation, reward, terminated, truncated, info


gymnasium.register("FaultyCartPole-v0", "faulty:FaultyCartPole", max_episode_steps=500)
