"""Compares the gradient that ``lockstep.attach`` leaves on each rank with that of one rank that has all data.

Run by torchrun, with ``cuda`` or ``cpu`` as its argument. Each rank prints ``backend B difference D``: the greatest
difference of a component, relative to the greatest component.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn

import lockstep

ROWS = 64


def main() -> None:
    rank, world_size = lockstep.join()
    device = torch.device(sys.argv[1])
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    attached, rows = copy.deepcopy(alone), torch.randn(ROWS, 8).to(device)
    lockstep.attach(attached, torch.optim.SGD(attached.parameters(), lr=0.1))

    alone(rows).square().mean().backward()
    attached(rows[rank::world_size]).square().mean().backward()

    expected, got = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (alone, attached)
    )
    difference = float((got - expected).abs().max() / expected.abs().max())
    carriers = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    carrier = carriers.get(device.type, carriers["cpu"])  # by way of the host, if none carries from such a device
    print(f"backend {carrier} difference {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
