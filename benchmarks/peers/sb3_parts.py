"""What the peers of Stable-Baselines3's family share: environments, arguments, and a line an iteration."""

from __future__ import annotations

from typing import Any

from settings import Settings
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize


class ReportIterations(BaseCallback):
    """One line after each rollout; from one to the next lies a whole iteration."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.settings.iteration_done()


def make_envs(settings: Settings) -> VecEnv:
    """Environments in this process, in one process each, or EnvPool's; with Atari's wrappers or normalised."""
    if settings.vector == "envpool":
        from pooled_envs import PooledEnvs  # where EnvPool isn't installed, only this fails

        envs: VecEnv = PooledEnvs(settings)
    else:
        apart = settings.vector == "processes"
        kind = SubprocVecEnv if apart else DummyVecEnv
        made: dict[str, Any] = {"n_envs": settings.num_envs, "seed": 0, "vec_env_cls": kind}
        made["vec_env_kwargs"] = {"start_method": "fork"} if apart else {}  # else every process imports everything
        if settings.images:
            envs = VecFrameStack(make_atari_env(settings.env, **made), 4)
        else:
            envs = make_vec_env(settings.env, **made)
    return VecNormalize(envs, gamma=0.99) if settings.normalize else envs


def arguments(settings: Settings) -> dict[str, Any]:
    """The case as arguments of PPO."""
    return {
        "n_steps": settings.num_steps,
        "batch_size": settings.batch_size,
        "n_epochs": settings.num_epochs,
        "learning_rate": settings.learning_rate,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "ent_coef": settings.entropy_coef,
        "max_grad_norm": 0.5,
        "seed": 0,
        "verbose": 0,
    }
