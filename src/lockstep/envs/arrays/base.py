"""Declares array environments: physics as two pure functions on arrays, written once for NumPy, PyTorch and JAX.

Nothing here imports an engine. Whoever calls passes the array namespace ``xp`` (``numpy``, ``array_api_compat.torch``
or ``jax.numpy``), and with it arrays of that namespace, on any device. Constants are Python numbers, which take the
dtype of the array they meet, so that float32, int32 and uint8 stay what they are on all three; no function branches on
an array, so that ``jax.jit`` can trace it. Every operation is elementwise over environments, of kinds whose bits depend
neither on how many environments there are nor on where one stands among them.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from array_api_compat import device, is_torch_array
from gymnasium.spaces import Box, Discrete

Array = Any
State = dict[str, Array]


class ArrayEnvironment(ABC):
    """A batch of ``n`` environments as pure functions; autoreset and time limits are the caller's.

    :meth:`success`, :meth:`truncated` and :meth:`score` say more of the state that a step led to.

    Attributes:
        gymnasium_id: Gymnasium's own environment of the same physics, which draws the pictures; None where there is
            none and :meth:`render` draws by itself.
        max_episode_steps: steps after which the caller truncates an episode.
        reset_draws: uniform random numbers that a reset takes per environment.
        step_draws: uniform random numbers that a step takes per environment.
        render_fps: pictures per second of simulated time.
        observation_space: of one environment: float32 of any shape, or an image, uint8 ``[height, width, 3]``
            (:func:`lockstep.core.spaces.is_image`).
    """

    gymnasium_id: ClassVar[str | None]
    max_episode_steps: ClassVar[int]
    reset_draws: int
    step_draws: ClassVar[int] = 0
    render_fps: ClassVar[int]
    observation_space: Box
    action_space: Discrete | Box

    _renderer: gymnasium.Env | None = None
    _on_devices: dict[tuple[str, Any], Array] | None = None

    @abstractmethod
    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Start an episode in every environment.

        Args:
            xp: array namespace of ``random``.
            random: float32 ``[n, reset_draws]``, uniform in [0, 1).

        Returns:
            State, arrays ``[n, …]``, and observation, ``[n, *observation_space.shape]`` of the space's dtype; they
            share no memory.
        """

    @abstractmethod
    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """One step of every environment; the inputs are left as they are.

        Args:
            xp: array namespace of the arrays.
            state: arrays ``[n, …]``.
            action: integers ``[n]`` (Discrete) or floats ``[n, *action_space.shape]`` (Box).
            random: float32 ``[n, step_draws]``, uniform in [0, 1); may be None where a step takes none.

        Returns:
            State, of the dtypes it came with; observation, ``[n, *observation_space.shape]`` of the space's dtype;
            reward, float32 ``[n]``; terminated, bool ``[n]``. They share no memory with the inputs or each other.
        """

    def success(self, xp: Any, state: State) -> Array | None:
        """Whether each environment's task is solved in ``state``, bool ``[n]``; None where there is no such notion."""
        return None

    def truncated(self, xp: Any, state: State) -> Array | None:
        """Whether an environment cuts its episode in ``state``, bool ``[n]``; None where only the time limit does."""
        return None

    def score(self, xp: Any, state: State) -> Array | None:
        """Points of the episode so far, a count ``[n]``, where a game has them beside its rewards; else None."""
        return None

    def text(self, state: State, index: int = 0) -> str | None:
        """One environment as lines of text, or None where there is no such picture; arguments as :meth:`render`."""
        return None

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Put Gymnasium's environment ``renderer``, if there is one, into the state ``row`` of one environment."""
        if self.gymnasium_id is not None:
            raise NotImplementedError(f"{type(self).__name__} has a gymnasium_id, so it needs pose(renderer, row)")

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """Draw environment ``index`` of a state ``[n, …]`` of any namespace and device: uint8 ``[height, width, 3]``.

        Raises:
            ValueError: pygame, which draws it, isn't installed.
        """
        try:
            if self._renderer is None:
                assert self.gymnasium_id is not None, "an environment of our own draws by itself"
                made = gymnasium.make(self.gymnasium_id, render_mode="rgb_array", disable_env_checker=True)
                self._renderer = made.unwrapped
            self.pose(self._renderer, {name: host_array(values[index]) for name, values in state.items()})
            return np.asarray(self._renderer.render(), dtype=np.uint8)
        except gymnasium.error.DependencyNotInstalled:
            raise ValueError(
                f"render: a picture of {self.gymnasium_id} needs pygame, which isn't installed; "
                'pip install "gymnasium[classic-control]"'
            ) from None

    def constant(self, xp: Any, name: str, like: Array) -> Array:
        """Returns an attribute that is a NumPy array as one of ``xp``, where ``like`` is.

        PyTorch's are kept: a copy to a GPU is waited for, and can't be part of a graph.
        """
        values = getattr(self, name)
        if not is_torch_array(like):
            return xp.asarray(values, device=device(like))
        if self._on_devices is None:
            self._on_devices = {}
        key = (name, like.device)
        if key not in self._on_devices:
            self._on_devices[key] = xp.asarray(values, device=like.device)
        return self._on_devices[key]

    def close(self) -> None:
        """Give back what :meth:`render` opened, if it did; it opens it again when needed."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def render_modes(kind: type[ArrayEnvironment]) -> list[str]:
    """Lists how Gymnasium can show an array environment: as text where it has one."""
    return ["rgb_array", "human"] if kind.text is ArrayEnvironment.text else ["rgb_array", "human", "ansi"]


def host_array(values: Array) -> np.ndarray:
    """An array of any namespace, on any device, as NumPy on the host."""
    return np.asarray(values.detach().cpu() if is_torch_array(values) else values)


@functools.lru_cache
def _as_arrays(dtype: np.dtype, *values: float) -> tuple[np.ndarray, ...]:
    arrays = tuple(np.array(value, dtype) for value in values)
    for array in arrays:
        array.setflags(write=False)
    return arrays


def numbers(like: Array, *values: float) -> tuple[Any, ...]:
    """Returns numbers as they are, or for NumPy as arrays ``[]`` of the floating-point dtype of ``like``.

    NumPy takes longer to find out what a Python number is than to multiply a few environments by it. The bits of
    results are the same.
    """
    return _as_arrays(like.dtype, *values) if isinstance(like, np.ndarray) else values


def side_by_side(xp: Any, columns: Sequence[Array]) -> Array:
    """Stacks columns ``[n]`` to rows ``[n, len(columns)]``.

    For NumPy in a quarter of its own ``stack``'s time, as the transpose of an array: not contiguous.
    """
    return np.array(columns).T if xp is np else xp.stack(tuple(columns), axis=-1)


def wrap_angle(xp: Any, theta: Array) -> Array:
    """The same angle in [-π, π]; one that lies there already keeps its bits, unlike through a remainder."""
    return theta - 2 * math.pi * xp.floor((theta + math.pi) / (2 * math.pi))
