"""Makes the Gymnasium environment of a config and wraps it as the config asks."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from lockstep.config.presets import ATARI_ID, with_version
from lockstep.config.run import EnvConfig
from lockstep.core.errors import one_line
from lockstep.core.process import say
from lockstep.core.user_code.classes import named_here
from lockstep.core.user_code.errors import error_line
from lockstep.core.user_code.handed import handed_object, is_handed
from lockstep.core.user_code.search_path import check_module, passed_over, search_path_hint
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.description import stepped_as_arrays
from lockstep.envs.graphics import graphics_hint
from lockstep.envs.gymnasium.atari import UNSEEN_PICTURES
from lockstep.envs.gymnasium.box2d import begin_in_new_worlds
from lockstep.envs.gymnasium.minigrid import MINIGRID_ID, register_minigrid
from lockstep.envs.gymnasium.wrappers import wrap

EXTRAS = {
    "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.classic_control": "classic-control",
}
"""Maps packages of Gymnasium's environments to extras of ours."""

OF_MAKE = ("id", "max_episode_steps", "disable_env_checker")
"""Arguments of ``gymnasium.make`` that it doesn't pass on."""


def make_environment(config: EnvConfig, **kwargs: Any) -> gymnasium.Env:
    """Calls ``gymnasium.make`` for a config, and wraps the result as the config asks.

    Raises:
        ValueError: the id is unknown, or a package that it needs isn't installed; one line.
    """
    return wrapped(config, bare_environment(config, **kwargs))


def bare_environment(config: EnvConfig, **kwargs: Any) -> gymnasium.Env:
    """Calls ``gymnasium.make`` for a config and wraps nothing; raises the same as :func:`make_environment`."""
    if config.backend == "tensor" and not stepped_as_arrays(config):
        raise ValueError(
            f"env.id: {config.id} is a simulator on tensors, no Gymnasium environment: it can't be drawn here"
        )
    if config.jax_only and config.id not in ARRAY_ENVIRONMENTS:
        raise ValueError(f"env.id: {config.id} is stepped by JAX, no Gymnasium environment: it can't be drawn here")
    check_module("env.id", config.id)
    _calm_gymnasium()
    if "mujoco" in _entry_point(config.id):
        _calm_mujoco(config.id)
    if is_handed(config.id):
        handed_object("env.id", config.id)  # raises here if it can't be loaded
    if ATARI_ID.fullmatch(config.id):
        _register_atari(config.id)
    if MINIGRID_ID.fullmatch(config.id):
        register_minigrid(config.id)
    extra: dict[str, Any] = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    if config.atari.enabled:
        extra |= {"frameskip": 1, **UNSEEN_PICTURES}
        extra |= {} if config.sticky_actions is None else {"repeat_action_probability": config.sticky_actions}
    try:
        what, given = _with_own_arguments(spec_of(config.id), config.kwargs)
        made = gymnasium.make(what, disable_env_checker=True, **{**extra, **given, **kwargs})
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(
            f"env.id: {config.id} needs a package that isn't installed: {_needed(config, error)}"
        ) from None
    except ModuleNotFoundError as error:
        where = search_path_hint(error, config.id.partition(":")[0]) if ":" in config.id else ""
        raise ValueError(f"env.id: {config.id}: {error}{where}") from None
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ValueError(f"env.id: {_unknown(config.id, error)}") from None
    except (Exception, SystemExit) as error:
        text = one_line(error).partition(" was raised from the environment creator for ")[0]
        if config.atari.enabled and "frameskip" in text:
            raise ValueError(
                f"env.atari: {config.id} is no ALE game (their ids begin with ALE/); leave it out"
            ) from None
        if isinstance(error, TypeError) and "must inherit from the gymnasium.Env class" in text:
            raise ValueError(
                f"env.id: {config.id} is no gymnasium.Env; one of lockstep.jax takes --env.backend jax, one of tensors "
                "--env.backend tensor"
            ) from None
        raise ValueError(f"env.id: {config.id} can't be made: {type(error).__name__}: {text}") from error
    begin_in_new_worlds(made)
    return made


def wrapped(config: EnvConfig, made: gymnasium.Env) -> gymnasium.Env:
    """Wraps an environment of ``gymnasium.make`` as the config asks.

    Raises:
        ValueError: a wrapper doesn't fit it; one line. The environment is then closed.
    """
    try:
        return wrap(config, made)
    except (Exception, SystemExit) as error:
        made.close()
        text = one_line(error)
        raise ValueError(
            text if text.startswith("env.") else f"env.id: {config.id} can't be wrapped: {text}"
        ) from error


def _needed(config: EnvConfig, error: Exception) -> str:
    """Says what to install: an extra of ours, if one has what Gymnasium asks for."""
    extra = next((name for package, name in EXTRAS.items() if _entry_point(config.id).startswith(package)), None)
    ours = extra is not None and "mujoco-py" not in str(error)  # of versions up to 3, which is another package
    return f"pip install 'lockstep-rl[{extra}]'" if ours else str(error)


def _entry_point(env_id: str) -> str:
    return str(getattr(gymnasium.registry.get(env_id), "entry_point", ""))


