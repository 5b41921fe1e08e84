"""What an environment looks like from outside: its spaces, checked once before anything is started."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from lockstep.config.run import EnvConfig
from lockstep.core.spaces import ActionLayout, ObservationLayout, action_layout, observation_layout
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS, ArrayEnvironment
from lockstep.envs.arrays.frame_stack import FrameStack
from lockstep.envs.gymnasium.atari import register_atari
from lockstep.envs.gymnasium.mujoco_warnings import calm_mujoco
from lockstep.envs.gymnasium.registration import register_array_environments
from lockstep.envs.gymnasium.wrappers import wrap
from lockstep.envs.rewards import RewardShaping
from lockstep.envs.tensor import simulator_spaces

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
        rewards: what the learner gets of its rewards.
        lives: whether lost lives end episodes for the learner.
    """

    id: str
    observation: ObservationLayout
    action: ActionLayout
    max_episode_steps: int | None = None
    is_array: bool = False
    mask_from: str = ""
    rewards: RewardShaping = field(default_factory=RewardShaping)
    lives: bool = False


def array_environment(env_id: str) -> type | None:
    """Our array environment of this id, or None."""
    return ARRAY_ENVIRONMENTS.get(env_id)


def make_arrays(config: EnvConfig) -> ArrayEnvironment:
    """The array environment of a config, in a frame stack if that is asked for."""
    kind = array_environment(config.id)
    assert kind is not None, f"{config.id} is no array environment"
    made = kind(**config.kwargs)
    return FrameStack(made, config.frame_stack) if config.frame_stack > 1 else made


def arguments_of(config: EnvConfig) -> dict[str, Any]:
    """An environment's arguments; of ours, those that it takes by itself too."""
    kind = array_environment(config.id)
    taken = {} if kind is None else inspect.signature(kind.__init__).parameters
    own = {name: p.default for name, p in taken.items() if p.default is not inspect.Parameter.empty}
    return own | config.kwargs


def stepped_as_arrays(config: EnvConfig) -> bool:
    """Whether an environment is one of ours and not asked for one by one."""
    return config.backend in ("auto", "tensor") and array_environment(config.id) is not None


def make_environment(config: EnvConfig, **kwargs: Any) -> gymnasium.Env:
    """``gymnasium.make`` for a config, in the wrappers that it asks for.

    Raises:
        ValueError: the id is unknown, or what it needs isn't installed; one line that says so.
    """
    if config.backend == "tensor" and not stepped_as_arrays(config):
        raise ValueError(
            f"env.id: {config.id} is a simulator on tensors, no Gymnasium environment: it can't be drawn here"
        )
    if config.jax_only and array_environment(config.id) is None:
        raise ValueError(f"env.id: {config.id} is stepped by JAX, no Gymnasium environment: it can't be drawn here")
    register_array_environments()
    calm_mujoco(gymnasium.registry.get(config.id))
    register_atari(config.id)
    extra: dict[str, Any] = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    if config.atari.enabled:
        extra |= {"frameskip": 1}
        extra |= {} if config.sticky_actions is None else {"repeat_action_probability": config.sticky_actions}
    try:
        made = gymnasium.make(config.id, disable_env_checker=True, **{**extra, **config.kwargs, **kwargs})
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(f"env.id: {config.id} needs a package that isn't installed: {error}") from None
    except ModuleNotFoundError as error:
        raise ValueError(f"env.id: {config.id}: {error}") from None
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ValueError(f"env.id: {_unknown(config.id, error)}") from None
    except Exception as error:
        text = " ".join(str(error).split()).partition(" was raised from the environment creator for ")[0]
        if config.atari.enabled and "frameskip" in text:
            raise ValueError(
                f"env.atari: {config.id} is no ALE game (their ids begin with ALE/); leave it out"
            ) from None
        raise ValueError(f"env.id: {config.id} can't be made: {type(error).__name__}: {text}") from error
    try:
        return wrap(config, made)
    except Exception as error:
        made.close()
        text = " ".join(str(error).split())
        raise ValueError(
            text if text.startswith("env.") else f"env.id: {config.id} can't be wrapped: {text}"
        ) from error


def _unknown(env_id: str, error: Exception) -> str:
    close = difflib.get_close_matches(env_id, gymnasium.registry.keys(), 1, 0.5)
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        hint = (
            f"did you mean {close[0]}?"
            if close
            else ("gymnasium.registry lists them, 'module:Id-v0' imports one; a class for JAX needs --env.backend jax")
        )
        return f"no environment {env_id!r} is registered; {hint}"
    return f"{env_id!r}: {error}"


