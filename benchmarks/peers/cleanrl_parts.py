"""Agent and environments of CleanRL's PPO, written down again (see ``cleanrl_ppo.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import wrappers
from settings import Settings
from torch import Tensor, nn
from torch.distributions import Categorical, Normal


def layer(module: Any, scale: float = 2**0.5) -> Any:
    """The layer with orthogonal weights and no bias."""
    nn.init.orthogonal_(module.weight, scale)
    nn.init.constant_(module.bias, 0.0)
    return module


def mlp(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    hidden = [layer(nn.Linear(inputs, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*hidden, layer(nn.Linear(64, outputs), scale))


def nature(channels: int) -> nn.Sequential:
    convolutions = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    layers = [x for sizes in convolutions for x in (layer(nn.Conv2d(*sizes)), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU())


class Agent(nn.Module):
    """Actor and critic: apart for vectors, on one Nature CNN for images."""

    def __init__(self, envs: Any, images: bool) -> None:
        super().__init__()
        shape, space = envs.single_observation_space.shape, envs.single_action_space
        self.discrete, self.images = isinstance(space, gym.spaces.Discrete), images
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        if images:
            self.network = nature(shape[0])
            self.actor, self.critic = layer(nn.Linear(512, outputs), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.network = nn.Identity()
            self.actor, self.critic = mlp(int(np.prod(shape)), outputs, 0.01), mlp(int(np.prod(shape)), 1, 1.0)
        self.log_std = None if self.discrete else nn.Parameter(torch.zeros(1, outputs))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(self.network(obs / 255.0 if self.images else obs))

    def act(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Action (a sample if none is given), its log-probability, the entropy and the value."""
        hidden = self.network(obs / 255.0 if self.images else obs)
        out = self.actor(hidden)
        if self.log_std is None:
            chosen = Categorical(logits=out)
            action = chosen.sample() if action is None else action
            return action, chosen.log_prob(action), chosen.entropy(), self.critic(hidden)
        normal = Normal(out, torch.exp(self.log_std.expand_as(out)))
        action = normal.sample() if action is None else action
        return action, normal.log_prob(action).sum(1), normal.entropy().sum(1), self.critic(hidden)


def make_envs(settings: Settings) -> Any:
    """A vector of wrapped environments, or EnvPool's.

    Raises:
        SystemExit: the case has none that CleanRL publishes.
    """
    if settings.vector == "envpool":
        return Pool(settings)
    if settings.vector != "sync":
        raise SystemExit(f"CleanRL's PPO has no {settings.vector} here")
    wrap = atari if settings.images else normalized if settings.normalize else plain
    makers: list[Callable[[], gym.Env]] = [lambda: wrap(settings.env)] * settings.num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def plain(name: str) -> gym.Env:
    return wrappers.RecordEpisodeStatistics(gym.make(name))


def normalized(name: str) -> gym.Env:
    env = wrappers.ClipAction(wrappers.RecordEpisodeStatistics(wrappers.FlattenObservation(gym.make(name))))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    return wrappers.TransformReward(wrappers.NormalizeReward(env, gamma=0.99), lambda r: np.clip(r, -10, 10))


def atari(name: str) -> gym.Env:
    from stable_baselines3.common import atari_wrappers as of_sb3  # where CleanRL has them from

    env = of_sb3.NoopResetEnv(wrappers.RecordEpisodeStatistics(gym.make(name)), noop_max=30)
    env = of_sb3.FireResetEnv(of_sb3.EpisodicLifeEnv(of_sb3.MaxAndSkipEnv(env, skip=4)))
    env = wrappers.ResizeObservation(of_sb3.ClipRewardEnv(env), (84, 84))
    return wrappers.FrameStackObservation(wrappers.GrayscaleObservation(env), 4)


class Pool:
    """EnvPool's environments under the names that a vector of Gymnasium's has; returns and lengths are counted."""

    def __init__(self, settings: Settings) -> None:
        if settings.normalize:
            raise SystemExit("CleanRL's PPO with EnvPool normalises nothing")
        from pools import as_pool_actions, make_pool

        self._pool, self._as_actions = make_pool(settings), as_pool_actions
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self._returns, self._lengths = np.zeros(settings.num_envs), np.zeros(settings.num_envs, np.int32)

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        return self._pool.reset()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        obs, rewards, terminated, truncated, info = self._pool.step(self._as_actions(actions))
        self._returns += rewards
        self._lengths += 1
        ended = terminated | truncated
        episode = {"r": self._returns.copy(), "l": self._lengths.copy(), "_r": ended}
        self._returns *= 1 - ended
        self._lengths *= 1 - ended
        return obs, rewards, terminated, truncated, info | {"episode": episode}
