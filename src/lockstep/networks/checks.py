"""Checks of networks once they are built, the same for both engines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.config.run import Config
from lockstep.networks.returned import ReturnedError
from lockstep.networks.spec import LOG_STD_LIMITS, PolicyNet, Shapes


def check_initial_std(config: Config, net: PolicyNet) -> None:
    """Checks that a state-dependent log standard deviation starts where it has a gradient.

    Raises:
        ValueError: it would be clamped everywhere and never learn; one line.
    """
    (low, high), begins = LOG_STD_LIMITS, config.network.log_std_init
    if net.state_dependent_std and net.custom is None and not low <= begins <= high:
        raise ValueError(
            f"network.log_std_init: {begins:g}, but network.state_dependent_std keeps it within {low:g} and {high:g}, "
            "beyond which it has no gradient and never learns; begin within them, or leave network.state_dependent_std "
            "out"
        )


def check_normalizable(config: Config, net: PolicyNet, env_id: str) -> None:
    """Checks that an environment observes numbers that ``normalize.observations`` can normalise.

    Raises:
        ValueError: it doesn't; one line.
    """
    if config.normalize.observations and not net.observation.vector_size:
        raise ValueError(
            f"normalize.observations: {env_id} observes no numbers (images are scaled to 0 … 1 and indices become "
            "one-hot vectors anyway); leave it out"
        )


def stored_parameters(arrays: Mapping[str, np.ndarray], prefix: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Returns a checkpoint's parameters, whose names begin with ``prefix``, by the names of the networks' own.

    Raises:
        KeyError: one isn't there.
        ValueError: one has another shape than the networks', or they have none of that name; one line.
    """
    put_back = "put back the settings, or the class, that it was trained with"
    found = {name: arrays[prefix + name] for name in shapes}
    for name, shape in shapes.items():
        if (stored := found[name].shape) != shape:
            raise ValueError(
                f"network: {name} has shape {stored} in the checkpoint, but {shape} in the networks that the run's "
                f"config describes; {put_back}"
            )
    for name in arrays:
        if name.startswith(prefix) and name.removeprefix(prefix) not in shapes:
            raise ValueError(
                f"network: {name.removeprefix(prefix)} is in the checkpoint, but the networks that the run's config "
                f"describes have no such parameter; {put_back}"
            )
    return found


def check_outputs(
    name: str, net: PolicyNet, outputs: tuple[int, ...], values: tuple[int, ...] | None, rows: int
) -> None:
    """Checks the shapes that a user's own module, called ``name`` in errors, returned for ``rows`` observations.

    Raises:
        ValueError: they aren't those of outputs and values; one line.
    """
    if outputs != (rows, net.outputs) or (net.critic and values != (rows,)):
        counted = "a single observation" if rows == 1 else f"{rows} observations"
        raise ValueError(
            f"{name} gave outputs of shape {outputs} and values of shape {values} for {counted}; needed are "
            f"({rows}, {net.outputs}) and ({rows},)"
        )


def needed_instead(name: str, net: PolicyNet, error: ReturnedError) -> ValueError:
    """Returns the error for a module that returned something of another kind, with what is needed."""
    outputs = f"outputs [n, {net.outputs}]"
    needed = f"a tuple of {outputs} and values [n]" if net.critic else f"a tensor of {outputs}"
    return ValueError(f"{name} {error}; {needed} is needed for n observations")


def other_type(name: str, parameter: str, found: str, kept: str, method: str) -> ValueError:
    """Returns the error for a parameter of another type than the ``kept`` one; the module computes in ``method``."""
    return ValueError(
        f"{name} has a parameter {parameter} of {found}, but parameters are kept and trained in {kept}; make it that, "
        f"and cast in {method} what is to be computed otherwise"
    )


def running_statistics(name: str, where: str, apart: str) -> ValueError:
    """Returns the error for a module that keeps running statistics ``where``, which would differ between ``apart``."""
    return ValueError(
        f"{name} keeps running statistics ({where}), which would differ between {apart}; use LayerNorm or GroupNorm, "
        "or normalize.observations"
    )
