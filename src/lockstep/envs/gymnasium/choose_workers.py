"""Chooses the number of worker processes for a rank's environments from the time that a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.shards import keyed_generator
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.in_process import InProcessEnvs
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements
from lockstep.envs.host_envs import WantedEnvs
from lockstep.envs.numbers import check_acted

WORKER_SECONDS = 90e-6
"""Seconds that a worker must save per step: thrice what its messages take, as it also costs memory and start time."""
_STEPS, _SECONDS = 200, 0.5


class Measured(NamedTuple):
    """What one rank measured: seconds per step of one environment, number of its environments, cores for them."""

    step_seconds: float
    num_envs: int
    cores: int


def measure_step(config: EnvConfig, description: EnvDescription, fail: Callable[[str], None]) -> float:
    """Returns the seconds that a step of random actions takes one environment in this process, resets included.

    It makes an environment for this and closes it again. After a first reset and step it measures for half a second, or
    200 steps.
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
            acted = b.observations[None].copy()
            try:
                envs.step()
            except EnvironmentFailureError:
                check_acted(description, [0], acted, None, number)
                raise
            steps += 1
            if time.perf_counter() - started > _SECONDS:
                break
        return (time.perf_counter() - started) / steps
    finally:
        envs.close()


def price(measured: Measured, workers: int) -> float:
    """Returns the seconds of a step of all of a rank's environments in ``workers`` processes (0: in the rank itself).

    Each worker adds :data:`WORKER_SECONDS`.
    """
    each = -(-measured.num_envs // max(workers, 1))
    return each * measured.step_seconds + workers * WORKER_SECONDS


def chosen_workers(everyone: Sequence[Measured]) -> int:
    """Returns the best number of workers (0: none) for the slowest step, most environments and fewest cores."""
    worst = Measured(
        max(rank.step_seconds for rank in everyone),
        max(rank.num_envs for rank in everyone),
        min(rank.cores for rank in everyone),
    )
    numbers = [0, *range(2, min(worst.cores, worst.num_envs) + 1)]
    return min(numbers, key=lambda workers: price(worst, workers))
