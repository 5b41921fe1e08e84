"""GRPO learns: balancing, and to push the cube towards the goal."""

import pytest
from learned import learned

__all__ = ["learned"]

GRPO = ("--algorithm", "grpo", "--ppo.num-epochs", 4, "--ppo.num-minibatches", 4, "--ppo.entropy-coef", 0)
CARTPOLE = ("lockstep/CartPole-v1", *GRPO, "--num-envs", 64, "--num-steps", 128, "--grpo.group-size", 8)


def test_balancing(learned):
    """128 is the most that counts: a rollout cuts its episodes. A policy that knows nothing has some 22."""
    words = (*CARTPOLE, "--total-steps", 98304, "--ppo.gamma", 1, "--network.hidden-sizes", 32)
    assert learned(*words, "--ppo.learning-rate", 5e-3)["final_return"] > 110
    assert learned(*words, "--ppo.learning-rate", 1e-9, name="still")["final_return"] < 40


def test_a_policy_stays_near_its_reference(learned):
    words = (*CARTPOLE, "--total-steps", 49152, "--network.hidden-sizes", 32, "--ppo.learning-rate", 5e-3)
    free = learned(*words)["final_return"]
    assert learned(*words, "--grpo.kl-coef", 20, name="held")["final_return"] < 40 < free


@pytest.mark.long
def test_pushing(learned):
    """A fifth of the preset's length; the preset's 3 M steps end at a success rate above 0.9 (docs/networks.md)."""
    words = ("lockstep/PushCube-v0", "--algorithm", "grpo", "--ppo.schedule", "constant")
    pushing = learned(*words, "--total-steps", 600_000)
    assert pushing["final_return"] > 1
    assert pushing["final_success_rate"] > 0.08
    still = learned(*words, "--total-steps", 64_000, "--ppo.learning-rate", 1e-9, name="still")
    assert still["final_return"] < 0.5
    assert still["final_success_rate"] < 0.05
