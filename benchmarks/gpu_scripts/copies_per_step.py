"""Counts the copies between host and GPU of a run: ``copies_per_step.py WORDS…`` trains as ``lockstep WORDS…`` does.

The words ask for one rank, which trains in this process. The last line printed is ``copies N``.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.cli import main

COPIES = ("Memcpy HtoD", "Memcpy DtoH")


if __name__ == "__main__":
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        code = main(sys.argv[1:])
    print("copies", sum(event.name.startswith(COPIES) for event in profiler.events() or ()))
    sys.exit(code)
