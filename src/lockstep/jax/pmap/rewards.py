"""Converts rewards written as objects with a weight, as in task libraries, into named reward terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.jax.reward_terms import Terms, Transition


@dataclass(frozen=True)
class Reward:
    """One term of the reward; a subclass computes it from one environment's step.

    Attributes:
        weight: factor of the term.
    """

    weight: float = 1.0

    def get_reward(self, transition: Transition) -> Any:
        """Returns the term as a number, from a :class:`~lockstep.jax.reward_terms.Transition`."""
        raise ValueError(f"{type(self).__name__} has no get_reward(transition)")


def terms_of(rewards: Any) -> Terms:
    """Returns weights and functions by name, from what ``get_rewards`` returned.

    That is a mapping of names to rewards or to ``(weight, function)``, or a list of rewards. A reward is a function, or
    an object with ``get_reward``. Its weight is its ``weight`` or ``scale``, else 1. Its name is its ``name``, else
    that of its function or class (``HeightReward``: ``height``).

    Raises:
        ValueError: it is neither, a reward has no function, or two have one name; one line.
    """
    if isinstance(rewards, Mapping):
        return {name: _term(name, reward) for name, reward in rewards.items()}
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ValueError(
            f"get_rewards: {type(rewards).__name__} was returned; return a list of rewards, or a dict of them by name"
        )
    out: dict[str, tuple[float, Callable[[Transition], Any]]] = {}
    for reward in rewards:
        name = _name(reward)
        if name in out:
            raise ValueError(f"get_rewards: two rewards are named {name!r}; give them names, in a dict")
        out[name] = _term(name, reward)
    return out


def _term(name: str, reward: Any) -> tuple[float, Callable[[Transition], Any]]:
    if isinstance(reward, tuple):
        return reward  # checked with the other terms
    function = getattr(reward, "get_reward", reward)
    if not callable(function):
        raise ValueError(
            f"get_rewards: {name!r} is {reward!r}; give an object with get_reward(transition) or a function"
        )
    return getattr(reward, "weight", getattr(reward, "scale", 1.0)), function  # checked with the other terms


def _name(reward: Any) -> str:
    given = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    if isinstance(given, str):
        return given
    words = type(reward).__name__.removesuffix("Reward") or "Reward"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
