"""GRPO's reference policy, from which the trained one is kept from moving far: that of a run, or the initial one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep.config.run import Config
from lockstep.core.fingerprint import sha256_of
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
    found = _read(config.grpo.reference)
    arrays = {name: found[POLICY + name] for name in shapes if POLICY + name in found}
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"grpo.reference: {config.grpo.reference} has no parameter {name} of shape {shape}")
    return arrays


def reference_digest(config: Config) -> str | None:
    """Computes the sha256 of the reference policy's parameters; None where the config names none."""
    if config.algorithm != "grpo" or config.grpo.reference is None:
        return None
    return sha256_of({name: x for name, x in _read(config.grpo.reference).items() if name.startswith(POLICY)})


def config_digest(config: Config) -> str:
    """Computes the sha256 of what ranks must agree on: of a reference policy its parameters, wherever a host has it."""
    named = config.grpo.reference is not None
    grpo = config.grpo.model_copy(update={"reference": reference_digest(config)}) if named else config.grpo
    return hashlib.sha256(config.model_copy(update={"grpo": grpo}).model_dump_json().encode()).hexdigest()


def check_same_reference(config: Config, facts: Mapping[str, Any]) -> None:
    """Refuses to go on with another reference policy than a checkpoint was trained with, which lies in the same place.

    Raises:
        ValueError: the digests differ; one line.
    """
    before = facts.get("reference_sha256")
    now = None if before is None else reference_digest(config)
    if before is not None and now is not None and now != before:
        raise ValueError(
            f"grpo.reference: {config.grpo.reference} is another policy than the one that this run was trained with "
            f"(sha256 {now:.16}… instead of {before:.16}…); put that one back, or start a new run"
        )


def _read(reference: str) -> Mapping[str, np.ndarray]:
    path, which = find_run(reference)
    return find_checkpoint(path / CHECKPOINTS, which).arrays
