"""Steps a second of the environments alone, random actions: ``python -m benchmarks.env_ceiling ENV NUM_ENVS``.

ENV is an id, or a config's section ``env`` as JSON. Prints one JSON object: ours (``lockstep``), with seeds keyed by
episode and same-step reset, and Gymnasium's ``SyncVectorEnv`` (``gymnasium``) where nothing is wrapped. One thread.
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

SECONDS, REPEATS, CHUNK = 0.3, 3, 20


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


def actions_for(space: gymnasium.Space, num_envs: int) -> np.ndarray:
    """Random actions ``[CHUNK, num_envs, ...]`` for some steps, over and over again."""
    space.seed(0)
    return np.stack([np.stack([space.sample() for _ in range(num_envs)]) for _ in range(CHUNK)])


def lockstep_speed(config: EnvConfig, num_envs: int) -> float:
    """Steps a second of our vector of environments."""

    def fail(message: str) -> None:
        sys.exit(message)

    description = describe(config)
    model = gymnasium.make(config.id.removeprefix("lockstep/"))  # an array environment's actions are those of its model
    actions = actions_for(model.action_space, num_envs)
    envs = make_envs(config, description, 0, range(num_envs), fail)
    envs.reset()

    def step(number: int) -> None:
        envs.buffers.actions[:] = actions[number]
        envs.step()

    try:
        return speed(step, num_envs)
    finally:
        envs.close()


def gymnasium_speed(name: str, num_envs: int) -> float:
    """Steps a second of Gymnasium's own vector."""
    vector = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(name) for _ in range(num_envs)])
    vector.reset(seed=0)
    actions = actions_for(vector.single_action_space, num_envs)
    try:
        return speed(lambda number: vector.step(actions[number]), num_envs)
    finally:
        vector.close()


def main() -> None:
    """Measure one environment."""
    given, num_envs = sys.argv[1], int(sys.argv[2])
    section = json.loads(given) if given.startswith("{") else {"id": given}
    out = {"lockstep": lockstep_speed(EnvConfig.model_validate(section), num_envs)}
    if set(section) == {"id"} and not section["id"].startswith("lockstep/"):
        out["gymnasium"] = gymnasium_speed(section["id"], num_envs)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
