"""What an environment looks like from outside: its spaces, checked once before anything is started."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from lockstep.config import EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.gymnasium_registration import register_array_environments
from lockstep.envs.mujoco_warnings import calm_mujoco

SUPPORTED = "supported are Box observations and Discrete or Box actions"


@dataclass(frozen=True)
class EnvDescription:
    """The spaces of an environment.

    Attributes:
        id: its Gymnasium id.
        observation_shape: shape of one observation; ``observation_size`` is its number of components.
        discrete: whether actions are Discrete, else a Box.
        num_actions: number of discrete actions, or components of a continuous one.
        action_start: value of the first discrete action.
        action_shape: shape of one continuous action.
        action_low: lower bounds of a continuous action, flat; ``action_high`` the upper ones.
        max_episode_steps: time limit in steps, or None.
        is_array: whether it is one of our array environments.
    """

    id: str
    observation_shape: tuple[int, ...]
    discrete: bool
    num_actions: int
    action_start: int = 0
    action_shape: tuple[int, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    max_episode_steps: int | None = None
    is_array: bool = False

    @property
    def observation_size(self) -> int:
        """Components of one observation."""
        return int(np.prod(self.observation_shape, dtype=int))


def array_environment(env_id: str) -> type | None:
    """Our array environment of this id, or None."""
    return ARRAY_ENVIRONMENTS.get(env_id)


def make_environment(config: EnvConfig, **kwargs: Any) -> gymnasium.Env:
    """``gymnasium.make`` for a config.

    Raises:
        ValueError: the id is unknown, or what it needs isn't installed; one line that says so.
    """
    register_array_environments()
    calm_mujoco(gymnasium.registry.get(config.id))
    extra = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    try:
        return gymnasium.make(config.id, disable_env_checker=True, **extra, **config.kwargs, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(f"env.id: {config.id} needs a package that isn't installed: {error}") from None
    except ModuleNotFoundError as error:
        raise ValueError(f"env.id: {config.id}: {error}") from None
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ValueError(f"env.id: {_unknown(config.id, error)}") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise ValueError(f"env.id: {config.id} can't be made: {type(error).__name__}: {text}") from error


def _unknown(env_id: str, error: Exception) -> str:
    close = difflib.get_close_matches(env_id, gymnasium.registry.keys(), 1, 0.5)
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        hint = f"did you mean {close[0]}?" if close else "gymnasium.registry lists them, 'module:Id-v0' imports one"
        return f"no environment {env_id!r} is registered; {hint}"
    return f"{env_id!r}: {error}"


def describe(config: EnvConfig) -> EnvDescription:
    """Make the environment once and read its spaces.

    Raises:
        ValueError: it can't be made, or a space isn't supported; the line names the space that was met.
    """
    if config.workers and array_environment(config.id):
        raise ValueError(f"env.workers: {config.workers}, but {config.id} is stepped as arrays; use 0")
    env = make_environment(config)
    try:
        return describe_spaces(config.id, env)
    finally:
        env.close()


def describe_spaces(env_id: str, env: gymnasium.Env) -> EnvDescription:
    """The description of an environment that stands already; errors as :func:`describe`."""
    observation, action = env.observation_space, env.action_space
    met_observation, met_action = (" ".join(str(space).split()) for space in (observation, action))
    shape = observation.shape
    if not isinstance(observation, gymnasium.spaces.Box) or (
        observation.dtype == np.uint8 and len(observation.shape) > 1
    ):
        raise ValueError(
            f"env.id: {env_id} has observation space {met_observation}, which isn't supported yet; {SUPPORTED}"
        )
    limit = env.spec.max_episode_steps if env.spec else None
    fixed: dict[str, Any] = {
        "id": env_id,
        "observation_shape": tuple(shape or ()),
        "max_episode_steps": limit,
        "is_array": array_environment(env_id) is not None,
    }
    if isinstance(action, gymnasium.spaces.Discrete):
        return EnvDescription(discrete=True, num_actions=int(action.n), action_start=int(action.start), **fixed)
    if isinstance(action, gymnasium.spaces.Box) and np.issubdtype(action.dtype, np.floating):
        low, high = (np.asarray(bound, np.float64).ravel() for bound in (action.low, action.high))
        return EnvDescription(
            discrete=False,
            num_actions=low.size,
            action_shape=tuple(action.shape),
            action_low=tuple(low.tolist()),
            action_high=tuple(high.tolist()),
            **fixed,
        )
    raise ValueError(f"env.id: {env_id} has action space {met_action}, which isn't supported yet; {SUPPORTED}")
