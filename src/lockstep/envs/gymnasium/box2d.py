"""Lets each episode of Gymnasium's BipedalWalker begin in a world of its own.

It resets into the world of its last episode, whose bodies are gone but whose solver isn't new: what the same seed and
actions give depends on the episodes before then, and a run that resumes has had none in its process.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium

BIPEDAL_WALKER = "gymnasium.envs.box2d.bipedal_walker"


def begin_in_new_worlds(env: gymnasium.Env) -> None:
    """Makes a BipedalWalker forget its earlier episodes at every reset, in place; others stay as they are."""
    walker: Any = env.unwrapped
    if type(walker).__module__ != BIPEDAL_WALKER:
        return
    reset = walker.reset

    @functools.wraps(reset)
    def in_a_new_world(**options: Any) -> Any:
        walker._destroy()
        walker.world = type(walker.world)()
        return reset(**options)

    walker.reset = in_a_new_world
