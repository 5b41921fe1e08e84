"""SBX's PPO (Stable-Baselines3's interface, update in JAX) on a benchmark case, held to as many cores as it may use."""

import os

from settings import read_settings

SETTINGS = read_settings()
if hasattr(os, "sched_setaffinity"):  # XLA takes every core it may use, whatever OMP_NUM_THREADS says
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: SETTINGS.threads])

from sb3_parts import ReportIterations, arguments, make_envs
from sbx import PPO


def main() -> None:
    model = PPO("MlpPolicy", make_envs(SETTINGS), policy_kwargs={"net_arch": [64, 64]}, **arguments(SETTINGS))
    model.learn(SETTINGS.total_steps, callback=ReportIterations(SETTINGS))


if __name__ == "__main__":
    main()
