"""Applies Gymnasium's own checker to an environment, and compares its observations with its space.

A run needs fewer rules than the checker has: what only the checker dislikes is a note.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from lockstep.config.run import EnvConfig
from lockstep.core.spaces import MASK
from lockstep.envs.finding import Finding
from lockstep.envs.gymnasium.keyed import close_environment, wrong_number
from lockstep.envs.gymnasium.make import bare_environment, wrapped
from lockstep.envs.gymnasium.watched import outside, own_statistics

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_AROUND = (gymnasium.wrappers.TimeLimit, gymnasium.wrappers.OrderEnforcing, gymnasium.wrappers.PassiveEnvChecker)
_OF_WRAPPERS = "is different from the unwrapped version"
"""Part of the checker's warning that it was given a wrapper."""


def by_gymnasium(config: EnvConfig, steps: int, seed: int) -> Iterator[Finding]:
    """Applies Gymnasium's own checker, then compares every observation of random actions with the space."""
    env = bare_environment(config)
    try:
        complaint, texts = _checked(env)
        env = wrapped(config, env)
        if complaint is not None:
            said = (wrong_number(env, where, complaint) for where in ("reset", "step"))
            if text := next((text for text in said if text), None):
                yield Finding("problem", text)
                yield from _masks(env, config, seed)
                return
            masked = config.action_mask is not None
            says = "Gymnasium's checker takes forbidden actions too, and met" if masked else "Gymnasium's checker"
            yield Finding("note", f"{says}: {_line(complaint)}")
        yield from _masks(env, config, seed)
        for text in texts:
            yield Finding("note", f"Gymnasium's checker: {text.removeprefix('WARN: ')}")
        if not texts and complaint is None:
            yield Finding("ok", "Gymnasium's checker has nothing to say")
        if (said_of := own_statistics(env)) is not None:
            yield Finding("note", said_of)
        if config.action_mask is None and (inside := _inside(env, steps, seed)) is not None:
            yield inside
    finally:
        close_environment(env, config.id)


class _PlainBools(gymnasium.Wrapper):
    """Turns NumPy's bools, which Gymnasium allows, into Python's, because its checker takes a NumPy False for True."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.reset = env.reset  # the checker looks at its arguments

    @property
    def spec(self) -> EnvSpec | None:
        """The spec of the innermost environment, by which the checker can make it again, unlike a user's wrapper."""
        return self.unwrapped.spec

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """See ``gymnasium.Env.step``."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        terminated, truncated = (bool(x) if isinstance(x, np.bool_) else x for x in (terminated, truncated))
        return observation, reward, terminated, truncated, info


def _checked(env: gymnasium.Env) -> tuple[Exception | None, list[str]]:
    """Returns what Gymnasium's checker raises for an environment as its user made it, and what it warns of."""
    while isinstance(env, gymnasium.Wrapper) and type(env) in _AROUND:
        env = env.env
    complaint = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_env(_PlainBools(env), skip_render_check=True)
        except Exception as error:
            complaint = error
    texts = dict.fromkeys(_COLOURS.sub("", " ".join(str(one.message).split())) for one in said)
    return complaint, [text for text in texts if _OF_WRAPPERS not in text]


def _masks(env: gymnasium.Env, config: EnvConfig, seed: int) -> Iterator[Finding]:
    """Yields a note if an environment says which actions are allowed and the config doesn't use that."""
    with contextlib.suppress(Exception):
        _, info = env.reset(seed=seed)
        source = "method" if env.has_wrapper_attr("action_masks") else "info" if MASK in info else None
        if source is not None and config.action_mask is None:
            where = "action_masks()" if source == "method" else f"info[{MASK!r}]"
            text = f"{where} says which actions are allowed: --env.action-mask {source} has the policy take no other"
            yield Finding("note", text)


def _inside(env: gymnasium.Env, steps: int, seed: int) -> Finding | None:
    """Compares observations with the space; returns None if the environment raises, because a run reports that."""
    with contextlib.suppress(Exception):
        return _compared(env, steps, seed)
    return None


def _compared(env: gymnasium.Env, steps: int, seed: int) -> Finding:
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for step in range(steps):
        if not env.observation_space.contains(observation) and (said := outside(env.observation_space, observation)):
            return Finding("note", f"in step {step} of random actions {said}")
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            observation, _ = env.reset()
    return Finding("ok", f"{steps:,} observations lie in the space")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
