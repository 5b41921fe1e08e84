"""Trains as ``lockstep WORDS…`` does, in this process, and raises where an update waits for the GPU.

The words ask for one rank, without CUDA graphs, in which nothing may wait anyway. The last line printed is
``updates N``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lockstep.cli import main
from lockstep.torch_engine.accelerated.update import AcceleratedUpdate

launch = AcceleratedUpdate.__call__
updates = 0


def watched(self: AcceleratedUpdate, *words: Any) -> Any:
    """Launches an update while PyTorch raises at every wait."""
    global updates
    updates += 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        return launch(self, *words)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    AcceleratedUpdate.__call__ = watched  # pyright: ignore[reportAttributeAccessIssue]
    code = main(sys.argv[1:])
    print("updates", updates)
    sys.exit(code)
