"""Collects the facts that a checkpoint must share with the training that resumes from it, and compares them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lockstep.config.run import Config
from lockstep.core.fingerprint import array_digest
from lockstep.jax.config import in_users_names
from lockstep.jax.metrics import say
from lockstep.jax.reward_terms import RewardTermsWrapper
from lockstep.jax.wrappers.single import Wrapper, innermost
from lockstep.jax_engine.distributed.placement import gathered
from lockstep.jax_engine.distributed.reductions import FSDP_AXIS
from lockstep.jax_engine.envs.registry import by_dotted_name, made_of
from lockstep.jax_engine.shards.keys import is_key

if TYPE_CHECKING:
    from lockstep.jax.training import Training

TERMS, PARAMS, CLASSES, MADE = "reward_terms", "env_params", "env_classes", "env_made"
NUM_SHARDS = "num_shards"
DEVICES = ("num_devices", "fsdp_devices")
"""Facts that older checkpoints don't have."""


def facts_of(training: Training) -> dict[str, Any]:
    """Returns the settings of a training by dotted name, and what else identifies that training.

    These are the weights of reward terms and ``env_params``, by name, the classes of the environment and its wrappers,
    and the id and arguments that :func:`lockstep.jax.make` made it of, if it did. The length of training isn't among
    them, unless the learning rate falls until then. The number of devices is among them if ``reduction`` is fast.
    """
    config = training.config
    out = by_dotted_name(config.model_dump(mode="json"))
    if config.ppo.schedule == "constant":
        out.pop("total_steps")
    weights, classes = _wrapped(training.env)
    mine = {MADE: _made(training.env), TERMS: weights, PARAMS: _all_parameters(training.env_params), CLASSES: classes}
    if config.reduction == "fast":
        mesh = training.program.mesh
        mine |= dict(zip(DEVICES, (mesh.size, mesh.shape[FSDP_AXIS]), strict=True))
    return mine | out


def check_facts(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], path: Path, devices_by_default: int | None = None
) -> None:
    """Compares facts with those of a checkpoint, which may lack facts that older versions didn't save.

    A setting that it lacks wasn't there yet, and has the default since, which computes what was computed before. A
    parameter that only one of the two has belongs to an environment whose code was edited, and passes.

    Args:
        mine: facts of this training.
        theirs: facts of the checkpoint.
        path: the checkpoint.
        devices_by_default: number of devices that determined ``num_shards``; None: the user gave it.

    Raises:
        ValueError: a fact differs; one line in the user's names.
    """
    before = by_dotted_name(Config().model_dump(mode="json")) | dict(theirs)
    for name, value in mine.items():
        if name in (TERMS, PARAMS):
            then = theirs.get(name)
            if not isinstance(then, Mapping):
                continue
            for part in [*value, *then] if name == TERMS else [part for part in value if part in then]:
                if value.get(part) != then.get(part):
                    raise ValueError(_line(f"{name}: {part}: {_said(value, part)}", path, _said(then, part)))
        elif name in (CLASSES, MADE):
            then = theirs.get(name)
            if None not in (value, then) and then != value:
                raise ValueError(_line(f"env: {value}", path, then))
        elif name in DEVICES:
            _check_devices(name, value, theirs.get(name), path, apart=mine.get("sync_period", 1) > 1)
        elif name == NUM_SHARDS and devices_by_default is not None:
            _check_shards_by_default(value, theirs.get(name), path, devices_by_default)
        elif before.get(name) != value:
            raise ValueError(in_users_names(_line(f"{name}: {value}", path, before.get(name))))


def _check_shards_by_default(now: int, then: Any, path: Path, devices: int) -> None:
    """Raises if the default number of shards differs from the checkpoint's, and says which number to give."""
    if now == then:
        return
    fewer = f", on at most {then} devices" if isinstance(then, int) and then < devices else ""
    raise ValueError(
        f"num_shards: {now} on {devices} devices where none are given, but {path} was trained with {then}; give "
        f"num_shards={then} (RunnerConfig){fewer}"
    )


def _check_devices(name: str, now: int, then: int | None, path: Path, apart: bool) -> None:
    """Raises for other devices if each trains alone; warns if they only add up in another order."""
    if then in (None, now):
        return
    if apart:
        raise ValueError(_line(f"{name}: {now}", path, then))
    say(
        f"warning: {name}: {now}, but {path} was trained with {then}; with reduction fast other devices agree up to "
        "summation order only"
    )


def _line(what: str, path: Path, then: Any) -> str:
    return f"{what}, but {path} was trained with {then}; leave it as it was"


def _said(values: Mapping[str, Any], name: str) -> Any:
    return values.get(name, "none of this name")


def _wrapped(env: Any) -> tuple[dict[str, float], str]:
    """Returns the weights of an environment's reward terms by name, and the names of its classes, wrappers first."""
    weights, classes = {}, []
    while isinstance(env, Wrapper):
        weights |= env.weights if isinstance(env, RewardTermsWrapper) else {}
        classes.append(type(env).__name__)
        env = env._env
    return weights, " of ".join([*classes, type(env).__name__])


def _made(env: Any) -> str | None:
    """Describes the id and arguments that :func:`lockstep.jax.make` made an environment of; None if it didn't."""
    found = made_of(innermost(env))
    if found is None:
        return None
    env_id, kwargs = found
    given = ", ".join(f"{name} {value}" for name, value in sorted(_parameters(kwargs).items()))
    return f"{env_id} with {given}" if given else env_id


def _parameters(params: Any) -> dict[str, str]:
    """Returns an environment's parameters by path: a number or text in words, an array as a digest of its bytes."""
    if dataclasses.is_dataclass(params) and not isinstance(params, type):  # fields that are no leaves count too
        params = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): _in_words(leaf) for path, leaf in leaves}
    return {name or "the parameters": said for name, said in named.items() if said is not None}


def _all_parameters(params: Any) -> dict[str, str]:
    """Returns an environment's parameters as :func:`_parameters` does, and those that are no leaves, at any depth."""
    if params is None:
        return {}
    return _parameters(params) | {name or "the parameters": said for name, said in _parts(params)}


def _parts(value: Any, path: tuple[str, ...] = (), above: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields path and description of all data in a value; ``above`` are the ids of the objects that contain it."""
    said = "None" if value is None else _in_words(value)
    if said is None and isinstance(value, enum.Enum):
        said = f"{type(value).__name__}.{value.name}"
    if said is not None:
        yield "/".join(path), said
    elif id(value) not in above:
        for name, part in _inside(value).items():
            yield from _parts(part, (*path, str(name)), (*above, id(value)))


def _inside(value: Any) -> Mapping[Any, Any]:
    """Returns an object's items, fields or public attributes by name; none of code and of arrays."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    code = isinstance(value, type | functools.partial) or inspect.ismodule(value) or inspect.isroutine(value)
    if code or hasattr(value, "dtype"):
        return {}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {name: part for name, part in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def _in_words(leaf: Any) -> str | None:
    """Describes a parameter, alike for a number and an array of one; None for what is neither data nor text."""
    if isinstance(leaf, str):
        return repr(leaf)
    if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
        return None
    data = gathered(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if data.dtype.kind in "OUSMm":
        return None
    array = data.astype(jax.dtypes.canonicalize_dtype(data.dtype))
    if array.shape:
        return f"{array.dtype.name}{list(array.shape)} {array_digest(array).hex()}"
    return str(array[()])
