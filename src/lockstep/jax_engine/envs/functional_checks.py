"""Checks that a functional environment keeps to its spaces, by tracing it before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from lockstep.core.errors import one_line
from lockstep.core.user_code.errors import UsersFunctionError, error_line, users_line
from lockstep.envs.gymnasium.step_info import SUCCESS_KEYS
from lockstep.jax_engine.envs.functional import TERMS, TRUNCATED, gets_keys
from lockstep.jax_engine.shards.keys import is_key

Tree = Any


class StateKeys:
    """Converts the typed keys in a state to their bits and back.

    It is made from a state that is being traced, because shapes alone don't tell the kind of a key.
    """

    def __init__(self, state: Tree) -> None:
        leaves, self._treedef = jax.tree.flatten(state)
        self._impls = [str(jax.random.key_impl(x)) if is_key(x) else None for x in leaves]

    def plain(self, state: Tree) -> Tree:
        """Replaces typed keys in a state by their bits, and weak dtypes of Python numbers by strong ones."""

        def bits(leaf: Any) -> Any:
            return jax.random.key_data(leaf) if is_key(leaf) else jnp.asarray(leaf, jnp.asarray(leaf).dtype)

        return jax.tree.map(bits, state)

    def typed(self, state: Tree) -> Tree:
        """Restores the typed keys; the reverse of :meth:`plain`."""
        leaves = jax.tree.leaves(state)
        wrapped = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self._impls, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, wrapped)


def space_of(space: Any) -> gymnasium.Space:
    """Converts one of gymnax's spaces to Gymnasium's; returns Gymnasium's own as they are.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(space, gymnasium.Space):
        return space
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return spaces.Dict({name: space_of(part) for name, part in parts.items()})
    if parts is not None:
        return spaces.Tuple([space_of(part) for part in parts])
    if hasattr(space, "low") and hasattr(space, "high"):
        dtype, shape = np.dtype(space.dtype), tuple(space.shape)
        low, high = (np.broadcast_to(np.asarray(x, dtype), shape) for x in (space.low, space.high))
        if np.issubdtype(dtype, np.floating):  # gymnax writes the greatest float for infinity
            most = np.finfo(dtype).max
            low, high = np.where(low <= -most, -np.inf, low), np.where(high >= most, np.inf, high)
        return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    raise ValueError(f"{one_line(repr(space))} is neither a Gymnasium nor a gymnax space")


def check_functions(
    env: Any, params: Any, key: jax.Array, where: str, final: tuple[str, ...]
) -> tuple[gymnasium.Space, gymnasium.Space, StateKeys, tuple[Any, ...]]:
    """Traces ``reset`` and ``step`` of one environment and compares them with its spaces; errors begin with ``where``.

    An environment with autoreset must leave an ended episode's last observation in ``info``, under one of the names in
    ``final``.

    Returns:
        Observation space, action space, the keys in its state, and the shapes of what ``step`` returns.

    Raises:
        ValueError: if something doesn't fit; the message is one line.
    """
    observations, actions = (_space(env, which, params, where) for which in ("observation_space", "action_space"))
    seen: list[StateKeys] = []

    def first() -> Any:
        returned = env.reset(key, params)
        if isinstance(returned, tuple) and len(returned) == 2:
            seen.append(StateKeys(returned[1]))
        return returned

    reset = _traced(f"{where}: reset", first)
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise ValueError(f"{where}: reset(key, params) must return (obs, state), not {_what(reset)}")
    observation, state = reset
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)  # strong, as in the program
    _check_observation(f"{where}: reset's observation", observation, observations)
    action = _example(actions, where)
    draws = gets_keys(env)
    values = _traced(f"{where}: step", lambda s, a: env.step(key if draws else None, s, a, params), state, action)
    if not (isinstance(values, tuple) and len(values) in (5, 6)):
        raise ValueError(
            f"{where}: step(key, state, action, params) must return (obs, state, reward, done, info) or (obs, state, "
            f"reward, terminated, truncated, info), not {_what(values)}"
        )
    if not isinstance(values[-1], dict):
        raise ValueError(f"{where}: step's info is of type {type(values[-1]).__name__}; it must be a dict")
    _check_observation(f"{where}: step's observation", values[0], observations)
    _check_state(where, state, values[1])
    _check_numbers(where, values)
    _check_info(where, values)
    if final:
        last = next((values[-1][entry] for entry in final if entry in values[-1]), None)
        if last is None:
            raise ValueError(
                f"{where}: its step resets by itself (autoreset), so that info must hold what an ended episode saw "
                "last as info['final_obs']: without it a truncated episode can't bootstrap; or leave the reset to the "
                "engine (autoreset = False)"
            )
        _check_observation(f"{where}: info['final_obs']", last, observations)
    return observations, actions, seen[-1], values


