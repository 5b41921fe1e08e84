"""Checks what environments return before a network sees it, and names the environment at fault.

At fault are numbers that aren't finite, indices outside their choices, and action masks that allow nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.spaces import ActionLayout
from lockstep.core.user_code.handed import is_handed
from lockstep.envs.description import EnvDescription

Found = tuple[int, int, str]
"""A step, an environment's column, and what the environment returned."""


def check_rows(
    description: EnvDescription, env_ids: Sequence[int], rows: np.ndarray, iteration: int | None, after: int
) -> None:
    """Checks the observations ``[E, width]`` after ``after`` steps of a rollout, as :func:`check_numbers` does."""
    check_numbers(description, env_ids, rows[None], np.zeros((0, len(rows))), iteration, after)


def check_acted(
    description: EnvDescription,
    env_ids: Sequence[int],
    rows: np.ndarray,
    iteration: int | None,
    first: int = 0,
    dead: np.ndarray | None = None,
) -> None:
    """Checks observations ``[t, E, width]`` that were acted on from step ``first`` on, before an environment failed.

    The failure may be due to an invalid action, caused by a mask that allows nothing or by an observation of NaN.
    """
    dead = None if dead is None else dead[: len(rows)]
    check_numbers(description, env_ids, rows, np.zeros(rows.shape[:2]), iteration, first, dead)


def check_numbers(
    description: EnvDescription,
    env_ids: Sequence[int],
    rows: np.ndarray,
    rewards: np.ndarray,
    iteration: int | None,
    after: int = 0,
    dead: np.ndarray | None = None,
) -> None:
    """Checks a rollout's rewards and observations: finite numbers, valid indices, and masks that allow an action.

    Args:
        description: describes the environments.
        env_ids: global ids of the environments, in the order of the columns.
        rows: observations as the environments returned them, ``[T, E, width]``; or ``[T+1, E, width]`` with the last
            one, on which no action was taken.
        rewards: rewards as the environments returned them, ``[T, E]``.
        iteration: iterations done before this one; -1: the random actions before the first; None: those outside a run.
        after: steps of the rollout that were taken before the first row.
        dead: steps whose action was ignored, bool ``[T, E]``; None: there were none.

    Raises:
        EnvironmentFailureError: a check fails; one line with environment, step and value of the first failure.
    """
    found = [*_infinite(description, rows, rewards), *unusable(description, rows, rewards.shape, dead)]
    if found:
        step, env, what = min(found)
        step += after
        when = f"in step {step} of" if step else "before the first step of"
        text = f"environment {env_ids[env]} ({description.id}) gave {what} {when}"
        if iteration is None:
            raise EnvironmentFailureError(f"{text} random actions")
        rollout = f"iteration {iteration + 1}" if iteration >= 0 else "the random actions before the first iteration"
        handed = is_handed(description.id)  # which no command can load
        hint = "" if handed else f"; lockstep check {description.id} looks for such numbers"
        raise EnvironmentFailureError(f"{text} {rollout}{hint}")


def _infinite(description: EnvDescription, rows: np.ndarray, rewards: np.ndarray) -> list[Found]:
    """Finds the first reward, and the first component of a vector, that isn't finite, in one pass over each."""
    vectors = description.observation.floats(rows)[..., : description.observation.vector_size]
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(rewards.sum()) and math.isfinite(vectors.sum()):
            return []  # a sum is finite only if all terms are
    found: list[Found] = []
    for step, env in np.argwhere(~np.isfinite(rewards))[:1].tolist():
        found.append((step + 1, env, f"reward {rewards[step, env]:g}"))
    for step, env, column in np.argwhere(~np.isfinite(vectors))[:1].tolist():
        found.append((step, env, _observed(description, column, f"{vectors[step, env, column]:g}")))
    return found


def infinite(description: EnvDescription, rows: np.ndarray, live: np.ndarray) -> tuple[int, str] | None:
    """Returns the first of the ``live`` rows ``[E, width]`` with a vector that isn't finite, and what is in it."""
    none = np.zeros((1, 0))
    found = _infinite(description, rows[None], none)
    if found and not live.all():
        seen = np.where(live[:, None], rows, description.observation.zeros(1))
        found = _infinite(description, seen[None], none)
    return (found[0][1], found[0][2]) if found else None


def unusable(
    description: EnvDescription, rows: np.ndarray, acted: tuple[int, ...], dead: np.ndarray | None = None
) -> list[Found]:
    """Finds the first index outside its choices and the first mask that allows nothing, in rows ``[T, E, width]``.

    It checks masks in the first ``acted[0]`` rows only, and not those that are ``dead``, bool of shape ``acted``.
    """
    layout, found = description.observation, list[Found]()
    columns, counts = layout.indices
    if counts.size and (misfits := layout.misfits(rows)).any():
        step, env, number = np.argwhere(misfits)[0].tolist()
        at = columns.start + number
        leaf, value = layout.leaf_at(at), float(layout.floats(rows)[step, env, at])
        index, choices = leaf.index(at - leaf.start, value), leaf.range_of(at - leaf.start)
        found.append((step, env, f"{_observed(description, at, index)}, none of {choices},"))
    if layout.mask is not None and acted[0]:
        none = ~description.action.possible(layout.masks(rows[: acted[0]]))
        if dead is not None:
            none &= ~dead[..., None]
        for step, env, index in np.argwhere(none)[:1].tolist():
            found.append((step, env, f"an action mask that allows {nothing(description.action, index)}"))
    return found


def nothing(action: ActionLayout, index: int) -> str:
    """Says what a mask allows that leaves an action's index no choice, and what to give instead."""
    several = len(action.choices) > 1
    return f"nothing of index {index} (allow every choice of an index that doesn't matter)" if several else "nothing"


def _observed(description: EnvDescription, column: int, value: str) -> str:
    """Describes a value of an observation by the float32 column of the row that holds it."""
    leaf = description.observation.leaf_at(column)
    where = f" in {leaf.name!r}" if leaf.name else ""
    return f"observation {value}{where} (component {column - leaf.start})"
