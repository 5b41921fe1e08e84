"""Reads at which steps a run's ``total_steps`` was changed, and with it its schedules, of whatever files it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.checkpoint import STATE, checkpoints_in
from lockstep.runs.directory import CHECKPOINTS, SUMMARY
from lockstep.runs.listing import object_if_any

ROW = ("global_step", "was", "is")
SCHEDULES = ("schedule", "entropy_schedule", "clip_schedule")


def lengths_of(run: Path, config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Reads at which steps a run's length was changed, with what it ``was`` before and ``is`` since.

    A run that goes on, or was killed, has no summary: there its newest checkpoint says so, and of a session that has
    left no checkpoint yet the run's ``config``, as JSON.
    """
    summary = object_if_any(run / SUMMARY)
    if isinstance(summary.get("lengths"), list):
        return _rows(summary)
    state = next((object_if_any(checkpoint / STATE) for checkpoint in checkpoints_in(run / CHECKPOINTS)[:1]), {})
    last: dict[str, Any] = {
        "global_step": state.get("global_step"),
        "was": state.get("total_steps"),
        "is": config.get("total_steps"),
    }
    is_new = _is_row(last) and last["global_step"] and last["was"] != last["is"] and _falls(config)
    return [*_rows(state), *([last] if is_new else [])]


def _rows(facts: Mapping[str, Any]) -> list[dict[str, int]]:
    found = facts.get("lengths")
    return [row for row in found if _is_row(row)] if isinstance(found, list) else []


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name), int) for name in ROW)


def _falls(config: Mapping[str, Any]) -> bool:
    """What :func:`lockstep.training.limits.follows_length` tells, of a config that anybody may have written."""
    ppo = config.get("ppo")
    return isinstance(ppo, dict) and any(ppo.get(name) == "linear" for name in SCHEDULES)
