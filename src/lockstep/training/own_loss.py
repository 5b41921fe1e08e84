"""A loss of the user's own, which a config names: finding it, and what it must be before anything is trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep.config.handed import handed_object, is_handed
from lockstep.core.process import where_it_was_looked_for
from lockstep.core.users_code import one_line, users_error, users_line

SETTING = "ppo.loss"
LossFunction = Callable[[Any], Any]
"""From a :class:`lockstep.training.losses.LossSample` to the loss of each of its samples ``[rows]``."""


def loss_function(name: str) -> LossFunction:
    """Finds what ``ppo.loss`` names: imports ``module:function``, or loads a function that was handed over.

    Raises:
        ValueError: there is none; one line.
    """
    if is_handed(name):
        return handed_object(SETTING, name)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        where = where_it_was_looked_for(error, module)
        raise ValueError(f"{SETTING}: {name} can't be imported: {error}{where}") from None
    if not callable(found):
        raise ValueError(f"{SETTING}: {name} is {type(found).__name__}, which can't be called; name a function")
    return found


def made_up_samples(outputs: int, critic: bool, reference: bool) -> dict[str, np.ndarray | None]:
    """Makes up the arrays of a few samples, float32 by the names of a sample's fields, the same every time.

    There are as many rows as can't be taken for the ``outputs`` of the actor. Values and returns are positive, for a
    loss may take their logarithm.
    """
    rows, draws = 5 if outputs != 5 else 7, np.random.Generator(np.random.Philox(0))

    def normal(*shape: int) -> np.ndarray:
        return draws.standard_normal(shape).astype(np.float32)

    log_prob = -0.1 - np.abs(normal(rows))
    out: dict[str, np.ndarray | None] = {
        "log_prob": log_prob,
        "old_log_prob": log_prob + 0.05 * normal(rows),
        "entropy": 0.1 + np.abs(normal(rows)),
        "advantage": normal(rows),
        "actor_output": normal(rows, outputs),
    }
    for name in ("value", "old_value", "return_"):
        out[name] = 0.1 + np.abs(normal(rows)) if critic else None
    out["reference_log_prob"] = log_prob + 0.05 * normal(rows) if reference else None
    return out


TRAINED = ("log_prob", "entropy", "value", "actor_output")
"""Fields of a sample through which the networks are trained."""


def check_loss(name: str, try_out: Callable[[], tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> set[str]:
    """Tries a loss on made-up samples; returns the names of ``TRAINED`` through which it has a gradient.

    Args:
        name: as the config has it.
        try_out: computes the loss ``[rows]`` of the samples, and the gradients of its sum by the names of ``TRAINED``.

    Raises:
        ValueError: it raises, returns something else than a finite loss of each sample, depends on more than its
            samples, or on nothing that is trained; one line, with the place in the user's code if it is one there.
    """
    try:
        losses, gradients = try_out()
        again, _ = try_out()
    except Exception as error:  # of the user's own
        if str(error).startswith(SETTING):
            raise ValueError(str(error).replace(f"{SETTING}: it", f"{SETTING}: {name}", 1)) from None
        cause = users_error(error) or error
        raise ValueError(f"{SETTING}: {name}: {one_line(error)}{users_line(error)}") from cause
    if not np.isfinite(losses).all():
        raise ValueError(f"{SETTING}: {name} gave {losses.tolist()} of made-up samples, which isn't finite")
    if not np.array_equal(losses, again):
        raise ValueError(
            f"{SETTING}: {name} gave other numbers when it was called again with the same samples; a loss must be a "
            "function of its sample alone, without numbers drawn or kept"
        )
    if not all(np.isfinite(x).all() for x in gradients.values()):
        raise ValueError(f"{SETTING}: the gradient of {name} isn't finite on made-up samples")
    through = {field for field, gradient in gradients.items() if gradient.any()}
    if not through:
        raise ValueError(
            f"{SETTING}: {name} has no gradient: what it returns doesn't depend on {', '.join(TRAINED[:-1])} or "
            f"{TRAINED[-1]}, or was detached from them"
        )
    return through
