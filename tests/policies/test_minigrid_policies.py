"""Policies of MiniGrid: one agent on any number of ranks or devices, in either engine; its mission may be anything."""

import gymnasium
import numpy as np
import pytest
from device_runs import JAX, devices
from variants import variants

from lockstep import load_policy

pytest.importorskip("minigrid")
EMPTY = (
    *("MiniGrid-Empty-Random-5x5-v0", "--num-envs", 4, "--num-shards", 2, "--num-steps", 32, "--total-steps", 256),
    *("--ppo.num-epochs", 2, "--ppo.num-minibatches", 2, "--ppo.learning-rate", 5e-3, "--network.hidden-sizes", 8),
)
TWO = {"torch": ("--nproc", 2), "jax": (*JAX, *devices(2))}


@pytest.mark.parametrize("engine", variants(TWO, ["torch"]))
def test_an_agent_is_one_on_two_ranks_and_its_policy_takes_raw_observations(trained, engine):
    one = trained(*EMPTY, *((*JAX, *devices(1)) if engine == "jax" else ()))
    two = trained(*EMPTY, *TWO[engine])
    assert two.agent == one.agent
    assert two.metrics == one.metrics
    assert "observation 'mission' is text, which the policy doesn't see" in one.ended.stdout.splitlines()
    assert one.ended.stderr == ""
    policies = [load_policy(one.path, engine=name) for name in TWO]
    env = gymnasium.make(EMPTY[0])
    seen = [env.reset(seed=seed)[0] for seed in range(20)]
    actions = [[policy(observation) for observation in seen] for policy in policies]
    assert actions[0] == actions[1]
    batch = {name: np.stack([x[name] for x in seen]) for name in ("direction", "image")}
    for missions in (tuple(x["mission"] for x in seen), tuple("?" * 20)):
        assert policies[0]({**batch, "mission": missions}).tolist() == actions[0]
    shares = policies[0].probabilities({**batch, "mission": missions})
    assert len(np.unique(shares, axis=0)) > 1  # it does look at the rest


def test_another_seed_is_another_agent(trained):
    assert trained(*EMPTY, "--seed", 1).agent != trained(*EMPTY).agent
