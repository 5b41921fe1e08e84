"""GRPO's reference policy, to which the KL penalty keeps the trained one close: that of a run, or the initial one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.core.fingerprint import sha256_of
from lockstep.core.user_code.handed import is_handed
from lockstep.runs.checkpoint import POLICY, STATE, checkpoints_in, find_checkpoint
from lockstep.runs.directory import CHECKPOINTS
from lockstep.runs.finding import find_run, run_if_any, seeds_in
from lockstep.runs.listing import UnreadableError, read_object
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers.service import flattened


def with_reference(config: Config, runs_dir: str, resumed: Path | None = None) -> Config:
    """Replaces the name of GRPO's reference policy by the path of one checkpoint, on which the run then depends.

    The path is absolute, because the run may be resumed from another directory.

    Args:
        config: of the run.
        runs_dir: where a name is looked for.
        resumed: the run's directory if it is resumed; then a name is looked for beside it. None if it is new.

    Raises:
        ValueError: there is no such run or checkpoint, observations are normalised, networks differ, or the
            reference has no weight; one line.
    """
    if config.algorithm != "grpo" or config.grpo.reference is None:
        return config
    name = config.grpo.reference
    if not config.grpo.kl_coef:
        raise ValueError(f"grpo.reference: {name}, but grpo.kl_coef is 0; give it a weight, e.g. 0.05")
    runs_dir = runs_dir if resumed is None else str(resumed.parent)
    try:
        if resumed is not None and run_if_any(name, runs_dir) is None:
            raise ValueError(f"{name} is gone, without which this run can't go on")
        path, which = find_run(name, runs_dir)
        theirs, reference = stored_config(path), str(_checkpoint_of(path, which))
    except ValueError as error:
        now = "; put it back, or give --grpo.reference the place where it lies now, in a run's directory"
        raise ValueError(f"grpo.reference: {str(error).removeprefix('run: ')}{now if resumed else ''}") from None
    for whose, normalize in (("it", theirs.normalize), ("this run", config.normalize)):
        if normalize.observations:
            raise ValueError(
                f"grpo.reference: {name}, but {whose} normalises observations by statistics of its own, so the two "
                "policies would see different ones; use runs without normalize.observations"
            )
    if resumed is None:
        check_same_networks(config, theirs)
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"reference": reference})})


def _checkpoint_of(run: Path, which: str) -> Path:
    """Returns the absolute path of one of a run's checkpoints."""
    path = find_checkpoint(run / CHECKPOINTS, which).path
    assert path is not None, "it was read from a directory"
    return Path(os.path.abspath(path))  # links stay, because they may lead elsewhere on other hosts


def same_reference(old: str | None, new: str | None, run: Path) -> bool:
    """Tells whether two names of a run's reference policy mean the same one.

    Older versions stored relative paths. One that is the end of the other's absolute path counts as the same; the run's
    checkpoints hold the policy's sha256, which later shows if another policy is there. Other names are the same if they
    lead to the same place, or to the policy with that sha256, such as a moved or copied checkpoint.
    """
    if old is None or new is None:
        return old == new
    relative, whole = sorted((Path(old), Path(new)), key=Path.is_absolute)
    if relative.parent.name == CHECKPOINTS and whole.parts[-len(relative.parts) :] == relative.parts:
        return True
    place = _checkpoint_named(new, str(run.parent))
    if place is None:
        return False
    return place == _checkpoint_named(old, str(run.parent)) or digests_before(run) == {policy_digest(str(place))}


def _checkpoint_named(reference: str, runs_dir: str) -> Path | None:
    """Returns the checkpoint that the name of a reference policy means; None if there is none."""
    try:
        return _checkpoint_of(*find_run(reference, runs_dir))
    except ValueError:
        return None


