"""SBX's PPO (Stable-Baselines3's interface, update in JAX) on a benchmark case, held to one core."""

import os

if hasattr(os, "sched_setaffinity"):  # XLA takes every core it may use, whatever OMP_NUM_THREADS says
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from sb3_ppo import ReportIterations
from sbx import PPO
from settings import read_settings
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


def main() -> None:
    settings = read_settings()
    envs = make_vec_env(settings.env, n_envs=settings.num_envs, seed=0, vec_env_cls=DummyVecEnv)
    if settings.normalize:
        envs = VecNormalize(envs, gamma=0.99)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=settings.num_steps,
        batch_size=settings.batch_size,
        n_epochs=settings.num_epochs,
        learning_rate=settings.learning_rate,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=settings.entropy_coef,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64]},
        seed=0,
        verbose=0,
    )
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
