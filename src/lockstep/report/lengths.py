"""Reads at which steps a run's ``total_steps``, and so its schedules, changed, from whichever files the run has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.checkpoint import STATE, checkpoints_in
from lockstep.runs.directory import CHECKPOINTS, SUMMARY
from lockstep.runs.finding import checkpoints_of
from lockstep.runs.listing import object_if_any

ROW = ("global_step", "was", "is")
SCHEDULES = ("schedule", "entropy_schedule", "clip_schedule")


def lengths_of(run: Path, config: Mapping[str, Any], links: bool = True) -> list[dict[str, int]]:
    """Returns at which steps a run's ``total_steps`` changed, with what it ``was`` before and ``is`` since.

    A run that goes on, or was killed, has no summary: then its newest checkpoint says so, and for a session without a
    checkpoint so far the run's ``config`` (as JSON). Without ``links``, a directory of checkpoints that is a link isn't
    read.
    """
    summary = object_if_any(run / SUMMARY)
    if isinstance(summary.get("lengths"), list):
        return _rows(summary)
    checkpoints = checkpoints_in(run / CHECKPOINTS) if links else checkpoints_of(run)
    state = next((object_if_any(checkpoint / STATE) for checkpoint in checkpoints[:1]), {})
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
    """Returns :func:`lockstep.training.schedules.follows_length` of a config that may hold anything."""
    ppo = config.get("ppo")
    return isinstance(ppo, dict) and any(ppo.get(name) == "linear" for name in SCHEDULES)
