"""SBX's PPO (Stable-Baselines3's interface, update in JAX) on a benchmark case, held to as many cores as it may use.

Actor and critic are separate, 2x64 tanh each. For images each computes a Nature CNN, and its weights are copied from
one to the other after each step of either optimiser: so SBX shares them.
"""

import os

from sb3_parts import ReportIterations, arguments, make_envs
from settings import read_torch_settings


def main() -> None:
    settings = read_torch_settings()
    if hasattr(os, "sched_setaffinity"):  # XLA takes every core it may use, whatever OMP_NUM_THREADS says
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    from sbx import PPO  # loads JAX

    policy = "CnnPolicy" if settings.images else "MlpPolicy"
    layers = [] if settings.images else [64, 64]
    model = PPO(policy, make_envs(settings), policy_kwargs={"net_arch": layers}, **arguments(settings))
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
