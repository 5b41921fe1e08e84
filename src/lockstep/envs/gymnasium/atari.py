"""What an Atari game is wrapped in: standard preprocessing, lives, and loads of the game that take no time.

Observations, rewards and ends are those of Gymnasium's ``AtariPreprocessing`` around ale-py's own environment.
"""

from __future__ import annotations

import struct
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from lockstep.envs.gymnasium.stated import number

LIFE_LOST = "lockstep/life_lost"
"""Entry of ``info``: a life was lost and the game goes on; for the learner that terminates an episode."""

UNSEEN_PICTURES = {"obs_type": "ram"}
"""Argument of ale-py's environment, whose own pictures :class:`AtariScreens` doesn't look at: one for every frame."""

_HEADER = 24
"""Bytes of a serialized state before the length of what follows."""


class AtariScreens(wrappers.AtariPreprocessing):
    """Gymnasium's preprocessing, of an environment that may observe anything (:data:`UNSEEN_PICTURES`)."""

    def __init__(self, env: gymnasium.Env, **settings: Any) -> None:
        super().__init__(env, **settings)
        screen = self.ale.getScreenDims() + (() if self.grayscale_obs else (3,))
        self.obs_buffer = [np.empty(screen, np.uint8) for _ in range(2)]


class AtariLives(gymnasium.Wrapper):
    """Presses FIRE where a game waits for it, and says when a life is lost; the game itself goes on.

    With ``fire`` it is pressed at a reset and after a lost life, in games that have it; ``life_loss`` reports lost
    lives in ``info``.
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
    """Has ale-py's environment, which loads its game anew at each seeded reset, put back a state of it instead.

    Nothing is changed where that state can't be seeded or put back: a few games, or another version's format.
    """
    load = SeededLoad(env.ale)
    if load.possible:
        env.load_game = load


class SeededLoad:
    """Puts an emulator where loading its game with its seed would put it; stands in for ``AtariEnv.load_game``.

    Loading makes tables of colours for as long as dozens of steps take. All that a seed changes is the generator of
    sticky actions, a Mersenne twister (``stella_environment.cpp`` of ale-py). So what the emulator is in when it has
    just been loaded is kept, and put back with the twister of the seed.

    Attributes:
        possible: whether the state is as expected, and putting it back leads to it.
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
        """Puts the game back where it begins, with the generator of the emulator's seed."""
        state = self._kind.__new__(self._kind)
        state.__setstate__(self._content(_twister(self._ale.getInt("random_seed"))))
        self._ale.restoreSystemState(state)


def _twister(seed: int) -> bytes:
    """Returns a seeded Mersenne twister as C++ writes it down."""
    state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)["state"]
    return " ".join(map(str, (*state["key"].tolist(), state["pos"]))).encode()
