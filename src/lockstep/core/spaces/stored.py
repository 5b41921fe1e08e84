"""Restores layouts of observations and actions from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.core.spaces.actions import ActionLayout
from lockstep.core.spaces.observations import Leaf, ObservationLayout


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def layouts_from_json(
    observation: Mapping[str, Any], action: Mapping[str, Any]
) -> tuple[ObservationLayout, ActionLayout]:
    """Restores layouts that ``dataclasses.asdict`` made and JSON stored."""
    leaves = tuple(Leaf(**_tuples(leaf)) for leaf in observation["leaves"])
    return ObservationLayout(leaves), ActionLayout(**_tuples(action))
