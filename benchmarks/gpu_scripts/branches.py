"""Trains as ``lockstep WORDS…`` does, in this process, with graphs of as many branches as the first word says.

The last line printed is ``forks N``: in how many places of the graphs that were captured branches begin.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lockstep.cli import main
from lockstep.torch_engine.nets.shards import Calls
from lockstep.torch_engine.setup import accelerator

forks = 0
original = accelerator._in_branches


def counted(device: torch.device, calls: Calls) -> list[Any]:
    """Calls functions in branches, and counts where there are several."""
    global forks
    forks += len(calls) > 1
    return original(device, calls)


if __name__ == "__main__":
    accelerator.BRANCHES = int(sys.argv[1])
    accelerator._in_branches = counted
    code = main(sys.argv[2:])
    print("forks", forks)
    sys.exit(code)
