"""GRPO learns: balancing, and to push the cube towards the goal."""

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