def reference_arrays(
    config: Config, shapes: Mapping[str, tuple[int, ...]], initial: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray] | None:
    """Returns the parameters of the reference policy by name; None if the config needs none.

    ``initial`` returns this run's initial parameters, which are the reference unless the config names a run.

    Raises:
        ValueError: there is no such run, or its networks have other shapes; one line.
    """
    if config.algorithm != "grpo" or not config.grpo.kl_coef:
        return None
    if config.grpo.reference is None:
        return initial()
    found = _read(config.grpo.reference)
    arrays = {name: found[POLICY + name] for name in shapes if POLICY + name in found}
    own = (name.removeprefix(POLICY) for name in found if name.startswith(f"{POLICY}actor."))
    further = None if config.network.custom else next((name for name in own if name not in shapes), None)
    if further is not None:
        raise ValueError(
            f"grpo.reference: {config.grpo.reference} has a parameter {further}, which this run's networks haven't; "
            "give this run the reference's network settings"
        )
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"grpo.reference: {config.grpo.reference} has no parameter {name} of shape {shape}")
    return arrays


def check_same_networks(config: Config, theirs: Config) -> None:
    """Checks that the reference's settings give the same function in this run's networks, which compute it.

    It compares only settings that GRPO's policy uses; the parameters' shapes are checked apart from it.

    Raises:
        ValueError: a setting differs; one line.
    """
    ours, others = _function_of(config), _function_of(theirs)
    for name, value in ours.items():
        if others.get(name, value) != value:
            raise ValueError(
                f"grpo.reference: {config.grpo.reference} was trained with {name} {others[name]}, this run has "
                f"{value}, by which it would be another policy here; give this run {name} {others[name]}"
            )
    mine, other = config.network.custom, theirs.network.custom
    if mine is not None and other is not None and mine != other and not (is_handed(mine) or is_handed(other)):
        raise ValueError(
            f"grpo.reference: {config.grpo.reference} was trained with network.custom {other}, this run has {mine}; "
            f"give this run {other}, which may be another name of the same class if that has moved"
        )


def _function_of(config: Config) -> dict[str, Any]:
    """Returns the settings that decide what an actor computes from its parameters, without those of no effect."""
    network = config.network
    out: dict[str, Any] = {"precision": config.precision, "network.squash": network.squash}
    out["network.custom"] = None if network.custom is None else "a class"  # the caller compares the names
    if network.custom is not None:
        return out | {"network.custom_kwargs": network.custom_kwargs}
    out |= {"network.hidden_sizes": list(network.hidden_sizes), "network.recurrent": network.recurrent}
    out |= {"network.recurrent_size": network.recurrent_size} if network.recurrent else {}
    return out | ({"network.activation": network.activation} if network.hidden_sizes else {})


def reference_digest(config: Config) -> str | None:
    """Returns the sha256 of the reference policy's parameters; None if the config names none."""
    if config.algorithm != "grpo" or config.grpo.reference is None:
        return None
    return policy_digest(config.grpo.reference)


def policy_digest(reference: str) -> str:
    """Returns the sha256 of the parameters of a policy, named as in a config."""
    return sha256_of({name: x for name, x in _read(reference).items() if name.startswith(POLICY)})


def digests_before(run: Path) -> set[str | None]:
    """Returns the digests of the reference policies of a run's checkpoints, or of those of a group's seeds.

    None stands for a checkpoint without a digest; unreadable checkpoints are skipped.
    """
    found: set[str | None] = set()
    for checkpoint in (path for each in (run, *seeds_in(run)) for path in checkpoints_in(each / CHECKPOINTS)):
        with contextlib.suppress(OSError, UnreadableError):
            found.add(read_object(checkpoint / STATE).get("reference_sha256"))
    return found


def config_facts(config: Config) -> dict[str, str]:
    """Returns what ranks must agree on: each setting, and the digest of all, which also compares what is secret."""
    shown = flattened(shown_value(_with_digest_of_reference(config).model_dump(mode="json")))
    return {**{f"config.{key}": json.dumps(value) for key, value in shown.items()}, "config": config_digest(config)}


def config_digest(config: Config) -> str:
    """Returns the sha256 of the config, with the reference's digest in place of its path."""
    return hashlib.sha256(_with_digest_of_reference(config).model_dump_json().encode()).hexdigest()[:16]


def _with_digest_of_reference(config: Config) -> Config:
    if config.grpo.reference is None:
        return config
    grpo = config.grpo.model_copy(update={"reference": reference_digest(config)})
    return config.model_copy(update={"grpo": grpo})


def check_same_reference(config: Config, facts: Mapping[str, Any]) -> None:
    """Refuses to resume if the reference policy was replaced since the checkpoint, even in the same place.

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
