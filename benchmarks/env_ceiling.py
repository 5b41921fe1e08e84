"""Steps a second of the environments alone, random actions: ``python -m benchmarks.env_ceiling ENV NUM_ENVS``.

Prints one JSON object: ours (``lockstep``), with seeds keyed by episode and same-step reset, and Gymnasium's
``SyncVectorEnv`` (``gymnasium``). One thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import gymnasium
import numpy as np

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.registry import make_envs

SECONDS, REPEATS, CHUNK = 0.5, 3, 20


def speed(step: Callable[[int], object], num_envs: int) -> float:
    """Median steps a second of ``step(number)``, which steps ``num_envs`` environments."""
    for number in range(CHUNK):
        step(number)
    rates = []
    for _ in range(REPEATS):
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < SECONDS:
            for number in range(CHUNK):
                step(number)
            done += CHUNK
        rates.append(done * num_envs / (time.perf_counter() - started))
    return statistics.median(rates)


def actions_for(env: gymnasium.Env | gymnasium.vector.VectorEnv) -> np.ndarray:
    """Random actions of a vector of environments for some steps, over and over again."""
    env.action_space.seed(0)
    return np.stack([env.action_space.sample() for _ in range(CHUNK)])


def lockstep_speed(env_id: str, num_envs: int, actions: np.ndarray) -> float:
    """Steps a second of our vector of environments."""

    def fail(message: str) -> None:
        sys.exit(message)

    config = EnvConfig(id=env_id)
    envs = make_envs(config, describe(config), 0, range(num_envs), fail)
    envs.reset()

    def step(number: int) -> None:
        envs.buffers.actions[:] = actions[number]
        envs.step()

    try:
        return speed(step, num_envs)
    finally:
        envs.close()


def main() -> None:
    """Measure one environment."""
    env_id, num_envs = sys.argv[1], int(sys.argv[2])
    gym_id = env_id.removeprefix("lockstep/")  # an array environment's actions are those of its model
    vector = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(gym_id) for _ in range(num_envs)])
    vector.reset(seed=0)
    actions = actions_for(vector)
    out = {"lockstep": lockstep_speed(env_id, num_envs, actions)}
    if gym_id == env_id:
        out["gymnasium"] = speed(lambda number: vector.step(actions[number]), num_envs)
    vector.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
