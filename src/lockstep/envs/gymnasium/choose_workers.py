"""Chooses in how many worker processes a rank's environments are stepped, by the time that a step of one takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.config.run import EnvConfig
from lockstep.core.shards import keyed_generator
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.in_process import InProcessEnvs
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements
from lockstep.envs.host_envs import WantedEnvs

WORKER_SECONDS = 90e-6
"""What a worker must spare of each step: thrice what its messages take, for it also takes memory and a start."""
_STEPS, _SECONDS = 200, 0.5


class Measured(NamedTuple):
    """Holds what one rank knows: seconds of a step of one environment, how many it steps, and cores for them."""

    step_seconds: float
    num_envs: int
    cores: int


def measure_step(config: EnvConfig, description: EnvDescription, fail: Callable[[str], None]) -> float:
    """Seconds that one environment takes for a step of random actions in this process, resets counted in.

    The environment is one of its own, which is closed again; after its first reset and step it is measured for half a
    second, or 200 steps.
    """
    envs = InProcessEnvs(WantedEnvs(config, description, 0, [0], purpose="measure"), fail)
    try:
        b, observation, action = envs.buffers, description.observation, description.action
        generator, shape = keyed_generator(0, "measure"), (_STEPS + 1, 1)
        actions, replacements = draw_actions(generator, action, shape), draw_replacements(generator, action, shape)
        envs.reset()
        started, steps = time.perf_counter(), 0
        for number in range(_STEPS + 1):
            if number == 1:
                started, steps = time.perf_counter(), 0
            b.actions[...] = allowed_actions(observation, action, b.observations, actions[number], replacements[number])
            envs.step()
            steps += 1
            if time.perf_counter() - started > _SECONDS:
                break
        return (time.perf_counter() - started) / steps
    finally:
        envs.close()


def price(measured: Measured, workers: int) -> float:
    """Seconds of a step of all of a rank's environments in so many workers, with their price; 0: in the rank itself."""
    each = -(-measured.num_envs // max(workers, 1))
    return each * measured.step_seconds + workers * WORKER_SECONDS


def chosen_workers(everyone: Sequence[Measured]) -> int:
    """Chooses the same number for all ranks: the best one for a rank as slow, as full and as narrow as any; 0: none."""
    worst = Measured(
        max(rank.step_seconds for rank in everyone),
        max(rank.num_envs for rank in everyone),
        min(rank.cores for rank in everyone),
    )
    numbers = [0, *range(2, min(worst.cores, worst.num_envs) + 1)]
    return min(numbers, key=lambda workers: price(worst, workers))
