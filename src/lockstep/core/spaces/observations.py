"""Observations as the rest of the program sees them: one flat row each, whatever their space.

A row without images is float32; a row with images is bytes, which begin with the float32 components. So rollouts,
shared memory, checkpoints and minibatches handle one array. The networks take the row apart again (each engine's
``encoders``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.core.errors import one_line
from lockstep.core.spaces.kinds import channels_first, choices_of, is_image, is_text, texts_in

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of those"
MASK = "action_mask"
_ORDER = ("vector", "one_hot", "mask", "image")


@dataclass(frozen=True)
class Leaf:
    """One part of an observation.

    Attributes:
        name: ``""`` for a plain space, else its path in the Dict, e.g. ``"arm/camera"``.
        kind: ``vector`` (Box, MultiBinary), ``one_hot`` (Discrete, MultiDiscrete), ``mask`` (which actions are
            allowed), or ``image``.
        shape: shape that the space gives.
        choices: number of values of each component of a ``one_hot``; ``first`` are their lowest values.
        start: first column (of an image: first byte) in the row.
        high: largest value of an image.
        channels_first: whether an image is ``[C, H, W]``, else ``[H, W, C]`` or ``[H, W]``.
        apart: whether a mask is given separately from the observation.
    """

    name: str
    kind: Literal["vector", "one_hot", "mask", "image"]
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    start: int = 0
    high: float = 0.0
    channels_first: bool = False
    apart: bool = False

    @cached_property
    def size(self) -> int:
        """Number of columns (of an image: bytes) in the row."""
        return math.prod(self.shape)

    @cached_property
    def lowest(self) -> np.ndarray | None:
        """The lowest values of a ``one_hot``; None if all are 0."""
        return np.asarray(self.first) if any(self.first) else None

    def index(self, column: int, value: float) -> str:
        """Returns an index, which counts from 0 in rows, as the environment would give it."""
        given = value + (self.first[column] if self.first else 0)
        return str(int(given)) if given.is_integer() else f"{given:g}"

    def range_of(self, column: int) -> str:
        """Says which values an index may have."""
        count, first = self.choices[column], self.first[column] if self.first else 0
        return f"the {count} choices from {first} to {first + count - 1}"

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """The shortest sequence of choices that the whole repeats: ``(11, 6)`` for ``(11, 6, 11, 6)``."""
        whole = len(self.choices)
        periods = (n for n in range(1, whole) if whole % n == 0 and self.choices[:n] * (whole // n) == self.choices)
        return self.choices[: next(periods, whole)]

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        if len(self.shape) == 2:
            return (1, *self.shape)
        if self.channels_first:
            return self.shape[0], self.shape[1], self.shape[2]
        return self.shape[2], self.shape[0], self.shape[1]


@dataclass(frozen=True)
class ObservationLayout:
    """Says where each part of an observation lies in its row: vectors first, then indices, the action mask, images."""

    leaves: tuple[Leaf, ...]

    @cached_property
    def float_size(self) -> int:
        """Number of float32 columns of a row."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind != "image")

    @cached_property
    def vector_size(self) -> int:
        """Number of leading float32 columns that are plain numbers, which can be normalised."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind == "vector")

    @cached_property
    def image_bytes(self) -> int:
        """Number of bytes of images in a row."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind == "image")

    @cached_property
    def dtype(self) -> type:
        """Dtype of a row: float32, or uint8 if there is an image."""
        return np.uint8 if self.image_bytes else np.float32

    @cached_property
    def width(self) -> int:
        """Number of elements of a row; bytes are padded to whole words, so that the floats in them stay aligned."""
        return 4 * self.float_size + -(-self.image_bytes // 4) * 4 if self.image_bytes else self.float_size

    @cached_property
    def indices(self) -> tuple[slice, np.ndarray]:
        """The columns of indices among a row's float32 columns, and the number of values of each, float32 ``[n]``."""
        counts = [count for leaf in self.leaves for count in leaf.choices]
        return slice(self.vector_size, self.vector_size + len(counts)), np.array(counts, np.float32)

    @cached_property
    def mask(self) -> Leaf | None:
        """The action mask, if there is one."""
        return next((leaf for leaf in self.leaves if leaf.kind == "mask"), None)

    @cached_property
    def single_vector(self) -> Leaf | None:
        """The part of an observation that is a single unnamed vector; None for any other observation."""
        leaf = self.leaves[0]
        return leaf if len(self.leaves) == 1 and leaf.kind == "vector" and not leaf.name else None

    @cached_property
    def plain(self) -> bool:
        """Whether a row consists of vectors only."""
        return all(leaf.kind == "vector" for leaf in self.leaves)

    def zeros(self, count: int) -> np.ndarray:
        """Returns rows of zeros ``[count, width]`` that allow every action."""
        rows = np.zeros((count, self.width), self.dtype)
        if self.mask is not None:
            self.floats(rows)[:, self.mask.start : self.mask.start + self.mask.size] = 1.0
        return rows

    def floats(self, rows: np.ndarray) -> np.ndarray:
        """Returns the float32 columns ``[…, float_size]`` of rows ``[…, width]``, as a view."""
        return rows[..., : 4 * self.float_size].view(np.float32) if self.image_bytes else rows

    def masks(self, rows: np.ndarray) -> np.ndarray:
        """Returns the action masks ``[…, choices]`` of rows ``[…, width]``, as a view; the layout must have a mask."""
        assert self.mask is not None
        return self.floats(rows)[..., self.mask.start : self.mask.start + self.mask.size]

    def leaf_at(self, column: int) -> Leaf:
        """Returns the part that a float32 column belongs to."""
        return next(leaf for leaf in self.leaves if leaf.kind != "image" and column < leaf.start + leaf.size)

    def misfits(self, rows: np.ndarray) -> np.ndarray:
        """Marks the indices in rows ``[…, width]`` that are outside of their choices, bool ``[…, n]``."""
        columns, counts = self.indices
        values = self.floats(rows)[..., columns]
        return (values < 0) | (values >= counts) | (values != np.floor(values))

    def encode(self, observation: Any, action_mask: Any = None) -> np.ndarray:
        """Returns the row ``[width]`` of an observation; raises a ``ValueError`` if a part has a wrong shape."""
        row = np.zeros(self.width, self.dtype)
        self.encode_into(row, observation, action_mask)
        return row

    def encode_into(self, row: np.ndarray, observation: Any, action_mask: Any = None) -> None:
        """Writes an observation into a row ``[width]``; see :meth:`encode`."""
        if self.image_bytes:
            row[4 * self.float_size + self.image_bytes :] = 0
        floats = self.floats(row)
        for leaf in self.leaves:
            value = action_mask if leaf.apart else descend(observation, leaf.name)
            array = _checked(leaf, value).reshape(-1)
            target = row if leaf.kind == "image" else floats
            target[leaf.start : leaf.start + leaf.size] = array if leaf.lowest is None else array - leaf.lowest

    def decode(self, row: np.ndarray) -> Any:
        """Reverses :meth:`encode`: returns an array for a plain space, else a (nested) dict of arrays.

        A mask that was given separately is left out. A Tuple becomes a dict with keys ``"0"``, ``"1"`` and so on.
        """
        floats, parts = self.floats(row), {}
        for leaf in self.leaves:
            source = row if leaf.kind == "image" else floats
            value = source[leaf.start : leaf.start + leaf.size]
            if leaf.apart:
                continue
            if leaf.first:
                value = (value + leaf.first).astype(np.int64)
            parts[leaf.name] = value.reshape(leaf.shape)
        return nested(parts)


_NO_NUMBERS = "USc"
"""Kinds of dtypes: texts, bytes, complex numbers."""


def _checked(leaf: Leaf, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if leaf.kind == "image" and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"observation of dtype {array.dtype}, its space says uint8")
    if array.dtype.kind in _NO_NUMBERS:  # NumPy would read texts as numbers, and drop imaginary parts
        what = f" part {leaf.name!r}" if leaf.name else ""
        raise ValueError(f"observation{what} of dtype {array.dtype}, its space says real numbers")
    if array.shape != leaf.shape and (leaf.kind == "image" or array.size != leaf.size):
        what = f" part {leaf.name!r}" if leaf.name else ""
        raise ValueError(f"observation{what} of shape {array.shape}, its space says {leaf.shape}")
    return array


def descend(observation: Any, name: str) -> Any:
    """Returns the part of an observation that a leaf's name leads to."""
    for key in name.split("/") if name else ():
        observation = observation[key] if isinstance(observation, Mapping) else observation[int(key)]
    return observation


def nested(parts: Mapping[str, Any]) -> Any:
    """Returns the observation with these parts by leaves' names: a plain space's only one, else a (nested) dict."""
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        *path, last = name.split("/")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = part
    return tree.get("", tree)


def _leaf(name: str, space: gymnasium.Space) -> Leaf:
    shape = tuple(int(n) for n in space.shape or ())
    if isinstance(space, spaces.Box):
        if not is_image(space):
            return Leaf(name, "vector", shape)
        if not np.max(space.high):
            what = f"observation {name!r}" if name else "the observation"
            raise ValueError(
                f"{what} is an image whose space {one_line(space)} allows nothing but 0; give its highest value"
            )
        return Leaf(name, "image", shape, high=float(np.max(space.high)), channels_first=channels_first(space))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return Leaf(name, "one_hot", shape, *choices_of(space))
    if isinstance(space, spaces.MultiBinary):
        return Leaf(name, "vector", shape)
    what = f"observation {name!r}: space {one_line(space)}" if name else f"observation space {one_line(space)}"
    helps = "; gymnasium.wrappers.FilterObservation leaves a key out" if name else ""
    raise ValueError(
        f"{what} isn't supported; supported are {SUPPORTED_OBSERVATIONS}{helps}; gymnasium.wrappers."
        "TransformObservation makes another space of it"
    )


def _leaves(name: str, space: gymnasium.Space) -> list[Leaf]:
    prefix = f"{name}/" if name else ""
    if isinstance(space, spaces.Dict):
        slashed = [key for key in space.spaces if "/" in str(key)]
        if slashed:
            raise ValueError(f"observation key {slashed[0]!r} holds a '/', which separates nested keys; rename it")
        found = {key: _leaves(f"{prefix}{key}", part) for key, part in space.spaces.items()}
        for key in (key for key, leaves in found.items() if leaves):
            if not isinstance(key, str) or not key:
                what = "is empty" if isinstance(key, str) else f"is {type(key).__name__} and must be text"
                raise ValueError(f"observation key {key!r}{f' of {name!r}' if name else ''} {what}; rename it")
        return [leaf for leaves in found.values() for leaf in leaves]
    if isinstance(space, spaces.Tuple):
        return [leaf for n, part in enumerate(space.spaces) for leaf in _leaves(f"{prefix}{n}", part)]
    return [] if name and is_text(space) else [_leaf(name, space)]


def observation_layout(space: gymnasium.Space, mask_key: str | None = None, mask_size: int = 0) -> ObservationLayout:
    """Returns the layout of a space; raises a one-line ``ValueError`` if it isn't supported or lacks ``mask_key``.

    Texts in a Dict or Tuple are left out. ``mask_key`` is the entry of a Dict that says which actions are allowed;
    ``mask_size`` is the length of a mask that is given separately from the observation.
    """
    leaves = _leaves("", space)
    if mask_key is not None:
        names = [leaf.name for leaf in leaves]
        if mask_key not in names:
            there = f"; there are {names}" if any(names) else ", which has none; give info or method, or leave it out"
            raise ValueError(f"env.action_mask: {mask_key!r} is no entry of the observation{there}")
        leaves = [Leaf(x.name, "mask", x.shape) if x.name == mask_key else x for x in leaves]
    if mask_size:
        leaves.append(Leaf(MASK, "mask", (mask_size,), apart=True))
    placed: list[Leaf] = []
    floats = sum(leaf.size for leaf in leaves if leaf.kind != "image")
    starts = {True: 4 * floats, False: 0}  # start of the next image, in bytes, and of the next other part, in columns
    for leaf in sorted(leaves, key=lambda x: _ORDER.index(x.kind)):
        placed.append(replace(leaf, start=starts[leaf.kind == "image"]))
        starts[leaf.kind == "image"] += leaf.size
    layout = ObservationLayout(tuple(placed))
    if layout.width == 0:
        what = "holds nothing but text" if texts_in(space) else "is empty"
        raise ValueError(f"observation space {one_line(space)} {what}")
    return layout
