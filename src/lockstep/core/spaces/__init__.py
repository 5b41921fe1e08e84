"""Observation and action spaces as the rest of the program sees them: one flat row per observation or action."""

from __future__ import annotations

from lockstep.core.spaces.actions import SUPPORTED_ACTIONS, ActionLayout, action_layout, bounded_within
from lockstep.core.spaces.kinds import ImageBox, channels_first, is_image, is_text, texts_in
from lockstep.core.spaces.observations import (
    MASK,
    SUPPORTED_OBSERVATIONS,
    Leaf,
    ObservationLayout,
    descend,
    nested,
    observation_layout,
)
from lockstep.core.spaces.stored import layouts_from_json

__all__ = [
    "MASK",
    "SUPPORTED_ACTIONS",
    "SUPPORTED_OBSERVATIONS",
    "ActionLayout",
    "ImageBox",
    "Leaf",
    "ObservationLayout",
    "action_layout",
    "bounded_within",
    "channels_first",
    "descend",
    "is_image",
    "is_text",
    "layouts_from_json",
    "nested",
    "observation_layout",
    "texts_in",
]
