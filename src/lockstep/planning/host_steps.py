"""Measures how long environments on the host take for a step, and says what that makes of a rollout."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lockstep.config.run import EnvConfig
from lockstep.core.process import fail_now
from lockstep.core.shards import keyed_generator
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.planning.waiting import expected_max_of_sums

SECONDS, MOST_STEPS, WARM_UP, SEED = 1.0, 4000, 20, 0
MANY = 64
"""Environments of the second measurement, of those that are stepped as arrays."""
WORKER_SECONDS = 60e-6
"""A step's exchange with worker processes, once for all of them (assumed)."""


@dataclass(frozen=True)
class HostSteps:
    """Times of steps that were measured on this machine, in seconds.

    Attributes:
        one: of single environments, one after the other, resets among them; of arrays, of all environments at once.
        each: of a further environment that is stepped as part of arrays; None: they are stepped one by one.
    """

    one: tuple[float, ...]
    each: float | None = None

    @property
    def mean(self) -> float:
        """Mean seconds of ``one``."""
        return float(np.mean(self.one))

    def rollout(self, envs: int, steps: int, workers: int, ranks: int) -> float:
        """Expected seconds that the slowest of ``ranks`` spends stepping in a rollout, all alike.

        A rank that steps ``envs`` environments itself takes the sum of their times at each step; with ``workers`` it
        waits at each step for the slowest worker.
        """
        if self.each is not None:
            return steps * (self.mean + self.each * envs)
        if not workers:
            return expected_max_of_sums(self.one, envs * steps, ranks)
        share = -(-envs // min(workers, envs))
        step = expected_max_of_sums(self.one, share, min(workers, envs) * ranks)
        return steps * (step + WORKER_SECONDS)


def measure_host_steps(config: EnvConfig, description: EnvDescription) -> HostSteps:
    """Steps environments with random actions for a second or two, and keeps the time of every step."""
    alone = config.model_copy(update={"workers": 0})
    if not description.is_array:
        return HostSteps(tuple(_times(alone, description, 1)))
    few, many = (float(np.median(_times(alone, description, n))) for n in (1, MANY))
    each = max(0.0, (many - few) / (MANY - 1))
    return HostSteps((max(0.0, few - each),), each)


def _times(config: EnvConfig, description: EnvDescription, envs: int) -> np.ndarray:
    made = make_envs(config, description, SEED, range(envs), fail_now)
    try:
        made.reset()
        return _stepped(made, description)
    finally:
        made.close()


def _stepped(envs: HostEnvs, description: EnvDescription) -> np.ndarray:
    generator, buffers = keyed_generator(SEED, "plan"), envs.buffers
    observation, action, shape = description.observation, description.action, (MOST_STEPS, envs.num_envs)
    actions, replacements = draw_actions(generator, action, shape), draw_replacements(generator, action, shape)
    times: list[float] = []
    started = time.perf_counter()
    for number, drawn in enumerate(actions):
        buffers.actions[...] = allowed_actions(observation, action, buffers.observations, drawn, replacements[number])
        before = time.perf_counter()
        envs.step()
        now = time.perf_counter()
        if number >= WARM_UP:
            times.append(now - before)
        if now - started > SECONDS and times:
            break
    return np.array(times)