def spec_of(env_id: str) -> str | EnvSpec:
    """Returns what ``gymnasium.make`` takes for an id: the id, or a spec of ``module:callable`` or a handed object."""
    module, colon, name = env_id.partition(":")
    if not colon:
        return env_id
    if is_handed(env_id):
        return _spec(name, handed_object("env.id", env_id))
    if not name.isidentifier():
        return env_id
    found: Any = getattr(importlib.import_module(module), name, None)
    if found is None or not callable(found) or name in gymnasium.registry:
        return env_id
    return _spec(name, found)


def _spec(name: str, makes: Any) -> EnvSpec:
    """Returns the spec of a callable; a ``partial`` hides a wrapper's class, whose metadata exists only once made."""
    looked_at = isinstance(getattr(makes, "metadata", {}), dict)
    return EnvSpec(name, entry_point=cast(Any, makes if looked_at else functools.partial(makes)))


def _with_own_arguments(what: str | EnvSpec, kwargs: Mapping[str, Any]) -> tuple[str | EnvSpec, dict[str, Any]]:
    """Moves arguments that ``gymnasium.make`` would keep to itself into a spec, if its callable has such arguments.

    Returns the spec (an id is left as it is), and the other arguments, for ``gymnasium.make``: copies, because an
    environment may change them.
    """
    given = copy.deepcopy(dict(kwargs))
    if isinstance(what, EnvSpec):
        what.kwargs = {name: given.pop(name) for name in OF_MAKE if name in given and _takes(what.entry_point, name)}
    return what, given


def _takes(makes: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(makes).parameters
    except (TypeError, ValueError):  # written in C, say
        return False
    return name in parameters


def _unknown(env_id: str, error: Exception) -> str:
    if env_id.endswith(".py"):
        starts, examines = f"lockstep run --nproc 2 {env_id} starts it", f"lockstep doctor -- {env_id} examines it"
        own = named_here(env_id.removesuffix(".py"))
        return f"{env_id!r} is a script: {starts}, {examines}" + (f"; its environment is {own}" if own else "")
    module, _, name = env_id.partition(":")
    if module in sys.modules and name.isidentifier() and not hasattr(sys.modules[module], name):
        there = [key for key, value in vars(sys.modules[module]).items() if callable(value)]
        near = difflib.get_close_matches(name, there, 1, 0.5)
        return f"{module} has no {name}{passed_over(module) or (f'; did you mean {module}:{near[0]}?' if near else '')}"
    known = [key for key in gymnasium.registry if not key.startswith("GymV")]  # adapters for older versions
    close = difflib.get_close_matches(env_id, known, 1, 0.5)
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        hint = (
            "'module:Class' names your own class, 'module:Id-v0' imports a registered one, gymnasium.registry lists "
            "them; a class for JAX needs --env.backend jax"
        )
        if (own := named_here(env_id)) is not None:
            hint = f"did you mean {own}?"
        elif close:
            hint = f"did you mean {with_version(close[0].rpartition('-v')[0])}?"  # older ones may be refused
        return f"no environment {env_id!r} is registered; {hint}"
    return f"{env_id!r}: {error}"


def version_note(env_id: str) -> str | None:
    """Returns a line that says so if an id of Gymnasium's registry isn't the newest version's; None if it is."""
    try:
        namespace, name, version = parse_env_id(env_id.partition(":")[2] or env_id)
    except gymnasium.error.Error:
        return None
    newest = find_highest_version(namespace, name)
    if newest is None or (version is not None and version >= newest):
        return None
    other = get_env_id(namespace, name, newest)
    return f"{env_id}: taken as {other}" if version is None else f"{env_id} is out of date: there is {other}"


@functools.cache
def _calm_gymnasium() -> None:
    """Silences what :func:`version_note` says once and Gymnasium would say in every process."""
    for said in ("is out of date", "Using the latest versioned environment"):
        warnings.filterwarnings("ignore", f".*{said}", module=r"gymnasium\.envs\.registration")


@functools.cache
def _show_once(message: str) -> None:
    """Prints a warning the first time it comes, unless it is one for the author of a model file."""
    if "deprecated" not in message:
        say(f"lockstep: warning: MuJoCo: {message}")


def _calm_mujoco(env_id: str) -> None:
    """Shows each of MuJoCo's warnings once, on standard error, instead of once per environment and in a file."""
    if importlib.util.find_spec("mujoco") is not None:
        try:
            import mujoco
        except Exception as error:  # PyOpenGL's, if the graphics library that MUJOCO_GL names is missing
            why = f"MuJoCo can't be imported: {error_line(error)}{graphics_hint()}"
            raise ValueError(f"env.id: {env_id}: {why}") from None

        if hasattr(mujoco, "set_mju_user_warning"):
            mujoco.set_mju_user_warning(_show_once)  # pyright: ignore[reportAttributeAccessIssue]


def _register_atari(env_id: str) -> None:
    if importlib.util.find_spec("ale_py") is None:
        raise ValueError(f"env.id: {env_id} needs ale-py, which isn't installed; pip install 'lockstep-rl[atari]'")
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # otherwise each emulator prints a greeting
    gymnasium.register_envs(ale_py)
