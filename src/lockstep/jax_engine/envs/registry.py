"""Makes functional environments by id: ours, gymnax's, Brax's, Playground's, or a user's class."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from lockstep.core.user_code.errors import error_line
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.graphics import graphics_hint
from lockstep.envs.tensor import named_object
from lockstep.jax_engine.envs.default_params import default_params
from lockstep.jax_engine.envs.functional import Environment
from lockstep.jax_engine.envs.gymnax_environment import GymnaxEnvironment
from lockstep.jax_engine.envs.simulators import SimulatedEnvironment, SingleArrayEnvironment
from lockstep.jax_engine.setup.set_up import prepare_jax

BRAX_EPISODE = 1000
"""Time limit in Brax's own learners."""
MADE_OF = "_lockstep_made_of"


def make(env_id: str, **kwargs: Any) -> tuple[Any, Any]:
    """Makes an environment in gymnax's form; returns it and its default parameters.

    It has ``env.reset(key, params) -> (obs, state)`` and
    ``env.step(key, state, action, params) -> (obs, state, reward, done, info)``; ``info`` tells ``terminated`` from
    ``truncated``. It doesn't reset by itself: :class:`lockstep.jax.wrappers.AutoResetWrapper` adds that.

    Args:
        env_id: ``lockstep/CartPole-v1`` (or ``CartPole-v1``, which is the same), ``gymnax/Breakout-MinAtar``,
            ``brax/ant``, ``playground/HumanoidWalk``, or ``module:Class``.
        kwargs: arguments of the environment; for Playground, changes of its configuration.

    Raises:
        ValueError: if there is none of this id, it can't be made, or a package isn't installed; the message is one
            line.
    """
    prepare_jax()  # some packages start JAX when they are imported
    family, _, name = env_id.rpartition("/")
    makers = {"": _array, "lockstep": _array, "gymnax": _gymnax, "brax": _brax, "playground": _playground}
    if ":" in env_id:
        env, params = _own(env_id, kwargs)
        return _labelled(env, env_id, kwargs), params
    if family not in makers:
        raise ValueError(
            f"env.id: {env_id!r} is none that JAX can step; give lockstep/…, gymnax/…, brax/…, playground/… or "
            "'module:Class'"
        )
    env = _labelled(makers[family](env_id, name, kwargs), f"{family or 'lockstep'}/{name}", kwargs)
    return env, env.default_params


def made_of(env: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the id and the arguments from which :func:`make` made an environment; None if it didn't."""
    return getattr(env, MADE_OF, None)


def by_dotted_name(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings without nesting: ``{"ppo": {"gamma": 0.9}}`` becomes ``{"ppo.gamma": 0.9}``."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= by_dotted_name(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _labelled(env: Any, env_id: str, kwargs: dict[str, Any]) -> Any:
    with contextlib.suppress(AttributeError, TypeError):  # a user's class may not allow new attributes
        object.__setattr__(env, MADE_OF, (env_id, dict(kwargs)))
    return env


def _array(env_id: str, name: str, kwargs: dict[str, Any]) -> Environment:
    ours = {key.partition("/")[2]: kind for key, kind in ARRAY_ENVIRONMENTS.items()}
    _check_known(env_id, name, "lockstep", ours)
    return SingleArrayEnvironment(_constructed(env_id, ours[name], kwargs))


def _gymnax(env_id: str, name: str, kwargs: dict[str, Any]) -> Environment:
    gymnax = _package(env_id, "gymnax", "gymnax")
    _check_known(env_id, name, "gymnax", gymnax.registered_envs)
    env, _ = _constructed(env_id, lambda **given: gymnax.make(name, **given), kwargs)
    return GymnaxEnvironment(env, images=name.endswith("-MinAtar"))


def _brax(env_id: str, name: str, kwargs: dict[str, Any]) -> Environment:
    brax = _package(env_id, "brax.envs", "brax")
    _check_known(env_id, name, "brax", brax._envs)
    return SimulatedEnvironment(_constructed(env_id, brax._envs[name], kwargs), BRAX_EPISODE)


def _playground(env_id: str, name: str, kwargs: dict[str, Any]) -> Environment:
    playground = _package(env_id, "mujoco_playground", "playground")
    _check_known(env_id, name, "playground", playground.registry.ALL_ENVS)
    if name not in playground.dm_control_suite.ALL_ENVS:
        _check_models(env_id)
    config = playground.registry.get_default_config(name)
    # the packaged default is MuJoCo's other implementation, warp, which needs a GPU
    changes = ({"impl": "jax"} if "impl" in config else {}) | by_dotted_name(kwargs)
    env = _constructed(env_id, lambda: playground.registry.load(name, config, changes), {})
    return SimulatedEnvironment(env, int(env._config.episode_length))


def _check_models(env_id: str) -> None:
    models = importlib.import_module("mujoco_playground._src.mjx_env").MENAGERIE_PATH
    if not models.exists():
        raise ValueError(
            f"env.id: {env_id} needs the robots of mujoco_menagerie, which Playground downloads: python -c 'from "
            "mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()'"
        )


def _own(env_id: str, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    kind = named_object(env_id)
    if inspect.isclass(kind) and not (hasattr(kind, "reset") and hasattr(kind, "step")):
        _check_environment(env_id, kind)  # checked before the call, because it may be any class
    made = _constructed(env_id, kind, kwargs)
    if isinstance(made, tuple) and len(made) == 2:
        return made
    _check_environment(env_id, made)
    return made, default_params(made)


def _check_environment(env_id: str, made: Any) -> None:
    missing = [name for name in ("reset", "step", "observation_space", "action_space") if not hasattr(made, name)]
    if missing:
        raise ValueError(
            f"env.id: {env_id} has no {' and no '.join(missing)}; an environment has reset(key, params), "
            "step(key, state, action, params), observation_space(params) and action_space(params)"
        )


def _constructed(env_id: str, kind: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return kind(**kwargs)
    except Exception as error:
        raise ValueError(f"env.id: {env_id} can't be made: {error_line(error)}") from error


def _package(env_id: str, module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env.id: {env_id} needs {error.name}, which isn't installed; pip install 'lockstep-rl[{extra}]'"
        ) from None
    except Exception as error:  # MuJoCo's error if the graphics library that MUJOCO_GL names is missing
        why = f"{module} can't be imported: {error_line(error)}{graphics_hint()}"
        raise ValueError(f"env.id: {env_id}: {why}") from None


def _check_known(env_id: str, name: str, family: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    by_case = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), list(by_case), 1, 0.5)
    hint = f"did you mean {family}/{by_case[close[0]]}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"env.id: there is no {env_id}; {hint}")
