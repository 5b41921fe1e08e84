"""Trains Stable-Baselines3's PPO as one agent on all ranks."""

import stable_baselines3

from lockstep.integrations.sb3.synchronized import Synchronized


class PPO(Synchronized, stable_baselines3.PPO):
    """``stable_baselines3.PPO`` (Schulman et al. 2017), every rank stepping environments of its own for one agent.

    Takes what Stable-Baselines3's takes. ``n_envs``, ``n_steps`` and ``batch_size`` are of each rank: an update learns
    from ``world_size`` times as many samples, in as many minibatches, each ``world_size`` times as large.

    Args:
        normalize_advantage_locally: normalise advantages by the mean and standard deviation of this rank's part of a
            minibatch, instead of the whole one's.
    """
