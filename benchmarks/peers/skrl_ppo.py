"""skrl's PPO on a benchmark case with discrete actions and one-dimensional observations."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from settings import Settings, read_torch_settings
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import Tensor, nn


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def spaces(env: Any) -> dict[str, Any]:
    return {"observation_space": env.observation_space, "state_space": None, "action_space": env.action_space}


class Actor(CategoricalMixin, Model):
    def __init__(self, env: Any) -> None:
        Model.__init__(self, **spaces(env), device="cpu")
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = mlp(env.observation_space.shape[0], int(env.action_space.n))

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Critic(DeterministicMixin, Model):
    def __init__(self, env: Any) -> None:
        Model.__init__(self, **spaces(env), device="cpu")
        DeterministicMixin.__init__(self)
        self.net = mlp(env.observation_space.shape[0], 1)

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def make_agent(env: Any, settings: Settings, kind: type, models: dict[str, Model]) -> Any:
    """An agent of a class of skrl's with the settings of the case."""
    config = PPO_CFG(
        rollouts=settings.num_steps,
        learning_epochs=settings.num_epochs,
        mini_batches=settings.num_minibatches,
        learning_rate=settings.learning_rate,
        discount_factor=0.99,
        gae_lambda=0.95,
        ratio_clip=0.2,
        value_clip=0.0,
        entropy_loss_scale=settings.entropy_coef,
        value_loss_scale=0.5,
        grad_norm_clip=0.5,
    )
    config.experiment.write_interval = 0
    config.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=settings.num_steps, num_envs=settings.num_envs, device="cpu")
    return kind(models=models, memory=memory, cfg=config, **spaces(env), device="cpu")


def train(settings: Settings, kind: type, make_models: Callable[[Any], dict[str, Model]]) -> None:
    """Trains an agent of a class of skrl's; one line after each update.

    Raises:
        SystemExit: the case has normalisation.
    """
    if settings.normalize:
        raise SystemExit("normalisation is not set up for skrl here")
    mode = "vector_entry_point" if settings.vector == "entry-point" else "sync"
    env = wrap_env(gym.make_vec(settings.env, num_envs=settings.num_envs, vectorization_mode=mode))
    agent = make_agent(env, settings, kind, make_models(env))
    update = agent.update

    def reporting(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        settings.iteration_done()

    agent.update = reporting
    trainer = {"timesteps": settings.num_steps * settings.iterations, "headless": True, "disable_progressbar": True}
    SequentialTrainer(cfg=trainer, env=env, agents=agent).train()


def main() -> None:
    train(read_torch_settings(), PPO, lambda env: {"policy": Actor(env), "value": Critic(env)})


if __name__ == "__main__":
    main()
