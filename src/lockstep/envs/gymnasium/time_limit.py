"""Removes wrappers of ``gymnasium.make`` whose work our own stepper does."""

from __future__ import annotations

import gymnasium
from gymnasium.wrappers import OrderEnforcing, TimeLimit


def without_time_limit(env: gymnasium.Env) -> tuple[gymnasium.Env, int | None]:
    """Returns the environment inside the outermost ``TimeLimit`` and ``OrderEnforcing``, and the limit in steps.

    The caller must reset before stepping, and count: the ``limit``-th step after a reset truncates the episode, even if
    it also terminates. Wrappers of any other class, including subclasses of these two, stay. So do wrappers whose
    ``step`` or ``reset`` was replaced, and everything inside the first one that stays.
    """
    limits: list[int] = []
    while type(env) in (TimeLimit, OrderEnforcing) and not {"step", "reset"} & vars(env).keys():
        assert isinstance(env, gymnasium.Wrapper)
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return env, min(limits, default=None)
