"""Reads facts of the script's process group; the doctor never communicates through it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_facts() -> dict[str, Any]:
    """Returns size and backend of the script's default process group; empty while there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    try:
        return {"size": dist.get_world_size(), "backend": str(dist.get_backend())}
    except (RuntimeError, ValueError):
        return {}  # it is being taken down
