"""Reads from checkpoints which runs with the same loss name were trained with which function."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.checkpoint import STATE, checkpoints_in
from lockstep.runs.directory import CHECKPOINTS
from lockstep.runs.listing import UnreadableError, read_object
from lockstep.training.own_loss.fingerprint import KEY, Fingerprint, difference, fingerprint_in

COUNTED = ("loss", "loss_kwargs", "clip_range", "value_clip_range", "entropy_coef", "value_coef")
"""Settings in ``ppo`` that a fingerprint depends on, besides algorithm and environment."""


def facts_of_loss(run: Path) -> dict[str, Any] | None:
    """Reads what a run's newest checkpoint records of its loss; None if there is no checkpoint or it can't be read."""
    for checkpoint in checkpoints_in(run / CHECKPOINTS)[:1]:
        try:
            found = read_object(checkpoint / STATE)
        except (OSError, UnreadableError):
            return None
        return {name: found[name] for name in (KEY, "global_step") if name in found}
    return None


def told_apart(runs: Sequence[tuple[Mapping[str, Any], Path]]) -> list[str | None]:
    """Names the losses of runs so that different functions have different names.

    Args:
        runs: the config of each run as JSON, and its directory.

    Returns:
        The names in the configs. ``, function 1``, ``, function 2`` are appended if runs that differ in nothing else
        have different functions under one name. For other runs a fingerprint can't tell.
    """
    kinds: dict[str, list[tuple[str, Fingerprint]]] = defaultdict(list)
    names, places = [_loss_of(config) for config, _ in runs], list[int]()
    for name, (config, run) in zip(names, runs, strict=True):
        found = None if name is None else fingerprint_in(facts_of_loss(run) or {})
        places.append(0 if found is None else _place(kinds[name or ""], _counted(config), found))
    several = {
        (name, counted)
        for name, seen in kinds.items()
        for counted in (kind[0] for kind in seen)
        if sum(kind[0] == counted for kind in seen) > 1
    }
    return [
        f"{name}, function {place}" if place and (name, _counted(config)) in several else name
        for name, place, (config, _) in zip(names, places, runs, strict=True)
    ]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _loss_of(config: Mapping[str, Any]) -> str | None:
    name = _section(config, "ppo").get("loss")
    return name if isinstance(name, str) else None


def _counted(config: Mapping[str, Any]) -> str:
    """Returns what a fingerprint depends on besides the function, as text."""
    ppo = _section(config, "ppo")
    rest = [config.get("algorithm"), _section(config, "grpo").get("kl_coef"), config.get("engine"), config.get("env")]
    return json.dumps([[ppo.get(name) for name in COUNTED], rest], sort_keys=True, default=str)


def _place(seen: list[tuple[str, Fingerprint]], counted: str, found: Fingerprint) -> int:
    """Returns the position of a function among those seen before, from 1 on; appends it if it is new."""
    for place, (other, kind) in enumerate(seen, 1):
        if other == counted and difference(kind, found) is None:
            return place
    seen.append((counted, found))
    return len(seen)
