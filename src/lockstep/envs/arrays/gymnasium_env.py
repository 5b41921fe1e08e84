"""Adapts one array environment to ``gymnasium.Env``, so that any library can use it."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium
import numpy as np

from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.arrays.base import State, render_modes
from lockstep.envs.arrays.pictures.window import Window


class Draws(Protocol):
    """Random numbers of one episode, uniform in [0, 1), float32 ``[1, count]``."""

    def of_reset(self, count: int) -> np.ndarray:
        """Returns the numbers of the reset."""
        ...

    def of_step(self, elapsed: int, count: int) -> np.ndarray:
        """Returns the numbers of the step after ``elapsed`` steps."""
        ...


class ArrayGymnasiumEnv(gymnasium.Env):
    """Runs an array environment on NumPy with ``n = 1``; random numbers come from Gymnasium's ``np_random``.

    :meth:`draw_from` sets another source of random numbers.

    Args:
        array_environment: key of ``ARRAY_ENVIRONMENTS``.
        render_mode: None, ``"rgb_array"``, ``"human"`` (a window) or, if it has a picture as text, ``"ansi"``.
        kwargs: arguments of the array environment.

    Raises:
        ValueError: ``array_environment`` or ``render_mode`` is unknown.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "human", "ansi"]}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(self, array_environment: str, render_mode: str | None = None, **kwargs: Any) -> None:
        if array_environment not in ARRAY_ENVIRONMENTS:
            known = ", ".join(ARRAY_ENVIRONMENTS)
            raise ValueError(f"array_environment: {array_environment!r} is none of ours; there are {known}")
        kind = ARRAY_ENVIRONMENTS[array_environment]
        modes = render_modes(kind)
        if render_mode not in (None, *modes):
            raise ValueError(f"render_mode: {render_mode!r} isn't offered; use {', '.join(map(repr, modes))} or None")
        self.array_environment = kind(**kwargs)
        self.metadata = {"render_modes": modes, "render_fps": self.array_environment.render_fps}
        self.observation_space = self.array_environment.observation_space
        self.action_space = self.array_environment.action_space
        self.render_mode = render_mode
        self._state: State | None = None
        self._draws: Draws | None = None
        self._elapsed = 0
        self._window = Window(array_environment, self.array_environment.render_fps)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; returns an observation of ``observation_space`` and an empty info."""
        super().reset(seed=seed, options=options)
        count, self._elapsed = self.array_environment.reset_draws, 0
        random = self._random(count) if self._draws is None else self._draws.of_reset(count)
        self._state, observation = self.array_environment.reset(np, random)
        self._show()
        return observation[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes one step; ``info`` has ``is_success`` and ``score`` if the environment defines them.

        The physics decides what a continuous action beyond its bounds does (Pendulum clips it). The registered time
        limit is around this environment.

        Raises:
            ValueError: a discrete action doesn't exist.
        """
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Discrete) and not space.contains(action):
            raise ValueError(f"action: {action!r} isn't one of the {space.n} actions {space}")
        count = self.array_environment.step_draws
        random = self._random(count) if self._draws is None else self._draws.of_step(self._elapsed, count)
        self._state, observation, reward, terminated = self.array_environment.step(
            np, self._started(), np.asarray(action)[None], random
        )
        self._elapsed += 1
        facts = (getattr(self.array_environment, name)(np, self._state) for name in ("success", "truncated", "score"))
        success, truncated, score = (None if fact is None else fact[0] for fact in facts)
        info = {} if success is None else {"is_success": bool(success)}
        info |= {} if score is None else {"score": int(score)}
        self._show()
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated), info

    def render(self) -> np.ndarray | str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the picture, uint8 ``[height, width, 3]``, or a text; None in a window or without a render mode."""
        if self.render_mode == "ansi":
            return self.array_environment.text(self._started())
        return self.array_environment.render(self._started()) if self.render_mode == "rgb_array" else None

    def _show(self) -> None:
        if self.render_mode == "human":
            self._window.show(self.array_environment.render(self._started()))

    def close(self) -> None:
        """Closes what rendering opened."""
        self._window.close()
        self.array_environment.close()

    def draw_from(self, draws: Draws) -> None:
        """Takes all random numbers from ``draws`` from here on, whatever the seed."""
        self._draws = draws

    def _random(self, count: int) -> np.ndarray:
        return self.np_random.random((1, count), dtype=np.float32)

    def _started(self) -> State:
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset() before step() or render()")
        return self._state
