"""Describes an environment by making it once and reading its spaces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import gymnasium

from lockstep.config.engines import MissingPackageError, engine_module
from lockstep.config.run import EnvConfig
from lockstep.core.process import say
from lockstep.core.silence import called_after
from lockstep.core.user_code.working_directory import keep_working_directory
from lockstep.envs.batched.envpool import pool_spaces
from lockstep.envs.description import MASK_SOURCES, EnvDescription, described, stepped_as_arrays
from lockstep.envs.gymnasium.in_process import MAKE_SECONDS
from lockstep.envs.gymnasium.keyed import close_environment
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.tensor import simulator_spaces

_drawable: dict[str, bool] = {}
"""Tells of the ids of environments that were described in this process whether they have pictures."""


def says_it_draws(env_id: str) -> bool | None:
    """Returns whether an environment's metadata lists ``rgb_array``, or JAX's has ``render``; None if not made here."""
    return _drawable.get(env_id)


def describe(config: EnvConfig, trains: bool = True) -> EnvDescription:
    """Makes the environment once and describes it by its spaces.

    Args:
        config: which environment, with its options.
        trains: False for single episodes, for which a simulator needn't reset in the step that ends an episode.

    Raises:
        ValueError: the environment can't be made, or a space isn't supported; one line that names the space.
    """
    with keep_working_directory():
        return _looked_at(config, trains)


def _looked_at(config: EnvConfig, trains: bool) -> EnvDescription:
    _check_array_options(config)
    if config.jax_only:
        engine = _jax_engine(config)
        _drawable[config.id] = engine.can_draw(config)
        return described(config, *engine.environment_spaces(config))
    if config.backend == "tensor" and not stepped_as_arrays(config):
        return described(config, *simulator_spaces(config, trains), None)
    if config.backend == "envpool":
        return described(config, *pool_spaces(config))
    with _told_if_slow(config):
        env = make_environment(config)
    try:
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise ValueError(f"env.id: {config.id} has no {name}; set self.{name} where it is made, to a space")
        _drawable[config.id] = _lists_pictures(env)
        return described(config, env.observation_space, env.action_space, _limit(env, config))
    finally:
        close_environment(env, config.id)


def _told_if_slow(config: EnvConfig) -> AbstractContextManager[None]:
    """Says once if the block takes long: the environment may wait for something that never comes."""
    limit = max(config.timeout, MAKE_SECONDS)
    text = f"env.id: {config.id} isn't made after {limit:g} s; it is waited for"
    return called_after(limit, lambda: say(f"lockstep: warning: {text}"))


def _lists_pictures(env: gymnasium.Env) -> bool:
    metadata = getattr(env, "metadata", None)
    modes = metadata.get("render_modes") if isinstance(metadata, dict) else None
    return isinstance(modes, (list, tuple, set)) and "rgb_array" in modes


def _limit(env: gymnasium.Env, config: EnvConfig) -> int | None:
    """Returns the most actions of an episode: with a frame skip, each takes several of the environment's own steps."""
    steps = env.spec.max_episode_steps if env.spec else None
    skip = config.atari.frame_skip if config.atari.enabled else config.frame_skip
    return None if steps is None else -(-steps // skip)


def _jax_engine(config: EnvConfig) -> Any:
    try:
        return engine_module("jax")
    except MissingPackageError as error:
        raise ValueError(
            f"env.id: {config.id} is stepped by JAX and {error.package} isn't installed; pip install 'lockstep-rl[jax]'"
        ) from None


def _check_array_options(config: EnvConfig) -> None:
    """Raises a one-line ``ValueError`` for options that environments stepped as arrays or tensors, or by JAX, lack."""
    if config.jax_only:
        _check_jax_options(config)
        return
    if config.backend != "tensor" and not stepped_as_arrays(config):
        return
    what = "as tensors" if config.backend == "tensor" else "as arrays"
    if config.workers not in (0, "auto"):
        raise ValueError(f"env.workers: {config.workers}, but {config.id} is stepped {what}; use 0")
    if not stepped_as_arrays(config):
        _check_simulator_options(config)
    elif config.action_mask in MASK_SOURCES:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r}, but {config.id} is an array environment, which forbids no "
            "action; leave it out"
        )
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
    if config.workers not in (0, "auto"):
        raise ValueError(f"env.workers: {config.workers}, but {config.id} is stepped in the compiled program; use 0")
    if config.atari.enabled:
        raise ValueError(f"env.atari: {config.id} is stepped by JAX and no ALE game; leave it out")
    if config.action_mask in MASK_SOURCES:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r}: the mask of an environment that JAX steps must be an entry of "
            "its Dict observation"
        )
