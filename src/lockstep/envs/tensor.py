"""Defines the interface of simulators, which exchange tensors on the policy's device, and loads them.

The interface is Gymnasium's vector environment with tensors in place of arrays, as Isaac Lab's and ManiSkill's
environments have it. Nothing here imports an engine; :mod:`lockstep.torch_engine.envs.simulators` drives simulators.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from typing import Any, Protocol, cast

import gymnasium

from lockstep.config.run import Config, EnvConfig
from lockstep.core.errors import one_line
from lockstep.core.user_code.handed import handed_object, is_handed
from lockstep.core.user_code.search_path import (
    check_module,
    passed_over,
    search_path_hint,
    search_working_directory_last,
)
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS

Tensor = Any
"""A tensor of the engine."""

_OTHER_RESETS = {"NextStep": "resets one step late", "Disabled": "does not reset ended episodes"}


class TensorEnvironment(Protocol):
    """The interface of a simulator.

    Attributes:
        single_observation_space: space of one environment: Box, Discrete, MultiDiscrete, MultiBinary, or Dict of those.
        single_action_space: action space of one environment.

    It may also offer ``get_env_state() -> dict`` of tensors ``[num_envs, …]`` and ``set_env_state(dict)``, which
    restore it exactly on resume; ``close()``; and ``metadata``, whose ``autoreset_mode`` must then be ``SameStep``.
    """

    num_envs: int
    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in every environment; returns observation (tensor ``[num_envs, …]`` or a dict) and info."""
        ...

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Steps every environment; one whose episode ends begins the next one in the same step.

        Args:
            actions: on the simulator's device, int64 ``[num_envs]`` or ``[num_envs, indices]``, or float32
                ``[num_envs, …]`` within the bounds of the space.

        Returns:
            Observation, the next episode's first one where an episode ended; reward ``[num_envs]``; terminated and
            truncated, bool ``[num_envs]``; info. ``info["final_observation"]`` (or ``"final_obs"``), shaped like the
            observation, holds the last observation of ended episodes. Without it a truncated episode bootstraps from
            the value of the observation before the step. ``info["success"]``, bool ``[num_envs]``, says which tasks are
            solved.
        """
        ...


class TensorFactory(Protocol):
    """Makes simulators; ``env.id`` names it as ``module:function`` with ``env.backend: tensor``.

    It may have two attributes. ``per_shard = False`` says that a process can hold only one of its simulators, or that
    their random numbers can't be seeded separately. ``spaces(**kwargs)`` returns the observation and action space of
    one environment, for simulators that can't be made on the CPU just to read their spaces.
    """

    def __call__(self, num_envs: int, device: str, seed: int, **kwargs: Any) -> TensorEnvironment:
        """Makes a simulator of ``num_envs`` environments on ``device`` ("cpu", "cuda:0"), seeded with ``seed``."""
        ...


def named_object(name: str) -> Any:
    """Imports what ``module:name`` names, from a module in the working directory or installed; loads a handed object.

    Raises:
        ValueError: there is no such function or class; one line.
    """
    if is_handed(name):
        return handed_object("env.id", name)
    check_module("env.id", name)
    module, _, attribute = name.partition(":")
    search_working_directory_last()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        if isinstance(error, AttributeError) and module in sys.modules:
            raise ValueError(f"env.id: {name}: module {module} has no {attribute}{passed_over(module)}") from None
        why = one_line(error)
        if not isinstance(error, ModuleNotFoundError):
            why = f"importing {module} failed: {type(error).__name__}: {why}"
        raise ValueError(f"env.id: {name}: {why}{search_path_hint(error, module)}") from error
    if not callable(found) or inspect.isbuiltin(found):
        raise ValueError(f"env.id: {name} is neither a function nor a class")
    return found


def load_factory(config: EnvConfig) -> TensorFactory:
    """Loads the factory that ``env.id`` names.

    Raises:
        ValueError: there is none; one line.
    """
    check_module("env.id", config.id)
    if ":" not in config.id or "/" in config.id:
        raise ValueError(
            f"env.id: {config.id!r} with env.backend tensor: give an array environment (lockstep/…) or the "
            "function that makes a simulator, as module:function"
        )
    return cast(TensorFactory, named_object(config.id))


def per_shard(config: EnvConfig) -> bool:
    """Returns whether each shard can have its own simulator."""
    return bool(getattr(load_factory(config), "per_shard", True))


def check_resets(config: EnvConfig, simulator: Any) -> None:
    """Raises a one-line ``ValueError`` if a simulator says that it doesn't begin an episode in the step that ends one.

    It says so as Gymnasium's vector environments do, in ``metadata["autoreset_mode"]``. One that says nothing is
    trusted.
    """
    said = (getattr(simulator, "metadata", None) or {}).get("autoreset_mode")
    mode = str(getattr(said, "value", said))
    if mode not in _OTHER_RESETS:
        return
    raise ValueError(
        f"env.id: {config.id} {_OTHER_RESETS[mode]} (metadata autoreset_mode {mode}); env.backend tensor needs an "
        "environment that resets in the same step: train the id that Gymnasium knows itself, or give one that does, "
        "with info's final_obs as one tensor or without it"
    )


def simulator_spaces(config: EnvConfig, trains: bool = True) -> tuple[gymnasium.Space, gymnasium.Space]:
    """Returns the observation and action space of one environment of a simulator.

    Raises:
        ValueError: it can't be made, or doesn't reset in the same step, which is checked only if it ``trains``; one
            line.
    """
    factory = load_factory(config)
    try:
        if hasattr(factory, "spaces"):
            return factory.spaces(**copy.deepcopy(config.kwargs))  # pyright: ignore[reportAttributeAccessIssue]
        made = factory(1, "cpu", 0, **copy.deepcopy(config.kwargs))
    except (Exception, SystemExit) as error:
        text = one_line(error)
        raise ValueError(f"env.id: {config.id} can't be made: {type(error).__name__}: {text}") from error
    try:
        if trains:
            check_resets(config, made)
        return made.single_observation_space, made.single_action_space
    finally:
        close = getattr(made, "close", None)
        if close is not None:
            close()


def check_tensor_options(config: Config) -> None:
    """Raises a one-line ``ValueError`` if a simulator can't keep what the config promises."""
    if config.env.backend != "tensor" or config.env.id in ARRAY_ENVIRONMENTS:
        return
    shards = config.shards
    if config.algorithm == "grpo":
        raise ValueError(
            f"algorithm: grpo needs groups of environments that start alike, which simulator {config.env.id} doesn't "
            "offer; use ppo"
        )
    if config.eval.interval and not per_shard(config.env):
        raise ValueError(
            f"eval.interval: {config.eval.interval}: an evaluation needs a second simulator, and {config.env.id} says "
            "per_shard = False; leave it out"
        )
    if config.reduction == "exact" and shards > 1 and not per_shard(config.env):
        raise ValueError(
            f"reduction: exact with {shards} shards needs a simulator a shard, and {config.env.id} says "
            "per_shard = False; use --reduction fast or --num-shards 1"
        )
