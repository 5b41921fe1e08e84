"""Plays without training, to compare trained policies with: at random, and Snake greedily."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lockstep.config.run import Config
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.envs.arrays.players.snake import greedy_actions
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements

BASELINES = ("random", "greedy")
SNAKE = "lockstep/Snake-v0"


class Actor(Protocol):
    """Plays whole episodes: a trained policy (:class:`lockstep.policies.policy.Policy`) or a baseline.

    ``global_step`` counts the environment steps that it was trained for.
    """

    config: Config
    observation: ObservationLayout
    action: ActionLayout
    global_step: int

    def reset(self, seed: int | None = None) -> None:
        """Begin episodes; with a seed draw noise anew."""
        ...

    def forget(self, rows: np.ndarray) -> None:
        """Forget what was seen in some of the rows of the last batch, bool ``[rows]``."""
        ...

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Rows of actions for observation rows ``[rows, width]``."""
        ...


class Baseline:
    """A policy without parameters; see :class:`Actor`.

    Args:
        name: ``random`` (uniform over the choices or within the bounds, of those that are allowed) or ``greedy`` (for
            Snake: the way to the food, as far as it doesn't run into anything at once).
        config: names the environment.

    Raises:
        ValueError: there is no such baseline for this environment; one line.
    """

    global_step = 0

    def __init__(self, name: str, config: Config) -> None:
        if name not in BASELINES:
            raise ValueError(f"policy: {name!r} is no baseline; there are {', '.join(BASELINES)}")
        if name == "greedy" and config.env.id != SNAKE:
            raise ValueError(f"policy: greedy is for {SNAKE} alone, not {config.env.id}; use random")
        self.name, self.config = name, config
        self.description: EnvDescription = describe(config.env, trains=False)
        self.observation, self.action = self.description.observation, self.description.action
        self.reset(config.seed)

    def reset(self, seed: int | None = None) -> None:
        """See :meth:`Actor.reset`."""
        if seed is not None:
            self._noise = keyed_generator(seed, "baseline")
            self._replacing = keyed_generator(seed, "baseline/allowed")

    def forget(self, rows: np.ndarray) -> None:
        """See :meth:`Actor.forget`: there is nothing to forget."""

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """See :meth:`Actor.native`; chance is part of it in any case."""
        if self.name == "greedy":
            leaf = self.observation.leaves[0]
            images = observations[:, leaf.start : leaf.start + leaf.size].reshape(-1, *leaf.shape)
            return greedy_actions(images[..., -3:], self._noise)
        drawn = draw_actions(self._noise, self.action, (len(observations),))
        replacements = draw_replacements(self._replacing, self.action, (len(observations),))
        return allowed_actions(self.observation, self.action, observations, drawn, replacements)
