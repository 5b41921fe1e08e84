"""Ranks of a user's own script: their place, their process group, and whether PyTorch parallelises a module already."""

from __future__ import annotations

import atexit
import datetime
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.topology import Topology, from_environment
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.process_group import (
    backends_of,
    close_process_group,
    device_backend,
    join_process_group,
)
from lockstep.torch_engine.setup import accelerator


def script_topology() -> Topology:
    """Returns this process's place, as the script's own process group says, or else the launcher's variables.

    Raises:
        ValueError: if the variables are incomplete or contradict one another.
    """
    has_group = dist.is_available() and dist.is_initialized()
    topology = from_environment(met=has_group)
    if not has_group:
        return topology
    return replace(topology, rank=dist.get_rank(), world_size=dist.get_world_size(), launched=True)


def join_script(topology: Topology, timeout: datetime.timedelta) -> Communicator:
    """Joins the ranks of a script, in its own process group if it has one, else in a new one.

    In the first case the collectives use a group of their own, apart from the script's.
    """
    backend, group = None, None
    if accelerator.has_one_each(topology.local_world_size):
        backend = device_backend(accelerator.current_accelerator().type)
    if dist.is_initialized():
        backend = backend if backend and backend in dist.get_backend_config() else None
        group = dist.new_group(timeout=timeout, backend=backends_of(backend))
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
    else:
        if backend is not None:
            accelerator.take_own(topology.local_rank)
        join_process_group(topology, backend, timeout)
        atexit.register(_leave)
    device = torch.device("cpu") if backend is None else accelerator.current_accelerator()
    communicator = Communicator(topology, None, device, backend, group)
    communicator.open_slots(timeout)
    atexit.register(communicator.close)  # before the process group: what was registered last is called first
    return communicator


def _leave() -> None:
    """Leaves the process group when Python exits, maybe after an exception."""
    close_process_group(failed=getattr(sys, "last_value", None) is not None)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that DDP wraps, or the module itself if DDP doesn't wrap all of it."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def ddp_in_forward() -> DistributedDataParallel | None:
    """Returns the DDP module whose forward pass this process is in, or None."""
    return DistributedDataParallel._active_ddp_module


def parallel_wrapper(module: nn.Module) -> str | None:
    """Returns the name of PyTorch's own data parallelism that handles a module or a part of it, or None."""
    for part in module.modules():
        classes = {cls.__name__ for cls in type(part).__mro__}  # by name: FSDP is slow to import
        if "FSDPModule" in classes:
            return "fully_shard"
        if isinstance(part, (DistributedDataParallel, nn.DataParallel)) or "FullyShardedDataParallel" in classes:
            return type(part).__name__
    return "DTensor" if any(hasattr(p, "placements") for p in module.parameters()) else None


def count_up(key: str) -> int:
    """Adds one to a number that all ranks see, and returns it; not a collective."""
    return dist.distributed_c10d._get_default_store().add(key, 1)


def count_so_far(key: str) -> int:
    """Returns how often :func:`count_up` was called for a key on any rank so far."""
    return dist.distributed_c10d._get_default_store().add(key, 0)


def use_own_gpu() -> None:
    """Makes ``cuda`` mean this rank's own GPU, if the host has one for every rank."""
    topology = script_topology()
    if topology.local_world_size > 1 and accelerator.has_one_each(topology.local_world_size):
        accelerator.take_own(topology.local_rank)
