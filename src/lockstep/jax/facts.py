"""What a training must share with one that it goes on from: settings, reward terms, the environment's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lockstep.core.fingerprint import array_digest
from lockstep.jax.config import in_users_names
from lockstep.jax.reward_terms import RewardTermsWrapper
from lockstep.jax.wrappers.single import Wrapper
from lockstep.jax_engine.distributed.placement import gathered
from lockstep.jax_engine.shards.keys import is_key

if TYPE_CHECKING:
    from lockstep.jax.training import Training

TERMS, PARAMS, CLASSES = "reward_terms", "env_params", "env_classes"
"""Facts that older checkpoints don't have."""


def facts_of(training: Training) -> dict[str, Any]:
    """Gives the settings of a training by dotted name, and what else makes it that training.

    These are the weights of reward terms and ``env_params``, by name, and the class of the environment in its wrappers.
    How long it is isn't among them, unless the learning rate falls until then.
    """
    config = training.config
    out = _flat(config.model_dump(mode="json"))
    if config.ppo.schedule == "constant":
        out.pop("total_steps")
    weights, classes = _wrapped(training.env)
    return {TERMS: weights, PARAMS: _parameters(training.env_params), CLASSES: classes} | out


def check_facts(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> None:
    """Compares facts with those of a checkpoint, which may lack what checkpoints hadn't always.

    A parameter that only one of the two has is of an environment whose code was edited, and passes.

    Raises:
        ValueError: one differs; one line in the user's names.
    """
    for name, value in mine.items():
        if name in (TERMS, PARAMS):
            then = theirs.get(name)
            if not isinstance(then, Mapping):
                continue
            for part in [*value, *then] if name == TERMS else [part for part in value if part in then]:
                if value.get(part) != then.get(part):
                    raise ValueError(_line(f"{name}: {part}: {_said(value, part)}", path, _said(then, part)))
        elif name == CLASSES:
            if theirs.get(name, value) != value:
                raise ValueError(_line(f"env: {value}", path, theirs[name]))
        elif theirs.get(name) != value:
            raise ValueError(in_users_names(_line(f"{name}: {value}", path, theirs.get(name))))


def _line(what: str, path: Path, then: Any) -> str:
    return f"{what}, but {path} was trained with {then}; leave it as it was"


def _said(values: Mapping[str, Any], name: str) -> Any:
    return values.get(name, "none of this name")


def _wrapped(env: Any) -> tuple[dict[str, float], str]:
    """Gives the weights of an environment's reward terms by name, and its class in those of its wrappers."""
    weights, classes = {}, []
    while isinstance(env, Wrapper):
        weights |= env.weights if isinstance(env, RewardTermsWrapper) else {}
        classes.append(type(env).__name__)
        env = env._env
    return weights, " of ".join([*classes, type(env).__name__])


def _parameters(params: Any) -> dict[str, str]:
    """Gives an environment's parameters by path: a number or text in words, an array by a digest of its bytes."""
    if dataclasses.is_dataclass(params) and not isinstance(params, type):  # with the fields that are no leaves
        params = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): _in_words(leaf) for path, leaf in leaves}
    return {name or "the parameters": said for name, said in named.items() if said is not None}


def _in_words(leaf: Any) -> str | None:
    """Says what a parameter is, the same for a number and an array of one; None for what is neither data nor text."""
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


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out
