"""Makes rows of observations and actions from a user's arrays, or at random, and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout, descend, nested
from lockstep.envs.numbers import nothing

EDGE = 1.0 - 1e-6
"""How close to its bounds, scaled to 1, a squashed action may be: at them the inverse of tanh is infinite."""


def action_rows(layout: ActionLayout, actions: Any, count: int, squashed: bool) -> tuple[np.ndarray, float]:
    """Converts actions in the environment's units to what an engine's distributions take.

    Args:
        layout: description of actions.
        actions: the actions ``[count, …]``; or a single one if ``count`` is 1.
        count: number of actions.
        squashed: whether a tanh squashes a Gaussian into the bounds.

    Returns:
        int64 ``[count]`` or ``[count, indices]``, from 0 on, or float32 ``[count, components]`` before the tanh (0
        where bounds are equal); and the logarithm of the scale from the distribution's units to the environment's.

    Raises:
        ValueError: they aren't numbers, the shape is wrong, or an index isn't whole or is out of range; one line.
    """
    given = np.asarray(on_host(actions))
    if not np.can_cast(given.dtype, np.float32, "same_kind"):
        raise ValueError(f"action: {given.tolist()!r} isn't made of numbers; give what the policy returns")
    if given.shape != (count, *layout.shape) and not (count == 1 and given.shape == layout.shape):
        raise ValueError(
            f"action of shape {given.shape} for {count} observations; needed is {(count, *layout.shape)}"
            + (f" or {layout.shape}" if count == 1 else "")
        )
    if layout.discrete:
        rows, first = given.reshape(count, len(layout.choices)), np.asarray(layout.first)
        if not ((rows == np.floor(rows)) & (rows >= first) & (rows < first + np.asarray(layout.choices))).all():
            ranges = [f"{low} to {low + n - 1}" for low, n in zip(layout.first, layout.choices, strict=True)]
            raise ValueError(f"action: {given.tolist()} is out of range; use {', '.join(ranges)}")
        rows = rows.astype(np.int64) - first
        return (rows[:, 0] if layout.kind == "discrete" else rows), 0.0
    rows = given.reshape(count, len(layout.low)).astype(np.float64)
    if not squashed:
        return rows.astype(np.float32), 0.0
    half = np.where(layout.fixed, 1.0, 0.5 * (np.asarray(layout.high) - np.asarray(layout.low)))
    inside = np.clip((rows - np.asarray(layout.low)) / half - 1.0, -EDGE, EDGE)
    return np.where(layout.fixed, 0.0, np.arctanh(inside)).astype(np.float32), float(np.log(half).sum())


def density_of_fixed(layout: ActionLayout, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Returns the log-density ``[n]`` at 0, see :func:`action_rows`, of squashed components with equal bounds."""
    mean, std = (x[:, layout.fixed].astype(np.float64) for x in (mean, std))
    return (-0.5 * np.square(mean / std) - np.log(std) - 0.5 * np.log(2.0 * np.pi)).sum(1).astype(np.float32)