def check_array_options(config: EnvConfig) -> None:
    """Raise a one-line ``ValueError`` for options that environments in arrays don't have."""
    if config.jax_only:
        _check_jax_options(config)
        return
    if config.backend != "tensor" and not stepped_as_arrays(config):
        return
    what = "as tensors" if config.backend == "tensor" else "as arrays"
    if config.workers:
        raise ValueError(f"env.workers: {config.workers}, but {config.id} is stepped {what}; use 0")
    if not stepped_as_arrays(config):
        _check_simulator_options(config)
    for name, given in (
        ("frame_skip", config.frame_skip > 1),
        ("frame_stack", config.frame_stack > 1 and not stepped_as_arrays(config)),
        ("sticky_actions", bool(config.sticky_actions)),
        ("atari", config.atari.enabled),
    ):
        if given:
            way_out = "use --env.backend gymnasium" if stepped_as_arrays(config) else "let the simulator do it"
            if stepped_as_arrays(config) and name != "atari":
                way_out += " (or jax, with --engine jax)"
            raise ValueError(f"env.{name}: {config.id} is stepped {what}, which takes no wrappers; {way_out}")


def _check_simulator_options(config: EnvConfig) -> None:
    if config.action_mask in MASK_SOURCES:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r}: a simulator's mask must be an entry of its Dict observation"
        )
    if config.max_episode_steps is not None:
        raise ValueError("env.max_episode_steps: a simulator's time limit is its own; give it through env.kwargs")


def _check_jax_options(config: EnvConfig) -> None:
    if config.workers:
        raise ValueError(f"env.workers: {config.workers}, but {config.id} is stepped in the compiled program; use 0")
    if config.atari.enabled:
        raise ValueError(f"env.atari: {config.id} is stepped by JAX and no ALE game; leave it out")
    if config.action_mask in MASK_SOURCES:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r}: the mask of an environment that JAX steps must be an entry of "
            "its Dict observation"
        )


def _jax_spaces(config: EnvConfig) -> tuple[gymnasium.Space, gymnasium.Space, int | None]:
    try:
        engine = importlib.import_module("lockstep.jax_engine.envs.environments")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env.id: {config.id} is stepped by JAX and {error.name} isn't installed; pip install 'lockstep-rl[jax]'"
        ) from None
    return engine.environment_spaces(config)


def describe(config: EnvConfig) -> EnvDescription:
    """Make the environment once and read its spaces.

    Raises:
        ValueError: it can't be made, or a space isn't supported; the line names the space that was met.
    """
    check_array_options(config)
    if config.jax_only:
        return described(config, *_jax_spaces(config))
    if config.backend == "tensor" and not stepped_as_arrays(config):
        return described(config, *simulator_spaces(config), None)
    if config.backend == "envpool":
        from lockstep.envs.batched.envpool import pool_spaces  # it needs descriptions itself

        return described(config, *pool_spaces(config))
    env = make_environment(config)
    try:
        return describe_spaces(config, env)
    finally:
        env.close()


def describe_spaces(config: EnvConfig, env: gymnasium.Env) -> EnvDescription:
    """The description of an environment that stands already; errors as :func:`describe`."""
    limit = env.spec.max_episode_steps if env.spec else None
    return described(config, env.observation_space, env.action_space, limit)


def described(
    config: EnvConfig, observations: gymnasium.Space, actions: gymnasium.Space, limit: int | None
) -> EnvDescription:
    """The description of an environment of these spaces and time limit.

    Raises:
        ValueError: a space isn't supported, or has no such mask; one line.
    """
    source = config.action_mask if config.action_mask in MASK_SOURCES else ""
    key = None if source else config.action_mask
    try:
        action = action_layout(actions)
        if config.action_mask and not action.discrete:
            raise ValueError(f"env.action_mask: {config.action_mask!r}, but actions are continuous; leave it out")
        observation = observation_layout(observations, key, action.outputs if source else 0)
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
        max_episode_steps=limit,
        is_array=stepped_as_arrays(config),
        mask_from=source,
        rewards=RewardShaping(config.reward_sign, config.reward_scale, config.reward_clip),
        lives=config.atari.enabled and config.atari.terminal_on_life_loss,
    )
