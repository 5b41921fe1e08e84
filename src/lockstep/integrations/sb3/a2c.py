"""Trains Stable-Baselines3's A2C as one agent on all ranks."""

import stable_baselines3

from lockstep.integrations.sb3.synchronized import Synchronized


class A2C(Synchronized, stable_baselines3.A2C):
    """``stable_baselines3.A2C`` (Mnih et al. 2016), every rank stepping environments of its own for one agent.

    Takes what Stable-Baselines3's takes. ``n_envs`` and ``n_steps`` are of each rank: an update learns from
    ``world_size`` times as many samples.

    Args:
        normalize_advantage_locally: if advantages are normalised, do so by the mean and standard deviation of this
            rank's samples, instead of all ranks'.
    """
