"""Observation and action spaces as the rest of the program sees them: one flat row per observation, one per action.

An observation of any supported space is one row of numbers: float32 where it holds no image, else bytes, of which the
first are the float32 components. So rollouts, shared memory, checkpoints and minibatches handle one array whatever the
space. The networks take the row apart again (each engine's ``encoders``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of those"
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, MultiBinary and floating-point Box"
MASK = "action_mask"
_ORDER = ("vector", "one_hot", "mask", "image")


@dataclass(frozen=True)
class Leaf:
    """One part of an observation.

    Attributes:
        name: ``""`` for a plain space, else its path in the Dict, e.g. ``"arm/camera"``.
        kind: ``vector`` (Box, MultiBinary), ``one_hot`` (Discrete, MultiDiscrete), ``mask`` (which actions are
            allowed), or ``image``.
        shape: as the space gives it.
        choices: number of values of each component of a ``one_hot``; ``first`` their lowest values.
        start: first column (first byte of an image) in the row.
        high: largest value of an image.
        channels_first: whether an image is ``[C, H, W]``, else ``[H, W, C]`` or ``[H, W]``.
        apart: whether a mask is given apart from the observation.
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
        """Columns (bytes of an image) in the row."""
        return math.prod(self.shape)

    @cached_property
    def lowest(self) -> np.ndarray | None:
        """The lowest values of a ``one_hot``; None where all are 0."""
        return np.asarray(self.first) if any(self.first) else None

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """The choices up to where they begin anew: ``(11, 6)`` of ``(11, 6, 11, 6)``."""
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
    """Where each part of an observation lies in its row: vectors first, then indices, the action mask, images."""

    leaves: tuple[Leaf, ...]

    @cached_property
    def float_size(self) -> int:
        """Float32 columns of a row."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind != "image")

    @cached_property
    def vector_size(self) -> int:
        """How many of them, from the first, are numbers that can be normalised."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind == "vector")

    @cached_property
    def image_bytes(self) -> int:
        """Bytes of images in a row."""
        return sum(leaf.size for leaf in self.leaves if leaf.kind == "image")

    @cached_property
    def dtype(self) -> type:
        """Of a row: float32, or uint8 if there is an image."""
        return np.uint8 if self.image_bytes else np.float32

    @cached_property
    def width(self) -> int:
        """Elements of a row; bytes are filled up to whole words, so that the floats in them stay aligned."""
        return 4 * self.float_size + -(-self.image_bytes // 4) * 4 if self.image_bytes else self.float_size

    @cached_property
    def mask(self) -> Leaf | None:
        """The action mask, if there is one."""
        return next((leaf for leaf in self.leaves if leaf.kind == "mask"), None)

    @cached_property
    def single_vector(self) -> Leaf | None:
        """The one part of an observation that is nothing but an array of numbers."""
        leaf = self.leaves[0]
        return leaf if len(self.leaves) == 1 and leaf.kind == "vector" and not leaf.name else None

    @cached_property
    def plain(self) -> bool:
        """Whether a row is one vector of numbers and nothing else."""
        return all(leaf.kind == "vector" for leaf in self.leaves)

    def zeros(self, count: int) -> np.ndarray:
        """Empty rows ``[count, width]``; every action is allowed."""
        rows = np.zeros((count, self.width), self.dtype)
        if self.mask is not None:
            self.floats(rows)[:, self.mask.start : self.mask.start + self.mask.size] = 1.0
        return rows

    def floats(self, rows: np.ndarray) -> np.ndarray:
        """The float32 columns ``[…, float_size]`` of rows ``[…, width]``, as a view."""
        return rows[..., : 4 * self.float_size].view(np.float32) if self.image_bytes else rows

    def encode(self, observation: Any, action_mask: Any = None) -> np.ndarray:
        """The row ``[width]`` of an observation; a ``ValueError`` if a part hasn't its space's shape."""
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
        """The reverse of :meth:`encode`: an array for a plain space, else a (nested) dict of arrays; no mask.

        A Tuple is a dict with keys ``"0"``, ``"1"`` and so on.
        """
        floats, out = self.floats(row), {}
        for leaf in self.leaves:
            source = row if leaf.kind == "image" else floats
            value = source[leaf.start : leaf.start + leaf.size]
            if leaf.apart:
                continue
            if leaf.first:
                value = (value + leaf.first).astype(np.int64)
            _place(out, leaf.name, value.reshape(leaf.shape))
        return out.get("", out)


def _checked(leaf: Leaf, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if leaf.kind == "image" and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"observation of dtype {array.dtype}, its space says uint8")
    if array.shape != leaf.shape and (leaf.kind == "image" or array.size != leaf.size):
        what = f" part {leaf.name!r}" if leaf.name else ""
        raise ValueError(f"observation{what} of shape {array.shape}, its space says {leaf.shape}")
    return array


def descend(observation: Any, name: str) -> Any:
    """The part of an observation that a leaf names."""
    for key in name.split("/") if name else ():
        observation = observation[key] if isinstance(observation, Mapping) else observation[int(key)]
    return observation


def _place(tree: dict, name: str, value: np.ndarray) -> None:
    *path, last = name.split("/")
    for key in path:
        tree = tree.setdefault(key, {})
    tree[last] = value


class ImageBox(spaces.Box):
    """An image whose layout, ``[C, H, W]`` or ``[H, W, C]``, is said; for a plain Box it is guessed from the shape."""

    def __init__(self, low: np.ndarray, high: np.ndarray, dtype: type, channels_first: bool) -> None:
        super().__init__(low, high, dtype=dtype)
        self.channels_first = channels_first


def is_image(space: spaces.Box) -> bool:
    """Whether it is treated as an image: bytes with two or three axes."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3)


def channels_first(space: spaces.Box) -> bool:
    """Whether an image is ``[C, H, W]``: as it says itself, else if its first axis is shorter than the others."""
    if isinstance(space, ImageBox):
        return space.channels_first
    return len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])


def is_text(space: gymnasium.Space) -> bool:
    """Whether it is a space of strings: Text, or a package's own."""
    return space.dtype is not None and space.dtype.kind == "U"


def texts_in(space: gymnasium.Space, name: str = "") -> tuple[str, ...]:
    """The parts of a Dict or Tuple that are text, which rows leave out."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return (name,) if name and is_text(space) else ()
    prefix = f"{name}/" if name else ""
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return tuple(text for key, part in parts for text in texts_in(part, f"{prefix}{key}"))


def _choices(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of values of each index, and their lowest ones."""
    sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return tuple(int(n) for n in np.ravel(sizes)), tuple(int(n) for n in np.ravel(space.start))


def _leaf(name: str, space: gymnasium.Space) -> Leaf:
    shape = tuple(int(n) for n in space.shape or ())
    if isinstance(space, spaces.Box):
        if not is_image(space):
            return Leaf(name, "vector", shape)
        if not np.max(space.high):
            what = f"observation {name!r}" if name else "the observation"
            raise ValueError(
                f"{what} is an image whose space {_named(space)} allows nothing but 0; give its highest value"
            )
        return Leaf(name, "image", shape, high=float(np.max(space.high)), channels_first=channels_first(space))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return Leaf(name, "one_hot", shape, *_choices(space))
    if isinstance(space, spaces.MultiBinary):
        return Leaf(name, "vector", shape)
    what = f"observation {name!r}: space {_named(space)}" if name else f"observation space {_named(space)}"
    helps = "; gymnasium.wrappers.FilterObservation leaves a key out" if name else ""
    raise ValueError(
        f"{what} isn't supported; supported are {SUPPORTED_OBSERVATIONS}{helps}; gymnasium.wrappers."
        "TransformObservation makes another space of it"
    )


def _named(space: gymnasium.Space) -> str:
    return " ".join(str(space).split())


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
    """The layout of a space; a one-line ``ValueError`` if it isn't supported, or lacks ``mask_key``.

    Texts in a Dict or Tuple are left out.
    ``mask_key`` is the entry of a Dict that says which actions are allowed, ``mask_size`` how many numbers a mask has
    that comes apart from the observation.
    """
    leaves = _leaves("", space)
    if mask_key is not None:
        names = [leaf.name for leaf in leaves]
        if mask_key not in names:
            raise ValueError(f"env.action_mask: {mask_key!r} is no entry of the observation; there are {names}")
        leaves = [Leaf(x.name, "mask", x.shape) if x.name == mask_key else x for x in leaves]
    if mask_size:
        leaves.append(Leaf(MASK, "mask", (mask_size,), apart=True))
    placed: list[Leaf] = []
    floats = sum(leaf.size for leaf in leaves if leaf.kind != "image")
    starts = {True: 4 * floats, False: 0}  # of the next image, in bytes, and of what is none, in columns
    for leaf in sorted(leaves, key=lambda x: _ORDER.index(x.kind)):
        placed.append(replace(leaf, start=starts[leaf.kind == "image"]))
        starts[leaf.kind == "image"] += leaf.size
    layout = ObservationLayout(tuple(placed))
    if layout.width == 0:
        what = "holds nothing but text" if texts_in(space) else "is empty"
        raise ValueError(f"observation space {_named(space)} {what}")
    return layout


@dataclass(frozen=True)
class ActionLayout:
    """What an action is.

    Attributes:
        kind: ``discrete`` (one index), ``multi_discrete`` (an index each of several choices; MultiBinary is one of
            these), or ``continuous``.
        choices: number of values of each index; ``first`` their lowest values.
        shape: of a multi-discrete or continuous action.
        low: lower bounds of a continuous action, flat; ``high`` the upper ones.
        dtype: of what the environment takes.
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
        """Logits of all choices, or components of a continuous action."""
        return sum(self.choices) if self.discrete else len(self.low)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one action in a buffer: ``()``, ``[indices]`` or ``[components]``."""
        return {"discrete": (), "multi_discrete": (len(self.choices),), "continuous": (len(self.low),)}[self.kind]

    @property
    def row_dtype(self) -> type:
        """Of a buffer of actions."""
        return np.int64 if self.discrete else np.float32

    @property
    def bounded(self) -> bool:
        """Whether every component of a continuous action has finite bounds, see :attr:`within`."""
        return bool(self.within.all())

    @cached_property
    def within(self) -> np.ndarray:
        """Which components of a continuous action have finite bounds, bool ``[A]``; see :func:`bounded_within`."""
        return bounded_within(self.low, self.high)

    def native(self, row: Any) -> Any:
        """What the environment takes, of one row; continuous actions are clipped to their bounds."""
        if self.kind == "discrete":
            return int(row) + self.first[0]
        if self.kind == "multi_discrete":
            return (np.asarray(row) + self.first).astype(self.dtype).reshape(self.shape)
        return np.clip(row, self.low, self.high).astype(self.dtype).reshape(self.shape)

    def natives(self, rows: np.ndarray) -> np.ndarray:
        """What a batched environment takes, of rows ``[E, …]``."""
        if self.kind == "discrete":
            return rows + self.first[0] if self.first[0] else rows
        if self.kind == "multi_discrete":
            return (rows + np.asarray(self.first)).astype(self.dtype).reshape(-1, *self.shape)
        return np.clip(rows, *self._limits).reshape(-1, *self.shape)

    def native_rows(self, rows: np.ndarray) -> Sequence[Any]:
        """What environments take one by one, :meth:`native` of each of rows ``[E, …]``."""
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
    """Says where bounds are finite, and so near one another that float32 holds their span."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(np.asarray(high, np.float32) - np.asarray(low, np.float32))


def action_layout(space: gymnasium.Space) -> ActionLayout:
    """The layout of an action space; a one-line ``ValueError`` names one that isn't supported."""
    shape, dtype = tuple(int(n) for n in space.shape or ()), str(space.dtype)
    if isinstance(space, spaces.Discrete):
        return ActionLayout("discrete", *_choices(space), dtype=dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return ActionLayout("multi_discrete", *_choices(space), shape, dtype=dtype)
    if isinstance(space, spaces.MultiBinary):
        count = math.prod(shape)
        return ActionLayout("multi_discrete", (2,) * count, (0,) * count, shape, dtype=dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(np.asarray(bound, np.float64).ravel().tolist()) for bound in (space.low, space.high))
        return ActionLayout("continuous", shape=shape, low=low, high=high, dtype=dtype)
    raise ValueError(f"action space {_named(space)} isn't supported; supported are {SUPPORTED_ACTIONS}")


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def layouts_from_json(
    observation: Mapping[str, Any], action: Mapping[str, Any]
) -> tuple[ObservationLayout, ActionLayout]:
    """The layouts that ``dataclasses.asdict`` made and JSON stored."""
    leaves = tuple(Leaf(**_tuples(leaf)) for leaf in observation["leaves"])
    return ObservationLayout(leaves), ActionLayout(**_tuples(action))
