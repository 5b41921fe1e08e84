"""What an environment looks like from outside: its spaces, checked once before anything is started."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import gymnasium

from lockstep.config import EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.gymnasium_registration import register_array_environments
from lockstep.envs.mujoco_warnings import calm_mujoco
from lockstep.spaces import ActionLayout, ObservationLayout, action_layout, observation_layout

MASK_SOURCES = ("info", "method")


@dataclass(frozen=True)
class EnvDescription:
    """An environment from outside.

    Attributes:
        id: its Gymnasium id.
        observation: how its observations lie in rows.
        action: what its actions are.
        max_episode_steps: time limit in steps, or None.
        is_array: whether it is one of our array environments.
        mask_from: where the action mask is found: ``info``, ``method`` or ``""`` (nowhere, or in the observation).
    """

    id: str
    observation: ObservationLayout
    action: ActionLayout
    max_episode_steps: int | None = None
    is_array: bool = False
    mask_from: str = ""


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
        return describe_spaces(config, env)
    finally:
        env.close()


def describe_spaces(config: EnvConfig, env: gymnasium.Env) -> EnvDescription:
    """The description of an environment that stands already; errors as :func:`describe`."""
    source = config.action_mask if config.action_mask in MASK_SOURCES else ""
    key = None if source else config.action_mask
    try:
        action = action_layout(env.action_space)
        if config.action_mask and not action.discrete:
            raise ValueError(f"env.action_mask: {config.action_mask!r}, but actions are continuous; leave it out")
        observation = observation_layout(env.observation_space, key, action.outputs if source else 0)
    except ValueError as error:
        raise ValueError(f"env.id: {config.id}: {error}") from None
    if observation.mask is not None and observation.mask.size != action.outputs:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r} has {observation.mask.size} entries and the actions have "
            f"{action.outputs} choices"
        )
    return EnvDescription(
        id=config.id,
        observation=observation,
        action=action,
        max_episode_steps=env.spec.max_episode_steps if env.spec else None,
        is_array=array_environment(config.id) is not None,
        mask_from=source,
    )
