"""Measures how long a step of environments on the host takes, and predicts a rollout's time from it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.process import fail_now
from lockstep.core.shards import keyed_generator
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import check_acted
from lockstep.envs.registry import make_envs
from lockstep.planning.waiting import expected_max_of_sums

SECONDS, MOST_STEPS, WARM_UP, SEED = 1.0, 4000, 20, 0
MANY = 64
"""Number of environments in the second measurement, of environments that are stepped together."""
WORKER_SECONDS = 60e-6
"""Assumed seconds of a step's exchange with all worker processes together."""


@dataclass(frozen=True)
class HostSteps:
    """Times of environment steps measured on this machine, in seconds.

    Attributes:
        one: times of single environments' steps, resets included; for environments that are stepped together (arrays,
            EnvPool), the fixed time of a step of all of them.
        each: additional time per environment that is stepped together with others; None: they are stepped one by one.
    """

    one: tuple[float, ...]
    each: float | None = None

    @property
    def mean(self) -> float:
        """The mean of ``one``."""
        return float(np.mean(self.one))

    def rollout(self, envs: int, steps: int, workers: int, ranks: int) -> float:
        """Returns the expected seconds that the slowest of ``ranks`` like ranks spends stepping in a rollout.

        A rank that steps its ``envs`` environments itself needs the sum of their times; with ``workers`` it waits for
        the slowest worker at each step.
        """
        if self.each is not None:
            return steps * (self.mean + self.each * envs)
        if not workers:
            return expected_max_of_sums(self.one, envs * steps, ranks)
        share = -(-envs // min(workers, envs))
        step = expected_max_of_sums(self.one, share, min(workers, envs) * ranks)
        return steps * (step + WORKER_SECONDS)


def measure_host_steps(config: EnvConfig, description: EnvDescription) -> HostSteps:
    """Steps environments with random actions for a second or two and returns the times of their steps."""
    pool = config.backend == "envpool"  # its workers are threads of one call
    alone = config if pool else config.model_copy(update={"workers": 0})
    if not (description.is_array or pool):
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
        acted = buffers.observations[None].copy()
        before = time.perf_counter()
        try:
            envs.step()
        except EnvironmentFailureError:
            check_acted(description, envs.env_ids, acted, None, number)
            raise
        now = time.perf_counter()
        if number >= WARM_UP:
            times.append(now - before)
        if now - started > SECONDS and times:
            break
    return np.array(times)
