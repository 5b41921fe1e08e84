"""Defines array environments: physics as two pure functions on arrays, written once for NumPy, PyTorch and JAX.

Nothing here imports an engine. The caller passes the array namespace ``xp`` (``numpy``, ``array_api_compat.torch`` or
``jax.numpy``) and arrays of that namespace, on any device. Constants are Python numbers, which take the dtype of the
array they meet, so that float32, int32 and uint8 arrays keep their dtypes on all three. No function branches on an
array, so that ``jax.jit`` can trace it. Every operation is elementwise over environments, and its bits depend neither
on the number of environments nor on an environment's place among them.
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
    """A batch of ``n`` environments as pure functions; the caller does autoresets and time limits.

    :meth:`success`, :meth:`truncated` and :meth:`score` tell more of the state after a step.

    Attributes:
        gymnasium_id: id of Gymnasium's environment with the same physics, which draws the pictures; None if there is
            none and :meth:`render` draws by itself.
        max_episode_steps: steps after which the caller truncates an episode.
        reset_draws: uniform random numbers that a reset takes per environment.
        step_draws: uniform random numbers that a step takes per environment.
        render_fps: pictures per second of simulated time.
        observation_space: space of one environment: float32 of any shape, or an image, uint8 ``[height, width, 3]``
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
        """Starts an episode in every environment.

        Args:
            xp: array namespace of ``random``.
            random: float32 ``[n, reset_draws]``, uniform in [0, 1).

        Returns:
            State, arrays ``[n, …]``, and observation, ``[n, *observation_space.shape]`` of the space's dtype; they
            share no memory.
        """

    @abstractmethod
    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Takes one step in every environment and leaves the inputs unchanged.

        Args:
            xp: array namespace of the arrays.
            state: arrays ``[n, …]``.
            action: integers ``[n]`` (Discrete) or floats ``[n, *action_space.shape]`` (Box).
            random: float32 ``[n, step_draws]``, uniform in [0, 1); may be None if a step takes none.

        Returns:
            State, with unchanged dtypes; observation, ``[n, *observation_space.shape]`` of the space's dtype; reward,
            float32 ``[n]``; terminated, bool ``[n]``. They share no memory with the inputs or each other.
        """

    def success(self, xp: Any, state: State) -> Array | None:
        """Returns whether each environment's task is solved in ``state``, bool ``[n]``; None if that isn't defined."""
        return None

    def truncated(self, xp: Any, state: State) -> Array | None:
        """Returns whether ``state`` truncates an episode, bool ``[n]``; None if only the time limit does."""
        return None

    def score(self, xp: Any, state: State) -> Array | None:
        """Returns the points of the episode so far, a count ``[n]``; None if there are none beside the rewards."""
        return None

    def text(self, state: State, index: int = 0) -> str | None:
        """Returns one environment as lines of text, or None if it has no such picture; see :meth:`render`."""
        return None

    def pose(self, renderer: Any, row: dict[str, np.ndarray]) -> None:
        """Puts Gymnasium's environment ``renderer``, if there is one, into the state ``row`` of one environment."""
        if self.gymnasium_id is not None:
            raise NotImplementedError(f"{type(self).__name__} has a gymnasium_id, so it needs pose(renderer, row)")

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """Draws environment ``index`` of a state ``[n, …]`` of any namespace and device: uint8 ``[height, width, 3]``.

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
        """Returns an attribute that is a NumPy array as an array of ``xp``, on the device of ``like``.

        PyTorch's arrays are kept, because a copy to a GPU blocks and can't be part of a graph.
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
        """Closes what :meth:`render` opened, which opens it again when needed."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def render_modes(kind: type[ArrayEnvironment]) -> list[str]:
    """Lists the render modes of an array environment; text is one of them only if it has such a picture."""
    return ["rgb_array", "human"] if kind.text is ArrayEnvironment.text else ["rgb_array", "human", "ansi"]


def host_array(values: Array) -> np.ndarray:
    """Returns an array of any namespace, on any device, as NumPy on the host."""
    return np.asarray(values.detach().cpu() if is_torch_array(values) else values)


@functools.lru_cache
def _as_arrays(dtype: np.dtype, *values: float) -> tuple[np.ndarray, ...]:
    arrays = tuple(np.array(value, dtype) for value in values)
    for array in arrays:
        array.setflags(write=False)
    return arrays


def numbers(like: Array, *values: float) -> tuple[Any, ...]:
    """Returns numbers as they are, or for NumPy as arrays ``[]`` of the floating-point dtype of ``like``.

    For a few environments NumPy takes longer to convert a Python number than to multiply by it. The bits of results are
    the same.
    """
    return _as_arrays(like.dtype, *values) if isinstance(like, np.ndarray) else values


def side_by_side(xp: Any, columns: Sequence[Array]) -> Array:
    """Stacks columns ``[n]`` into rows ``[n, len(columns)]``.

    For NumPy the rows are a transpose, which isn't contiguous, because ``stack`` is slower.
    """
    return np.array(columns).T if xp is np else xp.stack(tuple(columns), axis=-1)


def wrap_angle(xp: Any, theta: Array) -> Array:
    """Wraps an angle to [-π, π]; unlike with a remainder, an angle that lies there already keeps its bits."""
    return theta - 2 * math.pi * xp.floor((theta + math.pi) / (2 * math.pi))
