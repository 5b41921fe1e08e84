"""GRPO's reference policy, from which the trained one is kept from moving far: that of a run, or the initial one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.config.run import Config
from lockstep.runs.checkpoint import POLICY, find_checkpoint
from lockstep.runs.directory import CHECKPOINTS, find_run


def reference_arrays(
    config: Config, shapes: Mapping[str, tuple[int, ...]], initial: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray] | None:
    """Reads the parameters of the reference policy by name; None where the config has no use for one.

    ``initial`` makes those that this run begins with: the reference where the config names no other.

    Raises:
        ValueError: there is no such run, or its networks have other shapes; one line.
    """
    if config.algorithm != "grpo" or not config.grpo.kl_coef:
        return None
    if config.grpo.reference is None:
        return initial()
    path, which = find_run(config.grpo.reference)
    found = find_checkpoint(path / CHECKPOINTS, which).arrays
    arrays = {name: found[POLICY + name] for name in shapes if POLICY + name in found}
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"grpo.reference: {config.grpo.reference} has no parameter {name} of shape {shape}")
    return arrays
