"""Shows each of MuJoCo's own warnings once, on standard error, instead of once an environment and in a file."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any


@functools.cache
def show_once(message: str) -> None:
    """Print a warning the first time it comes; what a model file's author should read is left out."""
    if "deprecated" not in message:
        print(f"lockstep: warning: MuJoCo: {message}", file=sys.stderr)


def calm_mujoco(spec: Any) -> None:
    """Send MuJoCo's warnings through :func:`show_once` if this environment is one of Gymnasium's MuJoCo ones."""
    if "mujoco" not in str(getattr(spec, "entry_point", "")) or importlib.util.find_spec("mujoco") is None:
        return
    import mujoco

    if hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(show_once)  # pyright: ignore[reportAttributeAccessIssue]
