"""Takes off what ``gymnasium.make`` puts around every environment, where a stepper of our own does the same."""

from __future__ import annotations

import gymnasium
from gymnasium.wrappers import OrderEnforcing, TimeLimit


def without_time_limit(env: gymnasium.Env) -> tuple[gymnasium.Env, int | None]:
    """Gives the environment inside the outermost ``TimeLimit`` and ``OrderEnforcing``, and the limit in steps.

    Whoever steps it resets it first, and counts: an episode is truncated, also one that terminates, in its
    ``limit``-th step after the reset. Wrappers of any other class, subclasses of these two included, stay, those whose
    ``step`` or ``reset`` somebody has replaced, and so does everything inside of them.
    """
    limits: list[int] = []
    while type(env) in (TimeLimit, OrderEnforcing) and not {"step", "reset"} & vars(env).keys():
        assert isinstance(env, gymnasium.Wrapper)
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return env, min(limits, default=None)
