"""Actions as the rest of the program sees them: one row each, which is converted to what the environment takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from lockstep.core.errors import one_line
from lockstep.core.spaces.kinds import choices_of

SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, MultiBinary and floating-point Box"


@dataclass(frozen=True)
class ActionLayout:
    """Describes the actions of a space.

    Attributes:
        kind: ``discrete`` (one index), ``multi_discrete`` (several indices; MultiBinary is one of these), or
            ``continuous``.
        choices: number of values of each index; ``first`` are their lowest values.
        shape: shape of a multi-discrete or continuous action.
        low: lower bounds of a continuous action, flat; ``high`` are the upper ones.
        dtype: dtype that the environment takes.
    """

    kind: Literal["discrete", "multi_discrete", "continuous"]
    choices: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dtype: str = "int64"

    @property
    def discrete(self) -> bool:
        """Whether actions are indices."""
        return self.kind != "continuous"

    @property
    def outputs(self) -> int:
        """Number of logits of all choices, or of components of a continuous action."""
        return sum(self.choices) if self.discrete else len(self.low)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one action in a buffer: ``()``, ``[indices]`` or ``[components]``."""
        return {"discrete": (), "multi_discrete": (len(self.choices),), "continuous": (len(self.low),)}[self.kind]

    @property
    def row_dtype(self) -> type:
        """Dtype of a buffer of actions."""
        return np.int64 if self.discrete else np.float32

    @property
    def bounded(self) -> bool:
        """Whether every component of a continuous action has finite bounds, see :attr:`within`."""
        return bool(self.within.all())

    @cached_property
    def within(self) -> np.ndarray:
        """Which components of a continuous action have finite bounds, bool ``[A]``; see :func:`bounded_within`."""
        return bounded_within(self.low, self.high)

    @cached_property
    def fixed(self) -> np.ndarray:
        """Which components of a continuous action have equal bounds, bool ``[A]``."""
        return np.asarray(self.low) == np.asarray(self.high)

    @cached_property
    def starts(self) -> np.ndarray:
        """Position of each index's first logit among the logits of all, ``[indices]``."""
        return np.cumsum((0, *self.choices[:-1]))

    def possible(self, masks: np.ndarray) -> np.ndarray:
        """Says which indices have an allowed value in masks ``[…, choices of all indices]``, bool ``[…, indices]``."""
        return np.logical_or.reduceat(masks > 0.5, self.starts, -1)

    def native(self, row: Any) -> Any:
        """Returns what the environment takes for one row; continuous actions are clipped to their bounds."""
        if self.kind == "discrete":
            return int(row) + self.first[0]
        if self.kind == "multi_discrete":
            return (np.asarray(row) + self.first).astype(self.dtype).reshape(self.shape)
        return np.clip(row, self.low, self.high).astype(self.dtype).reshape(self.shape)

    def natives(self, rows: np.ndarray) -> np.ndarray:
        """Returns what a batched environment takes for rows ``[E, …]``."""
        if self.kind == "discrete":
            return rows + self.first[0] if self.first[0] else rows
        if self.kind == "multi_discrete":
            return (rows + np.asarray(self.first)).astype(self.dtype).reshape(-1, *self.shape)
        return np.clip(rows, *self._limits).reshape(-1, *self.shape)

    def native_rows(self, rows: np.ndarray) -> Sequence[Any]:
        """Returns what single environments take for rows ``[E, …]``: :meth:`native` of each row."""
        if self.kind == "discrete":
            return (rows + self.first[0] if self.first[0] else rows).tolist()
        if not self.shape:
            return [self.native(row) for row in rows]
        moved = rows + np.asarray(self.first) if self.discrete else np.clip(rows, *self._bounds)
        return list(moved.astype(self.dtype).reshape(-1, *self.shape))

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.low), np.asarray(self.high)

    @cached_property
    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)


def bounded_within(low: ArrayLike, high: ArrayLike) -> np.ndarray:
    """Says which components have finite bounds whose span float32 can hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(np.asarray(high, np.float32) - np.asarray(low, np.float32))


def action_layout(space: gymnasium.Space) -> ActionLayout:
    """Returns the layout of an action space; raises a one-line ``ValueError`` if the space isn't supported."""
    shape, dtype = tuple(int(n) for n in space.shape or ()), str(space.dtype)
    if isinstance(space, spaces.Discrete):
        return ActionLayout("discrete", *choices_of(space), dtype=dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return ActionLayout("multi_discrete", *choices_of(space), shape, dtype=dtype)
    if isinstance(space, spaces.MultiBinary):
        count = math.prod(shape)
        return ActionLayout("multi_discrete", (2,) * count, (0,) * count, shape, dtype=dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(np.asarray(bound, np.float64).ravel().tolist()) for bound in (space.low, space.high))
        return ActionLayout("continuous", shape=shape, low=low, high=high, dtype=dtype)
    raise ValueError(f"action space {one_line(space)} isn't supported; supported are {SUPPORTED_ACTIONS}")
