"""A loss of one's own in the place of PPO's, trained from Python on two ranks; run as a script."""

import math

import lockstep


def spo(sample: lockstep.LossSample):
    """Computes simple policy optimisation's loss (Xie et al. 2024): a penalty on the ratio instead of its clipping."""
    ratio = math.e ** (sample.log_prob - sample.old_log_prob)  # by operators that arrays of both engines have
    penalty = abs(sample.advantage) / (2 * sample.clip_range) * (ratio - 1) ** 2
    value = 0.5 * (sample.value - sample.return_) ** 2
    policy = penalty - ratio * sample.advantage
    return policy + sample.value_coef * value - sample.entropy_coef * sample.entropy


if __name__ == "__main__":
    ppo = dict(loss=spo, entropy_coef=0.01, entropy_schedule="linear")
    run = lockstep.train("CartPole-v1", nproc=2, total_steps=2048, ppo=ppo)
    print(run.config.ppo.loss, run.status, "loss:", run.metrics[-1]["train/loss"])
