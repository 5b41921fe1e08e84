"""Episodes of BipedalWalker don't depend on those before them, as Gymnasium's own do."""

import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.envs.gymnasium.make import make_environment

pytest.importorskip("Box2D")
gymnasium = pytest.importorskip("gymnasium")


def episode(env):
    actions, (observation, _) = np.random.default_rng(1), env.reset(seed=5)
    seen = [observation.tobytes()]
    for _ in range(150):
        observation, reward, terminated, truncated, _ = env.step(actions.uniform(-1, 1, 4).astype(np.float32))
        seen.append(observation.tobytes() + np.float64(reward).tobytes())
        if terminated or truncated:
            break
    return seen


def test_an_episode_is_what_its_seed_and_actions_make_it():
    env = make_environment(EnvConfig(id="BipedalWalker-v3"))
    first, *later = [episode(env) for _ in range(6)]
    assert len(first) > 30
    assert all(again == first for again in later)


def test_one_that_remembers_would_show():
    env = gymnasium.make("BipedalWalker-v3")
    first, *later = [episode(env) for _ in range(6)]
    assert any(again != first for again in later)
    assert episode(make_environment(EnvConfig(id="BipedalWalker-v3"))) == first
