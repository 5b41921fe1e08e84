"""Draws the actions of a random policy, keyed by shard, for the normalisers' first statistics."""

from __future__ import annotations

import numpy as np

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.core.spaces import ActionLayout, ObservationLayout


def random_actions(config: Config, plan: ShardPlan, action: ActionLayout) -> np.ndarray:
    """Returns the actions of a random policy, rows ``[T, E, …]``, keyed by ``(seed, "random", shard)``.

    They are uniform over the choices or within the bounds, and standard normal in a component without bounds.
    """
    shape = (config.num_steps, plan.envs_per_shard)
    parts = [draw_actions(keyed_generator(config.seed, "random", shard), action, shape) for shard in plan.shards]
    return np.concatenate(parts, 1)


def draw_actions(generator: np.random.Generator, action: ActionLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Returns rows of random actions ``[*shape, …]``, see :func:`random_actions`."""
    if action.kind == "discrete":
        return generator.integers(0, action.choices[0], shape)
    if action.kind == "multi_discrete":
        return np.stack([generator.integers(0, count, shape) for count in action.choices], -1)
    low, high = (np.asarray(bound) for bound in (action.low, action.high))
    uniform, normal = generator.random((*shape, low.size)), generator.standard_normal((*shape, low.size))
    bounded = action.within
    span = np.where(bounded, high, 1.0) - np.where(bounded, low, 0.0)
    return np.where(bounded, np.where(bounded, low, 0.0) + span * uniform, normal).astype(np.float32)


def random_replacements(config: Config, plan: ShardPlan, action: ActionLayout) -> np.ndarray:
    """Draws the replacements ``[T, E, indices]`` of :func:`allowed_actions` for :func:`random_actions`.

    They have a separate key, ``(seed, "random/allowed", shard)``, so that runs without a mask keep their actions.
    """
    shape = (config.num_steps, plan.envs_per_shard)
    generators = [keyed_generator(config.seed, "random/allowed", shard) for shard in plan.shards]
    return np.concatenate([draw_replacements(generator, action, shape) for generator in generators], 1)


def draw_replacements(generator: np.random.Generator, action: ActionLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Draws replacements ``[*shape, indices]``, uniform in [0, 1), see :func:`allowed_actions`."""
    return generator.random((*shape, len(action.choices)))


def allowed_actions(
    observation: ObservationLayout,
    action: ActionLayout,
    rows: np.ndarray,
    drawn: np.ndarray,
    replacements: np.ndarray,
) -> np.ndarray:
    """Returns the drawn actions ``[E, …]``, with allowed ones in place of those that rows ``[E, width]`` forbid.

    ``replacements`` ``[E, indices]``, uniform in [0, 1) and independent of ``drawn``, pick one of the allowed choices.
    If ``drawn`` is uniform over all actions, the result is uniform over the allowed ones.
    """
    if observation.mask is None:
        return drawn
    start, indices = observation.mask.start, drawn.reshape(len(drawn), -1).copy()
    for number, count in enumerate(action.choices):
        allowed = observation.floats(rows)[:, start : start + count] > 0.5
        start += count
        index = indices[:, number]
        other = np.floor(replacements[:, number] * allowed.sum(1))
        instead = (np.cumsum(allowed, 1) > other[:, None]).argmax(1)
        indices[:, number] = np.where(allowed[np.arange(len(index)), index], index, instead)
    return indices.reshape(drawn.shape)
