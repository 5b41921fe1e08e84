"""Trains as ``lockstep WORDS…`` does, run by torchrun, with all ranks of a host on its first GPU.

A run refuses that, for nothing would be gained; but kernels show so on one GPU whether their bits depend on how many
ranks share the shards. The words must ask for ``--backend gloo``: NCCL takes a GPU once.
"""

from __future__ import annotations

import sys

import torch

from lockstep.cli import main
from lockstep.torch_engine.setup import accelerator

take_device = accelerator.take_device


def take_first(device: str, local_rank: int) -> torch.device:
    """Takes the first GPU, whichever rank asks."""
    return take_device(device, 0)


if __name__ == "__main__":
    accelerator.count_devices = lambda device: 64
    accelerator.lacking = lambda device: []
    accelerator.take_device = take_first
    sys.exit(main(sys.argv[1:]))
