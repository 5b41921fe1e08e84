"""Watches any PyTorch training script and says whether its ranks train one agent; if not, with cause and fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.doctor.replicated import check_replicated

__all__ = ["check_replicated"]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that ``import lockstep.doctor`` loads no framework."""
    if name == "check_replicated":
        from lockstep.doctor.replicated import check_replicated

        return check_replicated
    raise AttributeError(f"module 'lockstep.doctor' has no attribute {name!r}")
