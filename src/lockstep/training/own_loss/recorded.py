"""What checkpoints say of losses of the user's own: which runs of one name were trained with which function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.checkpoint import STATE, checkpoints_in
from lockstep.runs.directory import CHECKPOINTS
from lockstep.runs.listing import UnreadableError, read_object
from lockstep.training.own_loss.fingerprint import KEY, Fingerprint, difference, fingerprint_in


def facts_of_loss(run: Path) -> dict[str, Any] | None:
    """Reads what a run's newest checkpoint says of its loss; None: it has no checkpoint, or can't be read."""
    for checkpoint in checkpoints_in(run / CHECKPOINTS)[:1]:
        try:
            found = read_object(checkpoint / STATE)
        except (OSError, UnreadableError):
            return None
        return {name: found[name] for name in (KEY, "global_step") if name in found}
    return None


def told_apart(losses: Sequence[tuple[str | None, Path]]) -> list[str | None]:
    """Names the losses of runs so that different functions have different names.

    Args:
        losses: of each run the name that its config has, and its directory.

    Returns:
        The names, with ``, function 2`` and so on behind those under which runs have several.
    """
    kinds: dict[str | None, list[Fingerprint]] = {}
    numbers = []
    for name, run in losses:
        found = None if name is None else fingerprint_in(facts_of_loss(run) or {})
        numbers.append(0 if found is None else _number(kinds.setdefault(name, []), found))
    return [
        f"{name}, function {number}" if number and len(kinds[name]) > 1 else name
        for number, (name, _) in zip(numbers, losses, strict=True)
    ]


def _number(kinds: list[Fingerprint], each: Fingerprint) -> int:
    """Returns the place of a function among those that were seen, from 1 on; a new one is added."""
    for place, kind in enumerate(kinds):
        if difference(kind, each) is None:
            return place + 1
    kinds.append(each)
    return len(kinds)
