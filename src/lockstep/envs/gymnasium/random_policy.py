"""Draws the actions of a random policy, keyed by shard, for the normalisers' first statistics."""

from __future__ import annotations

import numpy as np

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.core.spaces import ActionLayout, ObservationLayout


def random_actions(config: Config, plan: ShardPlan, action: ActionLayout) -> np.ndarray:
    """Actions of a random policy keyed by ``(seed, "random", shard)``, rows ``[T, E, …]``.

    Uniform over the choices or within the bounds; standard normal in a component without bounds.
    """
    shape = (config.num_steps, plan.envs_per_shard)
    parts = [draw_actions(keyed_generator(config.seed, "random", shard), action, shape) for shard in plan.shards]
    return np.concatenate(parts, 1)


def draw_actions(generator: np.random.Generator, action: ActionLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of random actions ``[*shape, …]``, see :func:`random_actions`."""
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
    """Numbers by which :func:`allowed_actions` replaces :func:`random_actions`, ``[T, E, indices]``.

    They are keyed by ``(seed, "random/allowed", shard)``: where nothing is forbidden no number of the others changes.
    """
    shape = (config.num_steps, plan.envs_per_shard)
    generators = [keyed_generator(config.seed, "random/allowed", shard) for shard in plan.shards]
    return np.concatenate([draw_replacements(generator, action, shape) for generator in generators], 1)


def draw_replacements(generator: np.random.Generator, action: ActionLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers for :func:`allowed_actions`, ``[*shape, indices]``, uniform in [0, 1); none for continuous actions."""
    return generator.random((*shape, len(action.choices)))


def allowed_actions(
    observation: ObservationLayout,
    action: ActionLayout,
    rows: np.ndarray,
    drawn: np.ndarray,
    replacements: np.ndarray,
) -> np.ndarray:
    """Drawn actions ``[E, …]``, but where the observation rows ``[E, width]`` forbid one, another that they allow.

    ``replacements`` ``[E, indices]``, uniform in [0, 1) and apart from what was drawn, choose among all that are
    allowed: of uniform draws come uniform actions.
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
