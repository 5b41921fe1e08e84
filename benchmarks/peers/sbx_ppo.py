"""SBX's PPO (Stable-Baselines3's interface, update in JAX) on a benchmark case, held to as many cores as it may use."""

import os

from sb3_parts import ReportIterations, arguments, make_envs
from settings import read_torch_settings


def main() -> None:
    settings = read_torch_settings()
    if hasattr(os, "sched_setaffinity"):  # XLA takes every core it may use, whatever OMP_NUM_THREADS says
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    from sbx import PPO  # loads JAX

    model = PPO("MlpPolicy", make_envs(settings), policy_kwargs={"net_arch": [64, 64]}, **arguments(settings))
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