def random_rows(
    layout: ObservationLayout, action: ActionLayout, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws observation rows ``[count, width]``: normal numbers, any index and pixel, masks that allow an action."""
    rows = layout.zeros(count)
    floats = layout.floats(rows)
    for leaf in layout.leaves:
        place, shape = slice(leaf.start, leaf.start + leaf.size), (count, leaf.size)
        if leaf.kind == "image":
            rows[:, place] = generator.integers(0, int(leaf.high) + 1, shape)
        elif leaf.kind == "one_hot":
            floats[:, place] = generator.integers(0, np.asarray(leaf.choices), shape)
        elif leaf.kind == "mask":
            floats[:, place] = random_masks(action.choices, count, generator)
        else:
            floats[:, place] = generator.standard_normal(shape)
    return rows


def random_masks(choices: tuple[int, ...], count: int, generator: np.random.Generator) -> np.ndarray:
    """Draws action masks, bool ``[count, choices of all indices]``, each allowing a choice of every index."""
    masks = []
    for number in choices:
        mask = generator.random((count, number)) < 0.5
        mask[np.arange(count), generator.integers(0, number, count)] = True
        masks.append(mask)
    return np.concatenate(masks, -1)


def parts_of(layout: ObservationLayout, observation: Any) -> dict[str, np.ndarray]:
    """Returns an observation's parts by their paths, for one observation or a batch; the space says what is a part.

    Raises:
        ValueError: it lacks a part, has another structure, or holds what isn't a number or a pixel; one line.
    """
    parts = {}
    for leaf in layout.leaves:
        if leaf.apart:
            continue
        try:
            part = np.asarray(on_host(descend(observation, leaf.name)))
            if part.dtype == object and part.shape:  # of numbers that Python holds, such as fractions
                part = part.astype(np.float64)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(_misfit(layout, observation)) from None
        if part.dtype == object and not leaf.name:
            raise ValueError(_misfit(layout, observation))
        parts[leaf.name] = _of_numbers(leaf, part)
    return parts


def _of_numbers(leaf: Leaf, part: np.ndarray) -> np.ndarray:
    """Returns a part of an observation; raises a one-line ``ValueError`` if a row would hold other numbers."""
    what = f"observation part {leaf.name!r}" if leaf.name else "observation"
    if not np.can_cast(part.dtype, np.float32, "same_kind"):
        raise ValueError(f"{what} of dtype {part.dtype}; this policy takes real numbers")
    if leaf.kind == "image" and part.dtype.kind in "iu" and part.dtype != np.uint8:
        beyond = part[(part < 0) | (part > 255)]
        if beyond.size:
            raise ValueError(f"{what}: pixel {beyond[0]} is outside 0 to 255")
    return part


def observation_rows(
    layout: ObservationLayout, action: ActionLayout, observation: Any, mask: Any
) -> tuple[np.ndarray, bool]:
    """Returns the rows ``[n, width]`` of one observation or a batch, and whether it was a single observation.

    Args:
        layout: layout of observations in rows.
        action: description of actions.
        observation: the user's observation; may hold tensors.
        mask: which actions are allowed: one mask for all observations or one for each; with several indices, their
            masks concatenated or a tuple of arrays; None: all are allowed.

    Raises:
        ValueError: it isn't what the environment gives, parts or masks of a batch differ in number, or there is a mask
            and the policy takes none; one line.
    """
    check_takes_mask(layout, mask)
    parts = parts_of(layout, observation)
    count = _batch_size(layout, parts)
    masks = _masks(action, mask, count)
    if count is None:
        return checked_rows(layout, action, layout.encode(nested(parts), masks)[None]), True
    if count == 0:
        return layout.zeros(0), False
    encoded = [
        layout.encode(nested({name: part[n] for name, part in parts.items()}), masks if masks.ndim == 1 else masks[n])
        for n in range(count)
    ]
    return checked_rows(layout, action, np.stack(encoded)), False


def batch_of(shape: tuple[int, ...]) -> str:
    """Returns the shape of a batch in words, as ``(n, 84, 84)``."""
    return f"({', '.join(['n', *map(str, shape)])}{'' if shape else ','})"


def _batch_size(layout: ObservationLayout, parts: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of observations in a batch; None for a single one."""
    shapes = {name: part.shape for name, part in parts.items()}
    leaf = next(x for x in layout.leaves if x.kind != "mask")
    shape = shapes[leaf.name]
    if shape == leaf.shape:
        return None
    if shape[1:] != leaf.shape:
        raise ValueError(
            f"observation of shape {shape}; this policy takes {leaf.shape} or a batch {batch_of(leaf.shape)}"
        )
    other = next((name for name, each in shapes.items() if each[:1] != shape[:1]), None)
    if other is not None:
        raise ValueError(
            f"observation: part {other!r} is of shape {shapes[other]} and part {leaf.name!r} of {shape}; a batch has "
            "equally many of each"
        )
    return shape[0]


def check_takes_mask(layout: ObservationLayout, mask: Any) -> None:
    """Raises a one-line ``ValueError`` if a mask is given and the policy takes none apart from its observations."""
    if mask is None or (layout.mask is not None and layout.mask.apart):
        return
    raise ValueError(
        "action_mask: this policy was trained without one and may take any action; leave it out, or train with "
        "env=dict(action_mask='info') (or 'method')"
        if layout.mask is None
        else f"action_mask: this policy's mask is the entry {layout.mask.name!r} of the observation; give it there"
    )


def _masks(action: ActionLayout, mask: Any, count: int | None) -> np.ndarray:
    """Returns one mask for all observations, ``[choices of all indices]``, or one for each, ``[count, …]``."""
    if mask is None:
        return np.ones(action.outputs)
    try:
        rows = _one_after_another(action, on_host(mask), count)
    except ValueError:
        raise ValueError(
            f"action_mask: its parts don't fit together; needed are {action.outputs} numbers, or arrays of "
            f"{action.choices}, for one or for each observation"
        ) from None
    if count and rows.ndim != 1 and len(rows) != count:
        raise ValueError(f"action_mask: {len(rows)} masks for {count} observations; give one for all, or one for each")
    return rows


def _one_after_another(action: ActionLayout, mask: Any, count: int | None = None) -> np.ndarray:
    """Concatenates the arrays of a mask that has one per index, or those of several such masks."""
    if len(action.choices) > 1 and isinstance(mask, tuple | list):
        shapes = [_shape(part) or () for part in mask]
        of_indices = [shape[-1:] for shape in shapes] == [(number,) for number in action.choices]
        if of_indices and not _of_observations(action, mask, shapes, count):
            return np.concatenate([np.asarray(part) for part in mask], -1)
        if _shape(mask) is None:
            return np.stack([_one_after_another(action, each) for each in mask])
        return np.asarray(mask).reshape(*np.shape(mask)[:1], -1) if of_indices else np.asarray(mask)
    return np.asarray(mask)


def _of_observations(
    action: ActionLayout, mask: tuple[Any, ...] | list[Any], shapes: list[tuple[int, ...]], count: int | None
) -> bool:
    """Returns whether a mask's parts belong to one observation each, if they could also belong to one index each.

    They could if all indices have equally many choices. Then a list of arrays has one per observation, a tuple one per
    index, like an environment's mask; a tuple of tuples or lists has one per observation if their number fits.
    """
    if count is None or len({*action.choices}) > 1 or any(len(shape) < 2 for shape in shapes):
        return False
    parts = len(action.choices)
    nested = any(isinstance(part, tuple | list) for part in mask)
    return isinstance(mask, list) or (nested and count == parts and all(shape[:-1] == (parts,) for shape in shapes))


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array or a nested list; None if its parts differ in length."""
    try:
        return np.shape(value)
    except ValueError:
        return None


def on_host(value: Any) -> Any:
    """Returns PyTorch tensors, also in tuples and lists, as arrays, even from a graph, a GPU or in bfloat16."""
    if isinstance(value, tuple | list):
        kind = tuple if isinstance(value, tuple) else list
        return kind(on_host(part) for part in value)
    if not hasattr(value, "detach"):
        return value
    held = value.detach().cpu()
    return (held.float() if str(held.dtype) == "torch.bfloat16" else held).numpy()


def _misfit(layout: ObservationLayout, observation: Any) -> str:
    names = [leaf.name for leaf in layout.leaves if not leaf.apart]
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
        return "observation: a pair of observation and info, as env.reset() returns it; give its first part"
    if names == [""]:
        return f"observation: {type(observation).__name__} isn't an array of numbers"
    given = f"a dict of {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
    return f"observation: {given}; this policy takes what its environment gives, with {', '.join(sorted(names))}"


def checked_rows(layout: ObservationLayout, action: ActionLayout, rows: np.ndarray) -> np.ndarray:
    """Returns a user's rows ``[n, width]``; raises a one-line ``ValueError`` if no environment could give them."""
    floats = layout.floats(rows)
    if np.isnan(floats).any():
        raise ValueError("observation: it holds nan")
    for row, number in np.argwhere(layout.misfits(rows))[:1].tolist():
        at = layout.vector_size + number
        leaf = layout.leaf_at(at)
        what, column = f" part {leaf.name!r}" if leaf.name else "", at - leaf.start
        index = leaf.index(column, float(floats[row, at]))
        raise ValueError(f"observation{what}: {index} is none of {leaf.range_of(column)}")
    if layout.mask is not None:
        for _, index in np.argwhere(~action.possible(layout.masks(rows)))[:1].tolist():
            raise ValueError(f"action_mask: it allows {nothing(action, index)}")
    return rows


def carried(state: Any, begins: Any, count: int, size: int) -> np.ndarray:
    """Returns a recurrent state that a user hands back, float32 ``[count, size]``, with zeros where episodes begin.

    Args:
        state: what the call before returned; None: all episodes begin.
        begins: which episodes begin, bool ``[count]``; None: none does.
        count: number of observations.
        size: size of a state.

    Raises:
        ValueError: either has another shape; one line.
    """
    shape = np.shape(begins)
    if begins is not None and shape != (count,) and not (count == 1 and shape == ()):
        raise ValueError(f"episode_start: of shape {shape} for {count} observations; needed is {(count,)}")
    if state is None:
        return np.zeros((count, size), np.float32)
    try:
        rows = np.array(on_host(state), np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"state: {type(state).__name__} is no array of numbers; give what predict returned") from None
    if rows.shape != (count, size):
        raise ValueError(
            f"state: of shape {rows.shape} for {count} observations; needed is {(count, size)}, as predict returns it"
        )
    if begins is not None:
        rows[np.asarray(on_host(begins), bool).reshape(count)] = 0.0
    return rows


def native_batch(action: ActionLayout, rows: np.ndarray) -> np.ndarray:
    """Returns what ``env.step`` takes for rows ``[n, …]`` of actions: within the bounds, in the space's dtype."""
    if action.discrete or action.dtype == "float32":
        return action.natives(rows)
    return np.array(action.native_rows(rows), action.dtype).reshape(-1, *action.shape)
