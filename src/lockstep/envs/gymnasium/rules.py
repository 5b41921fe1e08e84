"""Applies Gymnasium's own checker to an environment, and compares its observations with its space.

A run needs fewer rules than the checker has: what only the checker dislikes is a note.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from lockstep.config.run import EnvConfig
from lockstep.core.errors import one_line
from lockstep.core.spaces import MASK
from lockstep.envs.finding import Finding
from lockstep.envs.gymnasium.in_process import MAKE_SECONDS, Watchdog
from lockstep.envs.gymnasium.keyed import close_environment, wrong_number
from lockstep.envs.gymnasium.make import bare_environment, wrapped
from lockstep.envs.gymnasium.watched import outside, own_statistics

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_AROUND = (gymnasium.wrappers.TimeLimit, gymnasium.wrappers.OrderEnforcing, gymnasium.wrappers.PassiveEnvChecker)
RAISED = (Exception, SystemExit)
"""What an environment may raise; its exit must not end the command as if it had succeeded."""
_OF_WRAPPERS = "is different from the unwrapped version"
"""Part of the checker's warning that it was given a wrapper."""


def by_gymnasium(config: EnvConfig, steps: int, seed: int, fail: Callable[[str], None]) -> Iterator[Finding]:
    """Applies Gymnasium's own checker, then compares every observation of random actions with the space.

    ``fail`` is called with a message if the environment hangs, and ends the process.
    """
    env, beats = bare_environment(config), _Beats()
    try:
        with _in_time(config, max(config.timeout, MAKE_SECONDS), beats, fail):  # the checker makes another one
            complaint, texts = _checked(env, beats)
        env = wrapped(config, env)
        with _in_time(config, config.timeout, beats, fail):
            masks = list(_masks(env, config, seed))
        if complaint is not None:
            said = (wrong_number(env, where, complaint) for where in ("reset", "step"))
            if text := next((text for text in said if text), None):
                yield Finding("problem", text)
                yield from masks
                return
            masked = config.action_mask is not None
            says = "Gymnasium's checker takes forbidden actions too, and met" if masked else "Gymnasium's checker"
            yield Finding("note", f"{says}: {_line(complaint)}")
        yield from masks
        for text in texts:
            yield Finding("note", f"Gymnasium's checker: {text.removeprefix('WARN: ')}")
        if not texts and complaint is None:
            yield Finding("ok", "Gymnasium's checker has nothing to say")
        if (said_of := own_statistics(env)) is not None:
            yield Finding("note", said_of)
        if config.action_mask is None:
            with _in_time(config, config.timeout, beats, fail):
                inside = _inside(env, steps, seed, beats)
            if inside is not None:
                yield inside
    finally:
        close_environment(env, config.id)


class _Beats:
    """Counts steps and resets, so that whoever waits sees that the environment makes progress."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``call``, counted; its arguments can still be looked at."""

        @functools.wraps(call)
        def counting(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return call(*arguments, **options)

        return counting


@contextlib.contextmanager
def _in_time(config: EnvConfig, limit: float, beats: _Beats, fail: Callable[[str], None]) -> Iterator[None]:
    """Has ``fail`` called if a call of the environment in the block takes longer than ``limit`` seconds."""
    setting = " (env.timeout)" if limit == config.timeout else ""
    message = f"{config.id} didn't answer within {limit:g} s{setting}"
    watchdog = Watchdog(limit, lambda: beats.count, lambda: message, fail)
    try:
        with watchdog:
            yield
    finally:
        watchdog.close()


class _PlainBools(gymnasium.Wrapper):
    """Turns NumPy's bools, which Gymnasium allows, into Python's, because its checker takes a NumPy False for True."""

    def __init__(self, env: gymnasium.Env, beats: _Beats) -> None:
        super().__init__(env)
        self.reset, self._step = beats.counted(env.reset), beats.counted(env.step)

    @property
    def spec(self) -> EnvSpec | None:
        """The spec of the innermost environment, by which the checker can make it again, unlike a user's wrapper."""
        return self.unwrapped.spec

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """See ``gymnasium.Env.step``."""
        observation, reward, terminated, truncated, info = self._step(action)
        terminated, truncated = (bool(x) if isinstance(x, np.bool_) else x for x in (terminated, truncated))
        return observation, reward, terminated, truncated, info


def _checked(env: gymnasium.Env, beats: _Beats) -> tuple[BaseException | None, list[str]]:
    """Returns what Gymnasium's checker raises for an environment as its user made it, and what it warns of."""
    while isinstance(env, gymnasium.Wrapper) and type(env) in _AROUND:
        env = env.env
    complaint = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_env(_PlainBools(env, beats), skip_render_check=True)
        except RAISED as error:
            complaint = error
    texts = dict.fromkeys(_COLOURS.sub("", one_line(one.message)) for one in said)
    return complaint, [text for text in texts if _OF_WRAPPERS not in text]


def _masks(env: gymnasium.Env, config: EnvConfig, seed: int) -> Iterator[Finding]:
    """Yields a note if an environment says which actions are allowed and the config doesn't use that."""
    with contextlib.suppress(*RAISED):
        _, info = env.reset(seed=seed)
        source = "method" if env.has_wrapper_attr("action_masks") else "info" if MASK in info else None
        if source is not None and config.action_mask is None:
            where = "action_masks()" if source == "method" else f"info[{MASK!r}]"
            text = f"{where} says which actions are allowed: --env.action-mask {source} has the policy take no other"
            yield Finding("note", text)


def _inside(env: gymnasium.Env, steps: int, seed: int, beats: _Beats) -> Finding | None:
    """Compares observations with the space; returns None if the environment raises, because a run reports that."""
    with contextlib.suppress(*RAISED):
        return _compared(env, steps, seed, beats)
    return None


def _compared(env: gymnasium.Env, steps: int, seed: int, beats: _Beats) -> Finding:
    env.action_space.seed(seed)
    reset, take = beats.counted(env.reset), beats.counted(env.step)
    observation, _ = reset(seed=seed)
    for step in range(steps):
        if not env.observation_space.contains(observation) and (said := outside(env.observation_space, observation)):
            return Finding("note", f"in step {step} of random actions {said}")
        observation, _, terminated, truncated, _ = take(env.action_space.sample())
        if terminated or truncated:
            observation, _ = reset()
    return Finding("ok", f"{steps:,} observations lie in the space")


def _line(error: BaseException) -> str:
    text = one_line(error)
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
