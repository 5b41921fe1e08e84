"""Policies without training, to compare trained ones with: random actions, and a greedy player of Snake."""

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

    ``global_step`` is the number of environment steps that it was trained for.
    """

    config: Config
    observation: ObservationLayout
    action: ActionLayout
    global_step: int

    def reset(self, seed: int | None = None) -> None:
        """Begins episodes; with a seed restarts the noise."""
        ...

    def forget(self, rows: np.ndarray) -> None:
        """Clears the state of some rows of the last batch, bool ``[rows]``."""
        ...

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Returns rows of actions for observation rows ``[rows, width]``."""
        ...


class Baseline:
    """A policy without parameters; see :class:`Actor`.

    Args:
        name: ``random`` (uniform over the allowed choices, or within the bounds) or ``greedy`` (for Snake: towards the
            food, unless that ends the game at once).
        config: the config that names the environment.

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
        """See :meth:`Actor.native`; actions are random even if ``deterministic``."""
        if self.name == "greedy":
            leaf = self.observation.leaves[0]
            images = observations[:, leaf.start : leaf.start + leaf.size].reshape(-1, *leaf.shape)
            return greedy_actions(images[..., -3:], self._noise)
        drawn = draw_actions(self._noise, self.action, (len(observations),))
        replacements = draw_replacements(self._replacing, self.action, (len(observations),))
        return allowed_actions(self.observation, self.action, observations, drawn, replacements)