def _space(env: Any, which: str, params: Any, where: str) -> gymnasium.Space:
    space = getattr(env, which, None)
    if space is None:
        raise ValueError(f"{where} has no {which}(params); give a Gymnasium or gymnax space")
    try:
        return space_of(space(params) if callable(space) else space)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else error_line(error)
        raise ValueError(f"{where}: {which}: {text}{users_line(error)}") from error


def _traced(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return jax.eval_shape(function, *arguments)
    except UsersFunctionError as error:
        raise ValueError(str(error)) from error.__cause__
    except Exception as error:
        raise ValueError(f"{what} can't be traced by JAX: {error_line(error)}{users_line(error)}") from error


def _what(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__


def _example(space: gymnasium.Space, where: str) -> jax.ShapeDtypeStruct:
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return jax.ShapeDtypeStruct(space.shape, jnp.float32)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return jax.ShapeDtypeStruct(space.shape or (), jnp.int32)
    raise ValueError(
        f"{where}: action space {one_line(space)} isn't supported; supported are Discrete, MultiDiscrete, "
        "MultiBinary and floating-point Box"
    )


def _check_observation(what: str, seen: Tree, space: gymnasium.Space) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))
        kind = Mapping if isinstance(space, spaces.Dict) else tuple
        if not isinstance(seen, kind) or set(seen if kind is Mapping else range(len(seen))) != set(keys):
            shown = list(seen) if isinstance(seen, Mapping) else _what(seen)
            raise ValueError(f"{what} is {shown}, and its space a {type(space).__name__} of {keys}")
        parts: Any = space.spaces
        inside: Any = seen
        for key in keys:
            _check_observation(f"{what} part {key!r}", inside[key], parts[key])
        return
    shape = tuple(space.shape or ())
    if not hasattr(seen, "shape") or seen.shape != shape or not _same_kind(seen.dtype, space):
        raise ValueError(f"{what} is {_shown(seen)}, and its space says {np.dtype(space.dtype).name}{list(shape)}")


def _same_kind(dtype: Any, space: gymnasium.Space) -> bool:
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        return dtype == np.uint8
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return jnp.issubdtype(dtype, jnp.floating)
    if isinstance(space, spaces.Box | spaces.MultiBinary) and jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.issubdtype(dtype, jnp.integer)


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def _check_state(where: str, before: Tree, after: Tree) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"{where}: a step's state has another structure than the reset's: {jax.tree.structure(after)} instead of "
            f"{jax.tree.structure(before)}"
        )
    for (path, first), second in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            raise ValueError(
                f"{where}: state{jax.tree_util.keystr(path)} is {_shown(first)} after a reset and {_shown(second)} "
                "after a step; it must stay the same"
            )


def _check_numbers(where: str, values: tuple[Any, ...]) -> None:
    reward, flags = values[2], values[3:-1]
    if not (_is_real(reward) and reward.shape == ()):
        raise ValueError(f"{where}: step's reward is {_shown(reward)}; it must be one real number")
    for name, flag in zip(("done",) if len(flags) == 1 else ("terminated", "truncated"), flags, strict=True):
        if not (_is_real(flag) and flag.shape == () and jnp.issubdtype(flag.dtype, jnp.bool_)):
            raise ValueError(f"{where}: step's {name} is {_shown(flag)}; it must be one bool")


def _check_info(where: str, values: tuple[Any, ...]) -> None:
    """Checks the entries of ``info`` that the engine reads."""
    info, entries = values[-1], list[str | None]()
    if len(values) == 5:
        both = ("terminated", "truncated")
        told = all(name in info for name in both)
        entries += both if told else [next((name for name in TRUNCATED if name in info), None)]
    success = next((name for name in SUCCESS_KEYS if name in info), None)
    for name in filter(None, (success, *entries)):
        said, kind = info[name], "bool, or a number that is above 0.5" if name == success else "bool"
        if said is not None and not (_is_real(said) and said.shape == ()):
            raise ValueError(f"{where}: info[{name!r}] is {_shown(said)}; it must be one {kind}")
    terms = info.get(TERMS, {})
    if not isinstance(terms, Mapping):
        raise ValueError(f"{where}: info[{TERMS!r}] is {_shown(terms)}; it must be a dict of numbers by name")
    for name, term in terms.items():
        if not _is_real(term):
            raise ValueError(f"{where}: info[{TERMS!r}][{name!r}] is {_shown(term)}; it must be one real number")


def _is_real(value: Any) -> bool:
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return hasattr(value, "shape") and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
