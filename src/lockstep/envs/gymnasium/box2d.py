"""Starts each episode of Gymnasium's BipedalWalker in a new world.

The environment itself reuses the world of its last episode, whose bodies are gone but whose solver isn't new. The same
seed and actions then give results that depend on earlier episodes, and a resumed run has had none in its process.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium

BIPEDAL_WALKER = "gymnasium.envs.box2d.bipedal_walker"


def begin_in_new_worlds(env: gymnasium.Env) -> None:
    """Makes a BipedalWalker create a new world at every reset, in place; leaves other environments as they are."""
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
