"""Stable-Baselines3's PPO on a benchmark case; its default policy has a separate 2x64 tanh actor and critic."""

from settings import Settings, read_settings
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


class ReportIterations(BaseCallback):
    """One line after each rollout; from one to the next lies a whole iteration."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.settings.iteration_done()


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
        device="cpu",
        seed=0,
        verbose=0,
    )
    model.learn(settings.total_steps, callback=ReportIterations(settings))


if __name__ == "__main__":
    main()
