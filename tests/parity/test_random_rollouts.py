"""The random rollouts before a run: both engines take the same actions of environments on the host, masks or none."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.random_policy import random_actions
from lockstep.envs.registry import make_envs
from lockstep.jax_engine.host import rollout as jax_rollout
from lockstep.torch_engine import rollout as torch_rollout
from lockstep.torch_engine.state import make_net

ID = "Notes-v0"
TAKEN: list[int] = []


class Notes(gymnasium.Env):
    """Notes each action; allows those of ``mask``."""

    action_space = Discrete(4)
    observation_space = Dict({"at": Box(0, 1, (1,), np.float32), "legal": MultiBinary(4)})

    def __init__(self, mask):
        self._seen = {"at": np.zeros(1, np.float32), "legal": np.array(mask, np.int8)}

    def reset(self, *, seed=None, options=None):
        return self._seen, {}

    def step(self, action):
        TAKEN.append(int(action))
        return self._seen, 0.0, False, False, {}


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register(ID, lambda **kwargs: Notes(**kwargs))
    yield
    del gymnasium.registry[ID]


def taken_by(engine, mask):
    """Actions ``[T, E]`` of the random rollout, and those that a run without a mask takes."""
    env = {"id": ID, "kwargs": {"mask": mask}, "action_mask": "legal"}
    config = resolve(Config.model_validate({"env": env, "num_envs": 8, "num_steps": 500, "num_shards": 2}))
    plan, description = ShardPlan(8, 2), describe(config.env)
    envs = make_envs(config.env, description, config.seed, plan.env_ids, pytest.fail)
    envs.reset()
    TAKEN.clear()
    if engine == "torch":
        net = make_net(config, description.observation, description.action)
        torch_rollout.collect_random(config, plan, envs, torch_rollout.Rollout.empty(500, envs, net, True))
    else:
        jax_rollout.collect_random(config, plan, envs, jax_rollout.HostRollout.empty(config, envs))
    envs.close()
    return np.array(TAKEN).reshape(500, 8), random_actions(config, plan, description.action)


@pytest.mark.parametrize("mask", [[1, 0, 1, 0], [1, 1, 1, 0]])
def test_both_engines_take_the_same_actions_uniform_over_what_is_allowed(mask):
    (taken, drawn), (others, _) = taken_by("torch", mask), taken_by("jax", mask)
    np.testing.assert_array_equal(taken, others)
    kept = np.array(mask, bool)[drawn]
    np.testing.assert_array_equal(taken[kept], drawn[kept])
    expected = np.array(mask) / sum(mask)
    error = 4 * np.sqrt(expected * (1 - expected) / taken.size)
    assert (abs(np.bincount(taken.ravel(), minlength=4) / taken.size - expected) <= error).all()


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_where_everything_is_allowed_they_are_those_of_no_mask(engine):
    taken, drawn = taken_by(engine, [1, 1, 1, 1])
    np.testing.assert_array_equal(taken, drawn)
