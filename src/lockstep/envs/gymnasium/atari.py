"""Wraps Atari games: standard preprocessing, lives, and resets that don't load the game again.

Observations, rewards and ends are those of Gymnasium's ``AtariPreprocessing`` around ale-py's own environment.
"""

from __future__ import annotations

import struct
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from lockstep.envs.gymnasium.step_info import number

LIFE_LOST = "lockstep/life_lost"
"""Key of ``info`` if a life was lost and the game goes on; True if that terminates an episode for the learner."""

UNSEEN_PICTURES = {"obs_type": "ram"}
"""Arguments by which ale-py makes no picture of its own per frame, which :class:`AtariScreens` would ignore."""

FRAMES_PER_SECOND = 60
"""Of a game."""
_HEADER = 24
"""Bytes of a serialized state before the length of what follows."""


class AtariScreens(wrappers.AtariPreprocessing):
    """Gymnasium's preprocessing for an environment with any observation space (:data:`UNSEEN_PICTURES`).

    Its ``render_fps`` counts the frames of a step, because a picture is taken every step; ALE declares 30 for any skip.
    """

    def __init__(self, env: gymnasium.Env, **settings: Any) -> None:
        super().__init__(env, **settings)
        self.metadata = {**env.metadata, "render_fps": max(1, round(FRAMES_PER_SECOND / self.frame_skip))}
        screen = self.ale.getScreenDims() + (() if self.grayscale_obs else (3,))
        self.obs_buffer = [np.empty(screen, np.uint8) for _ in range(2)]


class AtariLives(gymnasium.Wrapper):
    """Presses FIRE when a game waits for it and reports lost lives; the game itself goes on.

    Args:
        env: an ALE game, preprocessed.
        fire: whether to press FIRE after a reset and after a lost life, in games that have it.
        life_loss: whether a lost life is reported as an end (:data:`LIFE_LOST`).
    """

    def __init__(self, env: gymnasium.Env, fire: bool, life_loss: bool) -> None:
        super().__init__(env)
        meanings = list(env.get_wrapper_attr("get_action_meanings")())
        self._fire = 1 if fire and len(meanings) > 1 and meanings[1] == "FIRE" else None
        self._life_loss = life_loss
        self._lives = 0

    def _count(self) -> int:
        return int(self.get_wrapper_attr("ale").lives())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        observation, info = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            observation, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        self._lives = self._count()
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        total, lives = number(reward), self._count()
        lost, self._lives = 0 < lives < self._lives, lives
        if lost and not (terminated or truncated):
            if self._fire is not None:
                observation, reward, terminated, truncated, info = self.env.step(self._fire)
                total, self._lives = total + number(reward), self._count()
            info = {**info, LIFE_LOST: self._life_loss}
        return observation, total, terminated, truncated, info


def reload_quickly(env: Any) -> None:
    """Makes ale-py's environment restore a saved state at each seeded reset, instead of loading its game again.

    It changes nothing if the state can't be seeded or restored: in a few games, or in another version's format.
    """
    load = SeededLoad(env.ale)
    if load.possible:
        env.load_game = load


class SeededLoad:
    """Puts an emulator into the state that loading its game with its seed gives; replaces ``AtariEnv.load_game``.

    Loading is slow, because it makes tables of colours. A seed changes only the generator of sticky actions, a Mersenne
    twister (``stella_environment.cpp`` of ale-py). So the state just after loading is kept, and restored with the
    twister of the seed.

    Attributes:
        possible: whether the state has the expected format and can be restored.
    """

    def __init__(self, ale: Any) -> None:
        self._ale = ale
        state = ale.cloneSystemState()
        content, twister = state.__getstate__(), _twister(ale.getInt("random_seed"))
        before, _, self._end = content.partition(twister)
        self._header, self._system = before[:_HEADER], before[_HEADER + 4 : -4]
        self._kind: Any = type(state)
        self.possible = bool(self._end) and self._content(twister) == content and self._comes_back(state)

    def _comes_back(self, state: Any) -> bool:
        self._ale.restoreSystemState(state)
        return self._ale.cloneSystemState().__getstate__() == state.__getstate__()

    def _content(self, twister: bytes) -> bytes:
        inner = self._system + struct.pack("<i", len(twister)) + twister
        return self._header + struct.pack("<i", len(inner)) + inner + self._end

    def __call__(self) -> None:
        """Restores the beginning of the game, with the generator of the emulator's seed."""
        state = self._kind.__new__(self._kind)
        state.__setstate__(self._content(_twister(self._ale.getInt("random_seed"))))
        self._ale.restoreSystemState(state)


def _twister(seed: int) -> bytes:
    """Returns a seeded Mersenne twister in the text format of C++."""
    state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)["state"]
    return " ".join(map(str, (*state["key"].tolist(), state["pos"]))).encode()
