"""Names the environment that gave a number that is none, before a loss is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.config.handed import is_handed
from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.description import EnvDescription


def check_rows(
    description: EnvDescription, env_ids: Sequence[int], rows: np.ndarray, iteration: int | None, after: int
) -> None:
    """Checks observations ``[E, width]`` that environments gave in one step, the ``after``-th, as a rollout's are."""
    check_numbers(description, env_ids, rows[None], np.zeros((0, len(rows))), iteration, after)


def check_numbers(
    description: EnvDescription,
    env_ids: Sequence[int],
    rows: np.ndarray,
    rewards: np.ndarray,
    iteration: int | None,
    after: int = 0,
) -> None:
    """Checks that a rollout's rewards, and the vectors of its observations, are finite; one pass over each.

    Args:
        description: of the environments.
        env_ids: global ids of the environments, in the order of the columns.
        rows: observations as the environments gave them, ``[T, E, width]`` or with the last one ``[T+1, E, width]``.
        rewards: as the environments gave them, ``[T, E]``.
        iteration: iterations done before this one; -1 for the random actions before the first, None for an examination.
        after: steps of the rollout that were taken before the first row.

    Raises:
        EnvironmentFailureError: some number isn't; one line with environment, step and value of the first.
    """
    vectors = description.observation.floats(rows)[..., : description.observation.vector_size]
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(rewards.sum()) and math.isfinite(vectors.sum()):
            return  # a sum is finite only where all are
    found: list[tuple[int, int, str]] = []
    for step, env in np.argwhere(~np.isfinite(rewards))[:1]:
        found.append((step + 1, env, f"reward {rewards[step, env]:g}"))
    for step, env, column in np.argwhere(~np.isfinite(vectors))[:1]:
        leaf = next(x for x in description.observation.leaves if x.start <= column < x.start + x.size)
        where = f" in {leaf.name!r}" if leaf.name else ""
        value = f"observation {vectors[step, env, column]:g}{where} (component {column - leaf.start})"
        found.append((step, env, value))
    if found:
        step, env, what = min(found)
        step += after
        when = f"in step {step} of" if step else "before the first step of"
        text = f"environment {env_ids[env]} ({description.id}) gave {what} {when}"
        if iteration is None:
            raise EnvironmentFailureError(f"{text} random actions")
        rollout = f"iteration {iteration + 1}" if iteration >= 0 else "the random actions before the first iteration"
        handed = is_handed(description.id)  # which no command finds
        hint = "" if handed else f"; lockstep check {description.id} looks for such numbers"
        raise EnvironmentFailureError(f"{text} {rollout}{hint}")
