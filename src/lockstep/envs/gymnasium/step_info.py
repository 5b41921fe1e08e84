"""Reads what an environment states beside its observation: reward, success, score, metrics, action mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from lockstep.core.errors import one_line
from lockstep.core.spaces import MASK

SUCCESS_KEYS = ("is_success", "success")
"""Keys of ``info``, the first that is there counts: of Gymnasium-Robotics and SB3, of Meta-World and ManiSkill."""


_NUMBERS = frozenset({int, bool, np.float64, np.float32, np.int64, np.int32, np.bool_})
"""Types of most rewards that aren't plain floats."""


def number(reward: Any) -> float:
    """Returns a reward as a float, also if it is an array of one element; raises a ``TypeError`` for anything else.

    Texts are no numbers, though Python would read some.
    """
    if type(reward) in _NUMBERS:
        return float(reward)
    single = reward.item() if isinstance(reward, np.ndarray) and reward.size == 1 else reward
    try:
        if not isinstance(single, str | bytes):
            return float(single)
    except (TypeError, ValueError):
        pass
    shown = one_line(repr(reward))[:80]
    raise TypeError(f"the reward returned by step() must be a number, and is {shown}") from None


def as_array(value: Any) -> np.ndarray | None:
    """Returns a value as a NumPy array, or None if it can't be one, such as a list of lists of several lengths."""
    try:
        return np.asarray(value)
    except Exception:  # also what an object's own conversion raises
        return None


def _single(value: Any, kinds: str) -> float | None:
    """Returns a single number of one of these dtype kinds as a float; None for any other value."""
    array = as_array(value)
    return float(array.item()) if array is not None and array.size == 1 and array.dtype.kind in kinds else None


def info_success(info: Mapping[str, Any]) -> int:
    """Returns what an environment's info says of its task: 1 solved, -1 not solved, 0 nothing.

    A value that isn't a single number or bool counts as nothing.
    """
    for name in SUCCESS_KEYS if info else ():
        if name in info and (value := _single(info[name], "biuf")) is not None:
            return 1 if value > 0.5 else -1
    return 0


def info_score(info: Mapping[str, Any]) -> float:
    """Returns the points of a game so far, if an environment's info has a number ``score``; else NaN."""
    value = _single(info["score"], "iuf") if "score" in info else None
    return math.nan if value is None else value


def info_metrics(info: Mapping[str, Any]) -> dict[str, float]:
    """Returns an environment's own metrics of an episode: the finite single numbers and bools under ``"metrics"``."""
    found = info.get("metrics")
    if not isinstance(found, Mapping):
        return {}
    numbers = {str(name): _single(value, "biuf") for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def info_mask(env: gymnasium.Env, info: Mapping[str, Any], source: str) -> np.ndarray | None:
    """Returns which actions are allowed, if that isn't in the observation; masks of several indices one after another.

    The source is ``method`` (the environment's ``action_masks()``), ``info`` (of the last step or reset) or ``""``
    (None).
    """
    if not source:
        return None
    if source == "method":
        mask = env.get_wrapper_attr("action_masks")()
    elif MASK in info:
        mask = info[MASK]
    else:
        raise ValueError(f"env.action_mask is 'info', but info has no {MASK!r}; it has {sorted(info)}")
    return np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)
