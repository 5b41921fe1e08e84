"""Stable-Baselines3's PPO on a benchmark case.

Its default policy has a separate 2x64 tanh actor and critic, that of images one Nature CNN for both.
"""

from sb3_parts import ReportIterations, arguments, make_envs
from settings import read_torch_settings
from stable_baselines3 import PPO


def main() -> None:
    settings = read_torch_settings()
    policy = "CnnPolicy" if settings.images else "MlpPolicy"
    model = PPO(policy, make_envs(settings), device="cpu", **arguments(settings))
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
