"""The CPU as ``--device xpu``: two devices whose memory nothing looks at, and whose gradients travel by gloo.

Run as a script it is the command ``lockstep``. Unlike the emulated accelerator it can stand behind DDP.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def main() -> int:
    """Runs ``lockstep`` with the CPU in the part of an accelerator, whose own backend is gloo."""
    from lockstep.cli import main as lockstep
    from lockstep.torch_engine import session
    from lockstep.torch_engine.distributed import process_group
    from lockstep.torch_engine.nets import memory
    from lockstep.torch_engine.setup import accelerator

    cpu: Any = torch.cpu
    cpu.device_count, cpu.current_device = (lambda: 2), (lambda: 0)
    accelerator.TYPES["xpu"], accelerator.NEEDED = "cpu", ()
    accelerator.take_device = lambda device, local_rank: torch.device("cpu")
    memory.HOST.clear()
    session.own_backend = lambda config: "gloo"
    process_group.backends_of = lambda own: "gloo"
    return lockstep(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
