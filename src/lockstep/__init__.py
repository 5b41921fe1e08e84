"""Lockstep: one reinforcement-learning agent on many devices, the same bytes on every number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.policy import load_policy

__version__ = "0.1.0"
__all__ = ["__version__", "load_policy"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that ``import lockstep`` loads no framework."""
    if name == "load_policy":
        from lockstep.policy import load_policy

        return load_policy
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
