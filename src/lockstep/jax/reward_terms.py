"""Computes rewards as weighted sums of named terms, each logged on its own as ``reward/<name>``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from lockstep.core.user_code.errors import UsersFunctionError, error_line, users_line
from lockstep.jax.wrappers.single import Wrapper
from lockstep.jax_engine.envs.functional import TERMS
from lockstep.jax_engine.envs.protocol import Tree


class Transition(NamedTuple):
    """One environment's step, as a reward term sees it.

    Attributes:
        state: state before the step.
        action: action taken.
        next_state: state after the step.
        observation: observation after the step.
        reward: the environment's own reward.
        terminated: whether the step ended the episode.
        info: the environment's own info.
    """

    state: Tree
    action: Array
    next_state: Tree
    observation: Tree
    reward: Array
    terminated: Array
    info: dict[str, Any]


Terms = Mapping[str, tuple[float, Callable[[Transition], Any]]]
"""Maps names to a weight and a function that returns a number."""


class RewardTermsWrapper(Wrapper):
    """Replaces the reward by the sum of ``weight * function(transition)`` over named terms.

    ``info["reward_terms"]`` holds the weighted terms, which add up to the reward; the engine logs their means over all
    steps.

    Args:
        env: an environment that doesn't reset by itself, because terms see the state after a step.
        terms: at least one.

    Raises:
        ValueError: the environment resets by itself, or a term's name, weight or function is invalid; one line.
    """

    def __init__(self, env: Any, terms: Terms) -> None:
        super().__init__(env)
        if self.autoreset:
            raise ValueError(
                f"reward_terms: {type(env).__name__} resets by itself, and a term must see the state that a step led "
                "to; leave AutoResetWrapper out, the engine resets"
            )
        if not isinstance(terms, Mapping):
            raise ValueError(
                f"reward_terms: a {type(terms).__name__}, but a dict is needed, of each term's name and its "
                "(weight, function)"
            )
        for name, term in terms.items():
            _check(name, term)
        self._terms = {name: (_plain(weight), function) for name, (weight, function) in terms.items()}

    @property
    def weights(self) -> dict[str, float]:
        """The terms' weights by name."""
        return {name: float(weight) for name, (weight, _) in self._terms.items()}

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`."""
        result = self._inner(key, state, action, params)
        seen = Transition(
            state, action, result.state, result.observation, result.reward, result.terminated, result.info
        )
        parts = {name: weight * _number(name, function, seen) for name, (weight, function) in self._terms.items()}
        reward = sum(parts.values(), jnp.zeros(()))
        return result._replace(reward=reward, info=result.info | {TERMS: parts}).values()


def _number(name: str, function: Callable[[Transition], Any], seen: Transition) -> Array:
    """Calls a term's function and returns its number.

    Raises:
        UsersFunctionError: it failed or returned something else than a number; one line that names the term.
    """
    try:
        value = jnp.asarray(function(seen), jnp.float32)
    except Exception as error:
        raise UsersFunctionError(f"reward_terms: {name!r}: {error_line(error)}{users_line(error)}") from error
    if value.shape:
        raise UsersFunctionError(
            f"reward_terms: {name!r} gave an array of shape {value.shape} and must give one number"
        )
    return value


def _check(name: str, term: Any) -> None:
    if not name or not isinstance(name, str) or "/" in name or any(c.isspace() for c in name):
        raise ValueError(f"reward_terms: {name!r} is no name; use letters, digits, _ and .")
    if not (isinstance(term, tuple) and len(term) == 2 and callable(term[1])):
        raise ValueError(f"reward_terms: {name!r} must be a tuple of a weight and a function of a Transition")
    weight = _plain(term[0])
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"reward_terms: the weight of {name!r} is {term[0]!r} and must be a finite number")


def _plain(weight: Any) -> Any:
    """Returns a NumPy number as a Python number, and anything else as it is."""
    return weight.item() if hasattr(weight, "item") and getattr(weight, "ndim", 0) == 0 else weight
